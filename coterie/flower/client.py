"""The client app. A SuperNode starts a process with it for every message.

Every message is decoded into tensors and answered by a site, so the process needs all of coterie and PyTorch, and
importing them is most of what a round costs.

The node's configuration names the site: `name="..." data="/path.npz" home="/path"`, and if wanted `device`, `val`,
`test`, `seed`, `accept` and `limit` (see `coterie.flower.site.site_at`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

try:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
except ImportError as reason:
    from coterie.flower import missing

    raise missing("flwr") from reason

from coterie.errors import CoterieError
from coterie.flower import wire
from coterie.flower.message import Encoder, parcels_of
from coterie.flower.site import LONGEST, Site, site_at
from coterie.flower.task import Refusal, refusing
from coterie.flower.wire import Parcel

app = ClientApp()

NEEDED = ("name", "data", "home")
FURTHER = ("device", "val", "test", "seed", "accept", "limit")


def site_of(config: Mapping[str, Any]) -> Site:
    """The site that a node's configuration describes."""
    lacking = [name for name in NEEDED if not config.get(name)]
    if lacking:
        raise CoterieError(f"the node's configuration lacks {', '.join(lacking)}; it must give {', '.join(NEEDED)}.")
    values = {name: config[name] for name in FURTHER if name in config}
    return site_at(str(config["name"]), str(config["data"]), str(config["home"]), **values)


def in_time(work: Callable[[], list[Parcel]], seconds: float) -> list[Parcel]:
    """What `work` gives, or a Refusal when it takes longer than that.

    A node takes no message while one is being answered, so an app that hangs would keep its site out for ever. When
    its answer comes, Flower ends the process, and the thread that still works with it.
    """
    done: list[list[Parcel]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as reason:
            failed.append(reason)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    if failed:
        raise failed[0]
    if not done:
        raise Refusal(f"the site did not answer within {seconds:g} s.")
    return done[0]


@app.query()  # type: ignore[untyped-decorator, unused-ignore]
def answer(message: Message, context: Context) -> Message:
    """Answer all parcels of a message. No error reaches Flower, which would send its text to the server."""
    try:
        site = site_of(context.node_config)
    except Exception as reason:  # the operator's own words are wrong, and there is no home to write down what leaves
        name = str(context.node_config.get("name", ""))
        text = str(reason)[:LONGEST] if isinstance(reason, CoterieError) else f"{type(reason).__name__} at the site."
        return _reply(message, [wire.answer({}, name, error=text, cause="refused")])
    return _reply(message, answered(site, lambda: parcels_of(message.content)))


def answered(site: Site, unpack: Callable[[], list[Parcel]]) -> list[Parcel]:
    """A site's answers to what arrived, in the time it has; what cannot be unpacked is answered once."""
    try:
        with refusing():
            parcels = unpack()
    except Exception as reason:
        return [site.failed({}, reason)]
    try:
        return in_time(lambda: site.answer(parcels), site.patience(parcels))
    except Exception as reason:
        return [site.failed(parcel.meta, reason) for parcel in parcels]


def _reply(message: Message, answers: list[Parcel]) -> Message:
    return Message(Encoder().records(answers), reply_to=message)
