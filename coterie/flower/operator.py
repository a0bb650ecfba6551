"""What `coterie server`, `coterie client` and `coterie status` do for an operator."""

from __future__ import annotations

import csv
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.table import Table

from coterie.data import load, load_as
from coterie.data.labels import placed
from coterie.errors import CoterieError, counted
from coterie.files import csv_text, read_json
from coterie.flower.checks import KEPT, ask_to_lift
from coterie.flower.consent import ANY, Approval, Consent, SiteLimits
from coterie.flower.exchange import drive
from coterie.flower.job import Job
from coterie.flower.loopback import Loopback
from coterie.flower.plan import PLAN, Plan
from coterie.flower.rounds import STATUS, Rounds, refuse_early
from coterie.flower.site import LAST_MODEL, LOG, MODEL, Site, described, site_at
from coterie.flower.wire import Failure, Parcel
from coterie.running import checkpoint
from coterie.running.chosen import CHOSEN, When
from coterie.running.folder import Folder, consistent
from coterie.serving.portable import read_model

_STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d (.*)")
"""How an entry of a site's log begins."""
MOST_PLAYED = 50
"""Sites that a dry run plays at most; what one of them sends hardly depends on how many there are."""
LINK = "link"
"""The folder of the SuperLink inside the server's."""


def serve(
    config: Path, folder: Path, listen: str, keys: Path | None, insecure: bool, keep_messages: bool = False,
) -> None:
    """Run the experiment of a TOML file for real sites, to its end; started again, it goes on where it was."""
    from coterie.flower.keys import ServerKeys
    from coterie.flower.processes import NODES, Address, SuperLink, operate, say, stoppable

    address = Address.of(listen)
    read = _keys(keys, insecure, "server", ServerKeys.read)
    plan = Plan.configured(config)
    for job in plan.jobs:
        refuse_early(job, plan.policy)
    home = folder.resolve() / LINK
    home.mkdir(parents=True, exist_ok=True)
    plan = plan.placed(folder.resolve())
    plan = replace(plan, nodes=None if read is None else str(home / NODES),
                   messages=str(folder.resolve() / "messages") if keep_messages else None)
    plan.write(folder / PLAN)
    for job in plan.jobs:
        say(f"the experiment's digest, by which sites approve it, is {job.digest}")
    body = plan.gate.largest(_answer_bytes(plan))
    with stoppable(), SuperLink(read, address, home, gate=plan.gate, body=body) as link:
        operate(link, {"run": str(folder.resolve() / PLAN)})


def _answer_bytes(plan: Plan) -> int:
    """Bytes that a site's answer to all experiments has at most, generously: four times what the server holds."""
    found = 0
    for job in plan.jobs:
        server = Rounds(job, plan.policy, set).start(plan.policy.sites)
        held = [*server.state.tensors().values(), *job.factory()().parameters()]
        found += sum(t.numel() * t.element_size() for t in held)
    return 64_000_000 + 4 * found


def connect(
    server: str, data: str, home: Path, keys: Path | None, insecure: bool, name: str | None, settings: dict[str, Any],
) -> None:
    """Take part as a site until told to stop, in the experiments that the home approves (`settings["accept"]`: more).

    What the site has to tell its operator is passed on.
    """
    from coterie.flower.keys import ClientKeys
    from coterie.flower.processes import Address, say, stoppable, supervise

    address = Address.of(server)
    read = _keys(keys, insecure, "client", ClientKeys.read)
    if read is None and name is None:
        raise CoterieError("without keys a site needs a name: --name NAME.")
    if read is not None and name not in (None, read.name):
        raise CoterieError(f"the keys in {keys} are those of {read.name}, not of {name}; leave --name out.")
    chosen = read.name if read is not None else str(name)
    given = {"name": chosen, "data": _absolute(data), "home": str(home.resolve()), **settings}
    load(given["data"])  # whatever is wrong with the file is said here, not to the server in the first round
    approved = Consent(home, str(settings.get("accept", ""))).approvals
    if Approval(ANY) in approved:
        say("warning: this site takes part in whatever the server asks for, within its limits; for trials only")
    elif not approved:
        say(f"no experiment is approved in {home}, so that all will be refused; `coterie client --accept DIGEST` does")
    with stoppable(), told(home.resolve() / LOG, say):
        supervise(read, address, home.resolve(), given)


@contextmanager
def told(log: Path, say: Callable[[str], None], pause: float = 1.0) -> Iterator[None]:
    """Pass on what is added to a site's log meanwhile, each entry's first line, one that repeats the last one once."""
    stop = threading.Event()

    def follow() -> None:
        read, last = log.stat().st_size if log.exists() else 0, ""
        while not stop.wait(pause):
            with suppress(OSError), log.open("rb") as file:
                file.seek(read)
                fresh = file.read()
                whole = fresh[: fresh.rfind(b"\n") + 1]
                read += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    stamped = _STAMPED.match(line)
                    if stamped is not None and stamped[1] != last:
                        last = stamped[1]
                        say(last)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _keys(folder: Path | None, insecure: bool, whose: str, read: Any) -> Any:
    if insecure and folder is not None:
        raise CoterieError("--keys and --insecure exclude each other.")
    if folder is None and not insecure:
        where = "DIR/server" if whose == "server" else "DIR/clients/NAME"
        raise CoterieError(
            f"a {whose} needs its keys, --keys {where}, which `coterie keys DIR` makes (for a trial on one machine, "
            "--insecure does without)."
        )
    return None if insecure else read(folder)


def _absolute(data: str) -> str:
    return str(Path(data).resolve()) if Path(data).exists() else data


# -- what would be sent -----------------------------------------------------------------------------------------------


class _Listened(Loopback):
    """Sites in this process; keeps what one of them says. What goes wrong at one is raised in its own words."""

    def __init__(self, sites: Sequence[Site], name: str) -> None:
        super().__init__(sites)
        self.name, self.heard = name, list[Parcel]()

    def deliver(self, name: str, parcels: list[Parcel]) -> list[Parcel] | Failure:
        found = super().deliver(name, parcels)
        for parcel in found if isinstance(found, list) else ():
            if "error" in parcel.meta:
                raise self.by_name[name].error or CoterieError(str(parcel.meta["error"]))
        if name == self.name and isinstance(found, list):
            self.heard += found
        return found


def rehearse(
    config: Path, data: str, home: Path, name: str, settings: dict[str, Any]
) -> tuple[Job, list[Parcel]]:
    """The experiment of a file, and what this site would send in it: its introduction, its first round and the end,
    beside sites of made-up samples.

    Nothing leaves the machine. The shapes of later rounds are the same.
    """
    plan = Plan.configured(config, "rehearsal")
    (asked,) = plan.jobs
    limits = SiteLimits.of(str(settings.get("limit", "")))
    limits.require(asked)
    short = replace(asked.training, rounds=1, participation=1.0, warmup=min(asked.training.warmup, 1))
    job = replace(asked, training=short)
    site = site_at(name, data, home / name, **settings, accept=ANY)
    sites = min(plan.policy.sites, MOST_PLAYED)
    fellows = [f"made-up-{i}" for i in range(1, sites)]
    made_up = [Site(fellow, job.made_up(1), home / fellow, accept=ANY, limits=site.limits) for fellow in fellows]
    line = _Listened([site, *made_up], name)
    policy = replace(plan.policy, sites=sites, minimum=sites, target=0)
    with limits.building():
        drive([Rounds(job, policy, line.sites).work()], line, policy.deadline)
    return asked, line.heard


def sending(parcels: Sequence[Parcel]) -> Table:
    """What leaves a site, message by message: numbers in full, of tensors the name, type, shape and range."""
    table = Table("message", "what", "value", title="what would leave this site", title_justify="left")
    trained = False
    for parcel in parcels:
        meta = parcel.meta
        kind = meta["kind"] if meta["kind"] == "introduce" else "the end" if trained else "a round"
        trained = trained or meta["kind"] != "introduce"
        for key, value in meta.items():
            if key not in ("protocol", "kind", "round"):
                table.add_row(kind, key, json.dumps(value))
        for key, about in described(parcel.tensors).items():
            t = parcel.tensors[key].double()
            span = f", from {float(t.min()):.4g} to {float(t.max()):.4g}" if t.numel() else ""
            table.add_row(kind, key, about + span)
    return table


# -- the model a site uses --------------------------------------------------------------------------------------------


def model_of(home: Path, experiment: str | None = None, when: str = "chosen") -> tuple[Path, str]:
    """The file of the site's newest model, of the chosen round or the last one, and a sentence on its round."""
    if when not in get_args(When):
        raise CoterieError(f"a site keeps the model of the chosen round and that of the last one; name 'chosen' or "
                           f"'last', not '{when}'.")
    found = sorted(home.glob("*/model.json"), key=lambda path: path.stat().st_mtime)
    if experiment is not None:
        found = [path for path in found if path.parent.name == experiment]
    if not found:
        raise CoterieError(f"{home} holds no model yet; a site gets its model at the end of training.")
    facts = read_json(found[-1])
    path = found[-1].with_name(MODEL)
    if when == "last" and not facts.get("last", True):  # earlier versions deployed the last round alone
        path = path.with_name(LAST_MODEL)
        if not path.exists():
            raise CoterieError(f"{home} holds the model of round {facts['round']} alone; the site came after training.")
        facts = read_json(path.with_suffix(".json"))
    how = CHOSEN if facts.get("when") == CHOSEN else "the last one"
    return path, " ".join(filter(None, [f"The model is that of round {facts['round']}, {how}.", facts.get("note")]))


def predict(
    home: Path, data: str, out: Path | None, experiment: str | None = None, when: str = "chosen"
) -> tuple[Path, float | None]:
    """Apply the site's model to a file; the csv written, and the accuracy where the file has labels.

    A row of the csv: the sample's number, the class (or the numbers, for regression) and its probability.
    """
    place, _ = model_of(home, experiment, when)
    job = Job.of(read_json(place.with_suffix(".json")).get("job", {}), str(place))
    model = read_model(place)
    module = model.loaded()
    source = load_as(data, job.classes)
    if tuple(source.x.shape[1:]) != job.shape:
        raise CoterieError(f"the model takes samples of {list(job.shape)}; {data} has {list(source.x.shape[1:])}.")
    with torch.no_grad():
        x = source.x.to(model.row.dtype) if source.x.is_floating_point() else source.x
        scores = torch.cat([module(some) for some in torch.split(x, 1024)])
    path = out or Path(data).with_suffix(".predictions.csv")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        if not job.classes:
            writer.writerow(["sample", *(f"value{k}" for k in range(scores.shape[1]))])
            writer.writerows([k, *row] for k, row in enumerate(scores.tolist()))
            return path, None
        chance, chosen = scores.softmax(1).max(1)
        called = [csv_text(job.class_names[k]) if job.class_names else k for k in chosen.tolist()]
        writer.writerow(["sample", "class", "probability"])
        writer.writerows(zip(range(len(x)), called, np.round(chance.numpy(), 6).tolist(), strict=True))
    y = placed(source.y, source.classes, job.classes, job.class_names, data)
    return path, float((chosen == y).double().mean())


# -- the live table ---------------------------------------------------------------------------------------------------


def lift(folder: Path, site: str) -> None:
    """Ask the server to let a quarantined site take part again."""
    with consistent([folder]):
        held = _written(folder / KEPT).get("held", {})
        if site not in held:
            raise CoterieError(f"{site} is not quarantined; quarantined are: {', '.join(sorted(held)) or 'none'}.")
    ask_to_lift(folder, site)


def status(folder: Path) -> Table:
    """What the server of this folder is doing, site by site."""
    if not (folder / PLAN).is_file():
        raise CoterieError(f"{folder} is not the folder of a server: it has no {PLAN}.")
    with consistent([folder]):
        return _status(folder)


def _status(folder: Path) -> Table:
    plan = Plan.read(folder / PLAN)
    now, kept = _written(folder / STATUS), _written(folder / KEPT)
    run = Folder(folder)
    meta = checkpoint.load(run.checkpoint)[1] if run.checkpoint.exists() else {}
    rounds = run.rounds() if (folder / "metrics.jsonl").exists() else []
    names = sorted({*meta.get("numbers", {}), *now.get("there", []), *kept.get("held", {})})
    job = plan.jobs[0]
    age = f", {max(time.time() - now['time'], 0):.0f} s ago" if now else ""
    done = f"{len(rounds)} of {counted(job.training.rounds, 'round')} done"
    title = f"{job.method}: {now.get('doing', 'not started')}{age}; {done}"
    table = Table("site", "connected", "asked", "last merged", "samples", "strikes", "state", title=title,
                  title_justify="left")
    for name in names:
        merged = meta.get("merged", {}).get(name, -1)
        late = "newcomer" if name in meta.get("numbers", {}) and name not in meta.get("merged", {}) else "trains"
        state = f"quarantined: {kept['held'][name]}" if name in kept.get("held", {}) else late
        state = "has its model" if name in meta.get("served", []) else state
        table.add_row(
            name, "yes" if name in now.get("there", []) else "no", "yes" if name in now.get("asked", []) else "",
            str(merged + 1) if merged >= 0 else "", str(kept.get("samples", {}).get(name, "")),
            str(kept.get("strikes", {}).get(name, "")), state,
        )
    causes = Counter[str]()
    for one in rounds:
        causes.update(one["report"].get("failures", {}))
    if rounds:
        took = np.median([one["seconds"] for one in rounds])
        table.caption = f"median round {took:.1f} s; without an answer: " + (
            ", ".join(f"{cause} {count}" for cause, count in causes.most_common()) or "none"
        )
    return table


def _written(path: Path) -> dict[str, Any]:
    """What the server has written there; nothing before it did."""
    return read_json(path) if path.exists() else {}
