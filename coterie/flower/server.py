"""The server app: Flower's grid as a transport, and experiments read from a plan file that the run's `run` names."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

try:
    from flwr.app import Context, Message
    from flwr.serverapp import Grid, ServerApp
    from httpx import HTTPError, HTTPStatusError
except ImportError as reason:
    from coterie.flower import missing

    raise missing("flwr") from reason

from coterie.errors import CoterieError
from coterie.files import read_json
from coterie.flower import wire
from coterie.flower.checks import Inspector
from coterie.flower.exchange import Replies, answered
from coterie.flower.grid import UNTIL
from coterie.flower.job import NAME
from coterie.flower.message import BoundedArray, Encoder, answers_of
from coterie.flower.plan import Plan
from coterie.flower.rounds import serve
from coterie.flower.wire import Failure, Parcel
from coterie.report.screen import LogLines
from coterie.running import checkpoint

log = logging.getLogger("coterie.server")

app = ServerApp()

QUERY = "query"
PRESENT = Parcel({"protocol": wire.PROTOCOL, "kind": "present"}, expected={})
"""The question of who a node is."""
CAUSES = {1: "broken", 2: "failed", 3: "lost", 4: "lost", 5: "lost", 8: "crashed"}
"""Flower's error codes in a word: the app cannot be loaded, it raised, a message or the node is gone, its process died.
"""
PRESENCE = 120.0
"""Seconds after which a node that did not say who it is, is asked again."""


SLOW = 2.0
"""Seconds in which an answer that is there has been pulled; for the rest of a longer one nobody else waits."""


class Pull(threading.Thread):
    """Asks for the reply to one message and pulls it, until `end` at the latest."""

    def __init__(self, grid: Grid, sent: str, end: float) -> None:
        super().__init__(daemon=True)
        self._grid, self._sent, self._end = grid, sent, end
        self._found: list[Message] = []
        self._failed: BaseException | None = None
        self._began = time.monotonic()
        self.start()

    @property
    def slow(self) -> bool:
        return time.monotonic() - self._began > SLOW

    def run(self) -> None:
        UNTIL.at = self._end
        try:
            self._found = list(self._grid.pull_messages([self._sent]))
        except BaseException as reason:
            self._failed = reason

    def replies(self) -> list[Message]:
        if self._failed is not None:
            raise self._failed
        return [reply for reply in self._found if reply.metadata.reply_to_message_id == self._sent]


def _gone(reason: Exception) -> bool:
    """Whether the SuperLink is gone, which is nobody's doing; an error of its own is about one message."""
    if isinstance(reason, HTTPStatusError):
        return reason.response.status_code < 500
    return isinstance(reason, HTTPError | OSError)


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
        self._slow: dict[str, Pull] = {}  # message -> its reply, of which a part has not come yet
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
            pushed = self._push({node: [PRESENT] for node in new}, PRESENCE)
            self._asked |= {sent: node for node, sent in zip(new, pushed, strict=True) if sent is not None}
            self._when |= dict.fromkeys(new, now)
        if self._asked:
            self._slow = {sent: pull for sent, pull in self._slow.items() if sent in self._asked}
            for sent, reply in self._pulled({sent: self._when[node] + PRESENCE for sent, node in self._asked.items()}):
                self._introduce(self._asked.pop(sent), reply)
        return {name: node for node, name in self._names.items()}

    def _introduce(self, node: int, reply: Message | Failure) -> None:
        """Note the name of a node. One that gives none, or another's, is asked again after a while."""
        found = _answers(reply, [PRESENT])
        one = found if isinstance(found, Failure) else found[0]
        if isinstance(one, Failure) or "error" in one.meta:
            why = one.reason if isinstance(one, Failure) else wire.plain(one.meta["error"])
            log.warning("node %d did not say which site it is: %s", node, why)
            return
        name, protocol = one.meta.get("site"), one.meta.get("protocol")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            log.warning("node %d says it is '%s', which is no site's name; it is left alone", node, wire.plain(name))
        elif name in self._names.values():
            log.warning("node %d says it is %s, and so does another one; it is left alone", node, name)
        elif protocol != wire.PROTOCOL:
            log.warning("%s speaks protocol %s, not %d; install the same version", name, wire.plain(protocol, 64),
                        wire.PROTOCOL)
        else:
            self._names[node] = name
            log.info("%s is there (node %d)", name, node)

    def _pulled(self, ends: Mapping[str, float]) -> Iterator[tuple[str, Message | Failure]]:
        """What has come of these messages' replies, each of which is waited for until its end: one after another, for
        one that Flower cannot read takes with it what is pulled in the same call. A slow one holds up no other."""
        for sent, end in ends.items():
            pull = self._slow.pop(sent, None)
            if pull is None:
                pull = Pull(self._grid, sent, end)
                pull.join(max(0.0, min(SLOW, end - time.monotonic())))
            if pull.is_alive():
                self._slow[sent] = pull
                continue
            try:
                for reply in pull.replies():
                    yield sent, reply
            except Exception as reason:  # whatever a node made its reply of
                if _gone(reason):
                    raise
                why = f"{type(reason).__name__}: {reason}"
                if isinstance(reason, HTTPStatusError):
                    yield sent, Failure("lost", wire.plain(f"Flower has no answer of it ({why})."))
                else:
                    yield sent, wire.rejected("message", f"Flower cannot read the answer ({why}).")

    def _push(self, messages: Mapping[int, Sequence[Parcel]], ttl: float) -> list[str | None]:
        encoder = Encoder()
        BoundedArray.expect(parcel for parcels in messages.values() for parcel in parcels)
        out = [Message(encoder.records(parcels), node, QUERY, ttl=ttl) for node, parcels in messages.items()]
        self.messages += len(out)
        try:
            sent = [one or None for one in self._grid.push_messages(out)]
        except Exception as reason:
            if _gone(reason):
                raise
            log.exception("Flower did not take what was to be sent")
            sent = []
        return sent or [None] * len(out)

    def ask(
        self, messages: Mapping[str, Sequence[Parcel]], deadline: float, enough: Callable[[set[str]], bool]
    ) -> dict[str, Replies | Failure]:
        nodes, end = self._nodes(), time.monotonic() + deadline
        answers: dict[str, Replies | Failure] = {
            name: Failure("absent", "the site is not connected.") for name in messages if name not in nodes
        }
        wanted = [name for name in messages if name in nodes]
        ids = self._push({nodes[name]: messages[name] for name in wanted}, deadline + 60)
        waiting = {sent: name for sent, name in zip(ids, wanted, strict=True) if sent is not None}
        answers |= {
            name: Failure("lost", "Flower took no message for it (too large?).")
            for sent, name in zip(ids, wanted, strict=True) if sent is None
        }
        while waiting and time.monotonic() < end:
            for sent, reply in self._pulled(dict.fromkeys(waiting, end)):
                name = waiting.pop(sent)
                answers[name] = _answers(reply, messages[name])
            if enough(answered(answers)):
                break
            if waiting:
                time.sleep(self._poll)
        for sent, name in waiting.items():
            pull = self._slow.pop(sent, None)
            if pull is not None and pull.slow:
                answers[name] = Failure("lost", "its answer had begun to arrive, and the rest did not come in time.")
        return answers  # who is still missing is late; a reply that comes after this is never pulled


def _answers(reply: Message | Failure, tasks: Sequence[Parcel]) -> Replies | Failure:
    """What a site answered to each task; whatever its bytes are, it is an answer or a failure."""
    if isinstance(reply, Failure):
        return reply
    if reply.has_error():
        lines = (reply.error.reason or "").strip().splitlines()
        cause = CAUSES.get(reply.error.code, f"error {reply.error.code}")
        return Failure(cause, wire.plain(lines[-1]) if lines else "")
    try:
        return answers_of(reply.content, tasks)
    except Exception as reason:  # no site may end the run by what it sends
        log.exception("an answer could not be read")
        return wire.rejected("message", f"the answer cannot be read ({type(reason).__name__}: {reason}).")


class Kept:
    """A transport that keeps everything sites send, as numbered safetensors files, for whoever wants to inspect it.

    Of a header longer than `LONGEST` the beginning is kept. What cannot be kept is said, and the run goes on.
    """

    LONGEST: ClassVar[int] = 1 << 20

    def __init__(self, inner: GridTransport, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        folder.mkdir(parents=True, exist_ok=True)

    def sites(self) -> set[str]:
        return self._inner.sites()

    def ask(
        self, messages: Mapping[str, Sequence[Parcel]], deadline: float, enough: Callable[[set[str]], bool]
    ) -> dict[str, Replies | Failure]:
        answers = self._inner.ask(messages, deadline, enough)
        for site, found in answers.items():
            for parcel in () if isinstance(found, Failure) else found:
                if isinstance(parcel, Failure):
                    continue
                try:
                    self._keep(site, parcel)
                except (CoterieError, OSError) as reason:
                    log.warning("what %s sent is not kept: %s", site, reason)
        return answers

    def _keep(self, site: str, parcel: Parcel) -> None:
        number = sum(1 for _ in self._folder.iterdir())
        said = json.dumps(parcel.meta)
        meta = parcel.meta if len(said) <= self.LONGEST else {"letters": len(said), "beginning": said[: self.LONGEST]}
        checkpoint.save(self._folder / f"{number:06d}-{site}.safetensors", parcel.tensors, meta)


@app.main()  # type: ignore[untyped-decorator, unused-ignore]
def main(grid: Grid, context: Context) -> None:
    """Run the plan; started again after it was stopped, it goes on from its folder."""
    lines = logging.StreamHandler()
    lines.setFormatter(LogLines("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    BoundedArray.install()
    plan = Plan.read(Path(str(context.run_config["run"])))
    folder = None if plan.folder is None else Path(plan.folder)
    grid_line = GridTransport(grid, nodes=None if plan.nodes is None else Path(plan.nodes))
    line = grid_line if plan.messages is None else Kept(grid_line, Path(plan.messages))
    serve(plan.jobs, line, plan.policy, folder, Inspector(plan.limits, folder), plan.linger)
