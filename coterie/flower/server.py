"""The server app: Flower's grid as a transport, and experiments read from a plan file that the run's `run` names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

try:
    from flwr.app import Context, Message
    from flwr.serverapp import Grid, ServerApp
except ImportError as reason:
    from coterie.flower import missing

    raise missing("flwr") from reason

from coterie.errors import CoterieError
from coterie.files import read_json
from coterie.flower import wire
from coterie.flower.checks import Inspector
from coterie.flower.message import Encoder, parcels_of
from coterie.flower.plan import Plan
from coterie.flower.rounds import serve
from coterie.flower.wire import Failure, Parcel
from coterie.running import checkpoint

log = logging.getLogger("coterie.server")

app = ServerApp()

QUERY = "query"
CAUSES = {1: "broken", 2: "failed", 5: "lost", 8: "crashed"}
"""Flower's error codes in a word: the app cannot be loaded, it raised, the node is gone, its process died."""
PRESENCE = 120.0
"""Seconds after which a node that did not say who it is, is asked again."""


class GridTransport:
    """Sites behind Flower's grid.

    `nodes` is a file that says which node has which site's key (`SuperLink.admit` writes it). Without keys a node is
    asked for its site's name when it first appears.
    """

    def __init__(self, grid: Grid, poll: float = 0.2, nodes: Path | None = None) -> None:
        self._grid, self._poll, self._file = grid, poll, nodes
        self._names: dict[int, str] = {}  # node -> site
        self._asked: dict[str, int] = {}  # message -> node not known yet
        self._when: dict[int, float] = {}  # node not known yet -> when it was asked
        self.messages = 0

    def sites(self) -> set[str]:
        return set(self._nodes())

    def _nodes(self) -> dict[str, int]:
        """Site -> node of those that are connected and have said who they are."""
        there = set(self._grid.get_node_ids())
        if self._file is not None:
            return {name: int(node) for node, name in read_json(self._file).items() if int(node) in there}
        self._names = {node: name for node, name in self._names.items() if node in there}
        now = time.monotonic()
        self._when = {node: at for node, at in self._when.items() if node in there and now - at < PRESENCE}
        self._asked = {sent: node for sent, node in self._asked.items() if node in self._when}
        new = [node for node in there if node not in self._names and node not in self._when]
        if new:
            present = [Parcel({"protocol": wire.PROTOCOL, "kind": "present"})]
            pushed = self._push(dict.fromkeys(new, present), PRESENCE)
            self._asked |= {sent: node for node, sent in zip(new, pushed, strict=True) if sent is not None}
            self._when |= dict.fromkeys(new, now)
        if self._asked:
            for reply in self._grid.pull_messages(list(self._asked)):
                node = self._asked.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    self._introduce(node, reply)
        return {name: node for node, name in self._names.items()}

    def _introduce(self, node: int, reply: Message) -> None:
        """Note the name of a node. One that gives none, or another's, is asked again after a while."""
        found = _parcels(reply)
        if isinstance(found, Failure) or "error" in found[0].meta:
            why = found.reason if isinstance(found, Failure) else found[0].meta["error"]
            log.warning("node %d did not say which site it is: %s", node, why)
            return
        name, protocol = str(found[0].meta.get("site")), found[0].meta.get("protocol")
        if name in self._names.values():
            log.warning("node %d says it is %s, and so does another one; it is left alone", node, name)
        elif protocol != wire.PROTOCOL:
            log.warning("%s speaks protocol %s, not %d; install the same version", name, protocol, wire.PROTOCOL)
        else:
            self._names[node] = name
            log.info("%s is there (node %d)", name, node)

    def _push(self, messages: Mapping[int, Sequence[Parcel]], ttl: float) -> list[str | None]:
        encoder = Encoder()
        out = [Message(encoder.records(parcels), node, QUERY, ttl=ttl) for node, parcels in messages.items()]
        self.messages += len(out)
        sent: list[str | None] = list(self._grid.push_messages(out))
        return sent or [None] * len(out)

    def ask(
        self, messages: Mapping[str, Sequence[Parcel]], deadline: float, enough: Callable[[set[str]], bool]
    ) -> dict[str, list[Parcel] | Failure]:
        nodes, end = self._nodes(), time.monotonic() + deadline
        answers: dict[str, list[Parcel] | Failure] = {
            name: Failure("absent", "the site is not connected.") for name in messages if name not in nodes
        }
        wanted = [name for name in messages if name in nodes]
        ids = self._push({nodes[name]: messages[name] for name in wanted}, deadline + 60)
        waiting = {sent: name for sent, name in zip(ids, wanted, strict=True) if sent is not None}
        answers |= {
            name: Failure("unsent", "Flower took no message for it (too large?).")
            for sent, name in zip(ids, wanted, strict=True) if sent is None
        }
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(list(waiting)):
                name = waiting.pop(reply.metadata.reply_to_message_id, None)
                if name is not None:
                    answers[name] = _parcels(reply)
            if enough({name for name, found in answers.items() if not isinstance(found, Failure)}):
                break
            if waiting:
                time.sleep(self._poll)
        return answers  # who is still missing is late; a reply that comes after this is never pulled


def _parcels(reply: Message) -> list[Parcel] | Failure:
    if reply.has_error():
        lines = (reply.error.reason or "").strip().splitlines()
        return Failure(CAUSES.get(reply.error.code, f"error {reply.error.code}"), lines[-1] if lines else "")
    try:
        return parcels_of(reply.content)
    except CoterieError as reason:
        return Failure("mismatch", str(reason))


class Kept:
    """A transport that keeps everything sites send, as numbered safetensors files, for whoever wants to inspect it."""

    def __init__(self, inner: GridTransport, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        folder.mkdir(parents=True, exist_ok=True)

    def sites(self) -> set[str]:
        return self._inner.sites()

    def ask(
        self, messages: Mapping[str, Sequence[Parcel]], deadline: float, enough: Callable[[set[str]], bool]
    ) -> dict[str, list[Parcel] | Failure]:
        answers = self._inner.ask(messages, deadline, enough)
        for site, found in answers.items():
            for parcel in found if isinstance(found, list) else ():
                number = sum(1 for _ in self._folder.iterdir())
                checkpoint.save(self._folder / f"{number:06d}-{site}.safetensors", parcel.tensors, parcel.meta)
        return answers


@app.main()  # type: ignore[untyped-decorator, unused-ignore]
def main(grid: Grid, context: Context) -> None:
    """Run the plan; started again after it was stopped, it goes on from its folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    plan = Plan.read(Path(str(context.run_config["run"])))
    folder = None if plan.folder is None else Path(plan.folder)
    grid_line = GridTransport(grid, nodes=None if plan.nodes is None else Path(plan.nodes))
    line = grid_line if plan.messages is None else Kept(grid_line, Path(plan.messages))
    serve(plan.jobs, line, plan.policy, folder, Inspector(plan.limits, folder), plan.linger)
