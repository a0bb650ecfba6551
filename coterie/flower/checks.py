"""Uploads are checked before they are merged, and a client that keeps failing is quarantined.

What an answer must look like is known before it comes (`Expected`): from a rehearsal of the method's own functions on
made-up data, see `coterie.flower.rehearsal`, and from what the method declares, `uploads` and `introduces`. The checks
run in this order, and the first that fails is the reason given:

1. names, shapes and dtypes are those expected;
2. the sample count n is a positive whole number;
3. every number is finite, and what the method declares of the tensor holds (`coterie.contract.sent`);
4. n is at most `most_samples`, and between n_0 / `samples` and n_0 * `samples` of the n_0 that the client declared when
   it introduced itself;
5. for rows, whose sizes s can be compared (models, updates, sums of features), and m >= 3 uploads that passed 1 to 4,
   s_i <= `norm` * median_j s_j * max(1, n_i / median_j n_j); a median of 0 bounds nothing;
6. for losses, s_i <= `loss` * max(c, median_j s_j) with s the least of a client's losses, the lower median, and c the
   loss of the constant answer.

A client that fails 1 to 4 says what cannot be so, and gets a strike. Checks 5 and 6 compare it with others: they cannot
tell who means harm from an honest client unlike the rest, such as the only one with some class. They cost the round
(`UNUSUAL`) and no strike. The factor of samples in 5 is for clients with many: these take more steps in an epoch, so an
honest one's update is longer.

What is wrong but well formed and of usual size passes; robust aggregators are for that.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from coterie.contract.sent import Sender, Values, middle
from coterie.errors import CoterieError
from coterie.files import append_text, read_json, write_json
from coterie.flower.wire import Failure, Schema, plain, rejected, schema_of, unlike

log = logging.getLogger("coterie.server")

COHORT = 3
"""With fewer uploads there is no median to speak of, and sizes are not compared."""

COUNTABLE = 10**12
"""No client has more samples, whatever the limits: the sum of many such numbers is still exact."""

LIFT = "lift"
"""The file in the server's folder by which an operator lifts quarantines: one client's name a line."""

UNUSUAL = "unusual"
"""The cause of a failure by comparison with others: it costs the round, and no strike."""

UNUSABLE = "unusable"
"""The kind of what had passed all checks and turned out to be of no use."""

KEPT = "checks.json"
"""Strikes, quarantines and sample counts, in the server's folder."""


@dataclass(frozen=True)
class Limits:
    """What an upload may differ in."""

    norm: float | None = 10.0
    """A client's update may be this many times as long as the median, and as many times longer as it has more samples
    than the median; none: any length."""

    loss: float | None = 10.0
    """A client's least loss may be this many times the median, or that of the constant answer; none: any."""

    samples: float | None = 2.0
    """A client's sample count may be larger or smaller by this factor than it declared on arrival; none: by any."""

    most_samples: int = 10_000_000
    """More training samples than this no client may claim."""

    strikes: int = 3
    """After this many rejected uploads in a row a client is quarantined."""

    def __post_init__(self) -> None:
        for name in ("norm", "loss"):
            limit = getattr(self, name)
            if limit is not None and not limit > 1:
                raise CoterieError(f"the {name} limit is a factor above 1 on the median (or none), not {limit}.")
        if self.samples is not None and not self.samples >= 1:
            raise CoterieError(f"the limit of samples is a factor of at least 1 (or none), not {self.samples}.")
        if not 1 <= self.most_samples <= COUNTABLE:
            raise CoterieError(f"most_samples is from 1 to {COUNTABLE}, not {self.most_samples}.")
        if self.strikes < 1:
            raise CoterieError(f"a client is quarantined after at least 1 rejected upload, not {self.strikes}.")


@dataclass(frozen=True)
class Expected:
    """What the answers to one question hold, known before they come."""

    schema: Schema = field(default_factory=dict)
    holds: Mapping[str, Values] = field(default_factory=dict)
    """What is declared of each tensor; of one that is not named, that its numbers are finite."""
    rows: int = 0
    """The models in the server's state that a client may name."""
    rank: int = 0
    """The rank of the model's largest adapter."""
    counted: bool = True
    """Whether clients tell how many samples they have."""
    constant: float = 1.0
    """The loss of the constant answer: log(classes), and for targets of variance 1 their variance."""


@dataclass(frozen=True)
class Arrived:
    """One client's upload as it came: its sample count and its tensors."""

    n: Any
    tensors: Mapping[str, Tensor]


def judge(
    uploads: Mapping[str, Arrived], expected: Expected, limits: Limits | None = None,
    declared: Mapping[str, int] | None = None,
) -> tuple[dict[str, Arrived], dict[str, Failure]]:
    """The uploads that may be merged, by client, and why the others may not.

    `declared` holds each client's sample count of its introduction. Who is accepted does not depend on the order of
    `uploads`; both results are in that order.
    """
    wrong = {client: failure for client, upload in uploads.items() if (failure := unsound(upload, expected))}
    sound = {client: upload for client, upload in uploads.items() if client not in wrong}
    wrong |= beyond(sound, expected, limits if limits is not None else Limits(), declared or {})
    accepted = {client: upload for client, upload in sound.items() if client not in wrong}
    return accepted, {client: wrong[client] for client in uploads if client in wrong}


def unsound(upload: Arrived, expected: Expected) -> Failure | None:
    """What is wrong with an upload by itself, if anything is: checks 1 to 3."""
    if wrong := unlike(expected.schema, schema_of(upload.tensors)):
        return wrong
    n = upload.n
    if expected.counted and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= COUNTABLE):
        return rejected("n", f"the sample count is {plain(repr(n), 60)}, not a positive whole number"
                        + (f" up to {COUNTABLE}" if isinstance(n, int) and n > COUNTABLE else ""))
    known = Sender(n if expected.counted else None, expected.rows, expected.rank)
    for name in expected.schema:
        if told := expected.holds.get(name, Values()).wrong(upload.tensors[name][0], known):
            return rejected(name, f"{name} {told}")
    return None


def beyond(
    uploads: Mapping[str, Arrived], expected: Expected, limits: Limits, declared: Mapping[str, int]
) -> dict[str, Failure]:
    """Client -> what is wrong with it beside what it declared and what others sent: checks 4 to 6."""
    wrong = {client: failure for client, upload in uploads.items() if expected.counted
             if (failure := _miscounted(upload.n, declared.get(client), limits))}
    counted = {client: upload for client, upload in uploads.items() if client not in wrong}
    for name in expected.schema:
        told = expected.holds.get(name, Values())
        if told.compared:
            sizes = {client: told.size(upload.tensors[name][0], Sender(upload.n if expected.counted else None))
                     for client, upload in counted.items()}
            room = {client: told.stretch(times) for client, times in _times(counted, expected).items()}
            found = _high(name, sizes, limits, expected) if told.floor else _long(name, sizes, room, limits)
            wrong = found | wrong
    return wrong


def _miscounted(n: int, declared: int | None, limits: Limits) -> Failure | None:
    if n > limits.most_samples:
        return rejected("n", f"the sample count is {n}, more than {limits.most_samples}")
    factor = limits.samples
    if declared is not None and factor is not None and max(n, declared) > factor * min(n, declared):
        return rejected("n", f"the sample count went from {declared} to {n}, by more than a factor of {factor:g}")
    return None


def _times(uploads: Mapping[str, Arrived], expected: Expected) -> dict[str, float]:
    """Client -> how many times the median of samples it has; 1 where clients do not tell."""
    if not expected.counted or not uploads:
        return dict.fromkeys(uploads, 1.0)
    median = _median([upload.n for upload in uploads.values()])
    return {client: upload.n / median for client, upload in uploads.items()}


def _long(name: str, sizes: Mapping[str, float], room: Mapping[str, float], limits: Limits) -> dict[str, Failure]:
    """Client -> reason, for those whose rows are too long beside the others', by `room` times the limit."""
    if limits.norm is None or len(sizes) < COHORT:
        return {}
    median = _median(list(sizes.values()))
    found: dict[str, Failure] = {}
    for client, size in sizes.items():
        most = limits.norm * room[client]
        if math.isinf(size) or size > most * median > 0:
            times = f"{size / median:.3g}" if 0 < median < math.inf else "many"
            found[client] = _unusual(
                name, f"{name} is {times} times as long as the median ({size:.3g}), more than {most:.3g}", "norm"
            )
    return found


def _high(name: str, sizes: Mapping[str, float], limits: Limits, expected: Expected) -> dict[str, Failure]:
    """Client -> reason, for those whose losses are too high beside the others' and the constant answer's."""
    if limits.loss is None or not sizes:
        return {}
    most = limits.loss * max(expected.constant, middle(list(sizes.values())))
    return {client: _unusual(name, f"{name} is at least {size:.3g}, more than {most:.3g}", "loss")
            for client, size in sizes.items() if size > most}


def _unusual(name: str, said: str, option: str) -> Failure:
    return replace(rejected(name, f"{said}; `{option}` under [limits] allows more"), cause=UNUSUAL)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


# -- quarantine -------------------------------------------------------------------------------------------------------


@dataclass
class Quarantine:
    """Who was rejected how often in a row, and who is held until an operator lifts it.

    `state()` is a plain dict for the server's checkpoint, and `Quarantine.of(state)` is the record again. A client that
    does not answer, or that was left out by comparison with others, gets no strike and loses none.
    """

    limit: int = 3
    strikes: dict[str, int] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    cleared: dict[str, int] = field(default_factory=dict, compare=False)

    def note(self, accepted: Iterable[str], rejected: Iterable[tuple[str, str]]) -> list[str]:
        """Count a round's verdicts; the clients that are quarantined from now on."""
        self.cleared = {client: self.strikes.pop(client) for client in accepted if client in self.strikes}
        fresh = []
        for client, reason in rejected:
            self.strikes[client] = self.strikes.get(client, 0) + 1
            if self.strikes[client] >= self.limit and client not in self.held:
                self.held[client] = reason
                fresh.append(client)
        return fresh

    def regret(self, clients: Iterable[str]) -> None:
        """Give these, who were accepted in the round that was noted last, their strikes back."""
        self.strikes |= {client: self.cleared[client] for client in clients if client in self.cleared}

    def holds(self, client: str) -> bool:
        """Whether the client is kept out."""
        return client in self.held

    def lift(self, client: str) -> None:
        """Let the client take part again, with no strikes."""
        if client not in self.held:
            held = ", ".join(sorted(self.held)) or "none"
            raise CoterieError(f"{client} is not quarantined; quarantined are: {held}.")
        del self.held[client]
        self.strikes.pop(client, None)

    def obey(self, folder: Path) -> list[str]:
        """Lift those whom the operator named in the file `lift` of the folder, and remove it; who was lifted.

        Names that are not quarantined are passed over. The caller saves the state afterwards.
        """
        taken = folder / f"{LIFT}.taken"
        if (folder / LIFT).exists():
            os.replace(folder / LIFT, taken)  # a name written from here on goes to a new file
        if not taken.exists():
            return []
        names = dict.fromkeys(line.strip() for line in taken.read_text().splitlines())
        lifted = [name for name in names if self.holds(name)]
        for name in lifted:
            self.lift(name)
        taken.unlink()
        return lifted

    def state(self) -> dict[str, Any]:
        return {"limit": self.limit, "strikes": dict(self.strikes), "held": dict(self.held)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Quarantine:
        return cls(int(state["limit"]), dict(state["strikes"]), dict(state["held"]))


def ask_to_lift(folder: Path, client: str) -> None:
    """Ask the server whose folder this is to lift a client's quarantine before its next round."""
    if not folder.is_dir():
        raise CoterieError(f"{folder} is not a folder.")
    try:
        append_text(folder / LIFT, f"{client}\n")
    except OSError as reason:
        raise CoterieError(f"{folder / LIFT} cannot be written: {reason.strerror}.") from reason


@dataclass(frozen=True)
class Received:
    """The uploads of a round (or the introductions of an admission), by site, before any of them is used."""

    experiment: str
    kind: str  # "round", "introduce", "deploy" or UNUSABLE
    round: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # site -> name -> [1, ...]
    n: Mapping[str, Any]  # site -> training samples it claims; nothing with privacy on
    expected: Expected
    wrong: Mapping[str, Failure] = field(default_factory=dict)  # site -> why its answer was no good from the start
    private: bool = False


class Check(Protocol):
    """What looks at uploads before they are merged: at those that are sound, and at what was wrong with others."""

    def __call__(self, received: Received) -> Mapping[str, Failure]:
        """The sites whose sound upload is to be left out, each with the reason."""
        ...

    def barred(self) -> Iterable[str]:
        """Sites that are not asked at all until an operator says otherwise."""
        ...


def refused(check: Check | None, received: Received) -> dict[str, Failure]:
    """Site -> reason, for uploads that are not used: those that are not sound, then what the run's check says."""
    arrived = {site: Arrived(received.n.get(site), tensors) for site, tensors in received.tensors.items()}
    found = {site: failure for site, upload in arrived.items() if (failure := unsound(upload, received.expected))}
    sound = {site: tensors for site, tensors in received.tensors.items() if site not in found}
    wrong = {**received.wrong, **found}
    if check is not None and (sound or wrong):
        found |= check(replace(received, tensors=sound, wrong=wrong))
    return {site: failure for site, failure in found.items() if site in received.tensors}


class Inspector:
    """The limits and the quarantine of one server. What it must remember lies in `checks.json` of its folder.

    Introductions are facts of a site's own, so their sizes are not compared, and they declare the sample count. With
    privacy on, no client's fate may depend on another's data, and the clip bounds norms anyway: they are not compared.
    """

    def __init__(self, limits: Limits | None = None, folder: Path | None = None) -> None:
        self.limits = limits if limits is not None else Limits()
        self.folder = folder
        self.quarantine, self.declared = Quarantine(self.limits.strikes), dict[str, int]()
        if folder is not None and (folder / KEPT).exists():
            try:
                kept = read_json(folder / KEPT)
                self.quarantine = Quarantine(self.limits.strikes, dict(kept["strikes"]), dict(kept["held"]))
                self.declared = {client: int(n) for client, n in kept["samples"].items()}
            except (KeyError, TypeError, ValueError) as reason:
                what = "remove it to forget strikes and quarantines"
                raise CoterieError(f"{folder / KEPT} is damaged; {what}.") from reason

    def __call__(self, received: Received) -> dict[str, Failure]:
        """Site -> reason, for what must not be used of what is sound; what was wrong before counts as a strike, too."""
        introduced = received.kind == "introduce"
        uploads = {site: Arrived(received.n.get(site), tensors) for site, tensors in received.tensors.items()}
        free = introduced or received.private
        limits = replace(self.limits, norm=None, loss=None, samples=None) if free else self.limits
        found = beyond(uploads, received.expected, limits, self.declared)
        accepted = [site for site in uploads if site not in found]
        if received.expected.counted:
            fresh = accepted if introduced else [site for site in accepted if site not in self.declared]
            self._declare({site: uploads[site].n for site in fresh})
        out = {**received.wrong, **found}
        blamed = {site: failure for site, failure in out.items() if failure.cause != UNUSUAL}
        if received.kind == UNUSABLE:
            self.quarantine.regret(blamed)
        for site, failure in out.items():
            log.warning("%s: %s for %s: %s", site, failure.cause, failure.field or "its answer", failure.reason)
        for site in self.quarantine.note(accepted, [(site, failure.reason) for site, failure in blamed.items()]):
            log.warning("%s: quarantined after %d rejected uploads in a row", site, self.limits.strikes)
        self._save()
        return found

    def _declare(self, counts: Mapping[str, int]) -> None:
        """Remember what these sites declared; who would outweigh all others together is named: nobody can check it."""
        self.declared |= counts
        for site in counts if len(self.declared) > 2 else ():
            others = sum(n for other, n in self.declared.items() if other != site)
            if self.declared[site] > others:
                log.warning("%s declares %d training samples, more than all %d others together (%d): unless the "
                            "aggregator is a robust one, its update counts for more than theirs", site,
                            self.declared[site], len(self.declared) - 1, others)

    def barred(self) -> set[str]:
        """The sites that are not asked; those an operator has lifted since the last call no longer are among them."""
        if self.folder is not None:
            lifted = self.quarantine.obey(self.folder)
            for site in lifted:
                log.warning("%s: quarantine lifted", site)
            if lifted:
                self._save()
        return set(self.quarantine.held)

    def _save(self) -> None:
        if self.folder is None:
            return
        kept = {"strikes": self.quarantine.strikes, "held": self.quarantine.held, "samples": self.declared}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / KEPT, kept)
