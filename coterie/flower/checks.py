"""Uploads are checked before they are merged, and a client that keeps failing is quarantined.

The checks run in this order, and the first that fails is the reason given:

1. names, shapes and dtypes are those expected (`Schema`);
2. the sample count n is a positive whole number, and max(n / n_before, n_before / n) <= `samples`;
3. every number is finite;
4. for every large float tensor u of the m >= 3 uploads that passed 1 to 3, |u_i| <= `norm` * median_j |u_j|.

Large means at least a tenth of the elements of the largest float tensor: models and updates. Losses, counts and other
small facts of honest sites differ by orders of magnitude, so for them 1 and 3 must do. A median of 0 bounds nothing.
What is wrong but well formed and of usual length passes; robust aggregators are for that.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.files import read_json, write_json

log = logging.getLogger("coterie.server")

COHORT = 3
"""With fewer uploads there is no median to speak of, and norms are not compared."""

LIFT = "lift"
"""The file in the server's folder by which an operator lifts quarantines: one client's name a line."""

KEPT = "checks.json"
"""Strikes, quarantines and sample counts, in the server's folder."""

Schema = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype of a tensor that one client sends."""


@dataclass(frozen=True)
class Limits:
    """What an upload may differ in."""

    norm: float | None = 10.0
    """A client's update may be this many times as long as the median; none: any length."""

    samples: float | None = 2.0
    """A client's sample count may grow or shrink by this factor from one accepted upload to the next; none: by any."""

    strikes: int = 3
    """After this many rejected uploads in a row a client is quarantined."""

    def __post_init__(self) -> None:
        if self.norm is not None and not self.norm > 1:
            raise CoterieError(f"the norm limit is a factor above 1 on the median (or none), not {self.norm}.")
        if self.samples is not None and not self.samples >= 1:
            raise CoterieError(f"the limit of samples is a factor of at least 1 (or none), not {self.samples}.")
        if self.strikes < 1:
            raise CoterieError(f"a client is quarantined after at least 1 rejected upload, not {self.strikes}.")


@dataclass(frozen=True)
class Arrived:
    """One client's upload as it came: its sample count and its tensors, without a client axis."""

    n: int
    tensors: Mapping[str, Tensor]


def schema_of(tensors: Mapping[str, Tensor]) -> Schema:
    """Names, shapes and dtypes of one client's tensors."""
    return {name: (tuple(t.shape), t.dtype) for name, t in sorted(tensors.items())}


def agreed(uploads: Mapping[str, Arrived]) -> Schema:
    """The schema most uploads have, for when nothing else says what to expect; of a tie, that of the first name."""
    if not uploads:
        raise CoterieError("there are no uploads to take a schema from.")
    found = [schema_of(uploads[client].tensors) for client in sorted(uploads)]
    count = Counter(tuple(schema.items()) for schema in found)
    return max(found, key=lambda schema: count[tuple(schema.items())])


def judge(
    uploads: Mapping[str, Arrived], schema: Schema, limits: Limits | None = None,
    before: Mapping[str, int] | None = None,
) -> tuple[dict[str, Arrived], list[tuple[str, str]]]:
    """The uploads that may be merged, by client, and (client, reason) for the others.

    `before` holds each client's sample count in its last accepted upload. Who is accepted does not depend on the order
    of `uploads`; both results are in that order.
    """
    limits = limits if limits is not None else Limits()
    reasons = {client: _alone(upload, schema, limits, (before or {}).get(client)) for client, upload in uploads.items()}
    sound = {client: upload for client, upload in uploads.items() if reasons[client] is None}
    reasons.update(_too_long(sound, schema, limits))
    accepted = {client: upload for client, upload in uploads.items() if reasons[client] is None}
    return accepted, [(client, reason) for client, reason in reasons.items() if reason is not None]


def _alone(upload: Arrived, schema: Schema, limits: Limits, before: int | None) -> str | None:
    """What is wrong with an upload by itself, or None."""
    absent, extra = sorted(set(schema) - set(upload.tensors)), sorted(set(upload.tensors) - set(schema))
    if absent or extra:
        found = (("missing", absent), ("unexpected", extra))
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in found if names)
    for name, (shape, dtype) in schema.items():
        t = upload.tensors[name]
        if tuple(t.shape) != shape:
            return f"{name} has shape {list(t.shape)}, not {list(shape)}"
        if t.dtype != dtype:
            return f"{name} is {_plain(t.dtype)}, not {_plain(dtype)}"
    n = upload.n
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        return f"the sample count is {n!r}, not a positive whole number"
    if before is not None and limits.samples is not None and max(n, before) > limits.samples * min(n, before):
        return f"the sample count went from {before} to {n}, by more than a factor of {limits.samples:g}"
    for name in schema:
        t = upload.tensors[name]
        bad = int((~torch.isfinite(t)).sum()) if t.is_floating_point() or t.is_complex() else 0
        if bad:
            return f"{name} holds {bad} number{'s' * (bad > 1)} that {'are' if bad > 1 else 'is'} not finite"
    return None


def _too_long(uploads: Mapping[str, Arrived], schema: Schema, limits: Limits) -> dict[str, str]:
    """Client -> reason, for those whose update is too long beside the others'."""
    if limits.norm is None or len(uploads) < COHORT:
        return {}
    found: dict[str, str] = {}
    for name in large(schema):
        norms = {client: _norm(upload.tensors[name]) for client, upload in uploads.items()}
        median = _median(list(norms.values()))
        for client, norm in norms.items():
            if client not in found and (math.isinf(norm) or norm > limits.norm * median > 0):
                times = f"{norm / median:.3g}" if 0 < median < math.inf else "many"
                found[client] = f"{name} is {times} times as long as the median ({norm:.3g}), more than {limits.norm:g}"
    return found


def large(schema: Schema) -> list[str]:
    """The float tensors with at least a tenth of the elements of the largest one."""
    sizes = {name: math.prod(shape) for name, (shape, dtype) in schema.items() if dtype.is_floating_point}
    return [name for name, size in sizes.items() if size and 10 * size >= max(sizes.values())]


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float64))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- quarantine -------------------------------------------------------------------------------------------------------


@dataclass
class Quarantine:
    """Who was rejected how often in a row, and who is held until an operator lifts it.

    `state()` is a plain dict for the server's checkpoint, and `Quarantine.of(state)` is the record again. A client that
    does not answer gets no strike and loses none.
    """

    limit: int = 3
    strikes: dict[str, int] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)

    def note(self, accepted: Iterable[str], rejected: Iterable[tuple[str, str]]) -> list[str]:
        """Count a round's verdicts; the clients that are quarantined from now on."""
        for client in accepted:
            self.strikes.pop(client, None)
        fresh = []
        for client, reason in rejected:
            self.strikes[client] = self.strikes.get(client, 0) + 1
            if self.strikes[client] >= self.limit and client not in self.held:
                self.held[client] = reason
                fresh.append(client)
        return fresh

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
    with open(folder / LIFT, "a") as file:
        file.write(f"{client}\n")


@dataclass(frozen=True)
class Received:
    """The uploads of a round (or the introductions of an admission), by site, before any of them is used."""

    experiment: str
    kind: str  # "round" or "introduce"
    round: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # site -> name -> [1, ...]
    n: Mapping[str, int]  # site -> training samples it claims; empty for introductions
    wrong: Mapping[str, str] = field(default_factory=dict)  # site -> why what it sent is no answer to what was asked
    private: bool = False


class Check(Protocol):
    """What looks at uploads before they are merged."""

    def __call__(self, received: Received) -> Mapping[str, str]:
        """The sites whose upload is to be left out, each with the reason."""
        ...

    def barred(self) -> Iterable[str]:
        """Sites that are not asked at all until an operator says otherwise."""
        ...


def refused(check: Check | None, received: Received) -> dict[str, str]:
    """Site -> reason, for uploads that are not used: what the run's check says, then what could not be stacked."""
    found: dict[str, str] = {}
    if check is not None and (received.tensors or received.wrong):
        found |= {site: reason for site, reason in check(received).items() if site in received.tensors}
    for site, n in received.n.items():
        if n < 1:
            found.setdefault(site, f"it claims {n} training samples.")
    return found | _unlike({site: tensors for site, tensors in received.tensors.items() if site not in found})


def _unlike(sent: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Uploads whose names, shapes or types are not those of most: they cannot be stacked with them."""
    forms = {site: tuple(sorted((k, tuple(t.shape), str(t.dtype)) for k, t in tensors.items()))
             for site, tensors in sent.items()}
    if not forms:
        return {}
    usual = Counter(forms.values()).most_common(1)[0][0]
    return {site: f"it holds {list(form)}, most others {list(usual)}." for site, form in forms.items() if form != usual}


class Inspector:
    """The checks and the quarantine of one server. What it must remember lies in `checks.json` of its folder.

    Introductions are facts of a site's own, so their norms are not compared, and they bring no sample count. With
    privacy on, no client's fate may depend on another's data, and the clip bounds norms anyway: they are not compared.
    """

    def __init__(self, limits: Limits | None = None, folder: Path | None = None) -> None:
        self.limits = limits if limits is not None else Limits()
        self.folder = folder
        self.quarantine, self.before = Quarantine(self.limits.strikes), dict[str, int]()
        if folder is not None and (folder / KEPT).exists():
            try:
                kept = read_json(folder / KEPT)
                self.quarantine = Quarantine(self.limits.strikes, dict(kept["strikes"]), dict(kept["held"]))
                self.before = {client: int(n) for client, n in kept["samples"].items()}
            except (KeyError, TypeError, ValueError) as reason:
                what = "remove it to forget strikes and quarantines"
                raise CoterieError(f"{folder / KEPT} is damaged; {what}.") from reason

    def __call__(self, received: Received) -> dict[str, str]:
        """Site -> reason, for what must not be used."""
        introduced = received.kind == "introduce"
        uploads = {site: Arrived(1 if introduced else received.n.get(site, 0), tensors)
                   for site, tensors in received.tensors.items()}
        accepted, rejected = dict[str, Arrived](), list(received.wrong.items())
        if uploads:
            free = introduced or received.private
            limits = replace(self.limits, norm=None, samples=None) if free else self.limits
            accepted, found = judge(uploads, agreed(uploads), limits, self.before)
            rejected += found
        if not introduced and not received.private:
            self.before |= {site: upload.n for site, upload in accepted.items()}
        for site, reason in rejected:
            log.warning("%s: upload rejected: %s", site, reason)
        for site in self.quarantine.note(accepted, rejected):
            log.warning("%s: quarantined after %d rejected uploads in a row", site, self.limits.strikes)
        self._save()
        return dict(rejected)

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
        kept = {"strikes": self.quarantine.strikes, "held": self.quarantine.held, "samples": self.before}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / KEPT, kept)
