"""A model for a client that arrives after training, and an honest estimate of how good it is.

The newcomer goes through the method's own rule for unseen clients (hello, introduce, admit, send, join, deploy), as in
the evaluator; then its model may be adapted by local training. Whatever looks at its samples, the choice whether to
adapt included, is repeated inside every fold of the cross-validation that makes the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from coterie.contract import records
from coterie.contract.cohort import Cohort
from coterie.contract.method import Method
from coterie.contract.net import Net
from coterie.contract.records import Models, Record
from coterie.data import Federation, load, spelled
from coterie.data.partition import Ints, generator
from coterie.data.readers import find
from coterie.data.splits import deal
from coterie.errors import CoterieError, NoLabels, counted, unknown
from coterie.evaluation import intervals
from coterie.evaluation.intervals import LEVEL
from coterie.running.clients import Clients, deploy, introduce
from coterie.running.config import Training
from coterie.running.saved import Saved, anywhere
from coterie.serving.export import job_of, write_model

FOLDS = 10
"""Of the cross-validation behind the estimate; as many as samples where those are fewer."""
REPLICAS = 3
"""Models a fold makes, with other orders of batches and other validation samples: one of them is counted, all of them
show how far a model that is made again differs."""
GENTLE = 5
"""How many times smaller the learning rate of the adaptation is than a round's, and how many times longer it takes."""
INNER = 5
"""Folds of the comparison that decides whether to adapt."""
FEWEST = 5
"""Labelled samples below which nothing is chosen or trained for a newcomer."""
HELD = 1 << 28
"""Bytes of samples computed together: folds are copies of a newcomer's samples."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Adapt = Literal["auto", "yes", "no"]
REPORTS = ("text", "json")


@dataclass(frozen=True)
class Estimate:
    """What the model scores on samples it has not seen, counted by cross-validation on the newcomer's `n` samples."""

    metric: str  # accuracy, or loss (mean squared error) for regression
    value: float
    interval: tuple[float, float]  # for the metric on `future` further samples of this client, at intervals.LEVEL
    future: int
    confidence: tuple[float, float]  # for the metric on endlessly many
    n: int
    folds: int
    drift: float  # standard deviation between models made again from samples like these


@dataclass(frozen=True)
class Personal:
    """A newcomer's model and how it came about."""

    row: Tensor  # [D]
    clients: Clients  # layout, module and samples
    client: str
    round: int
    adapted: bool
    estimate: Estimate | None  # none for the fallback
    why: tuple[str, ...]  # sentences
    facts: Mapping[str, Any]  # the same as numbers

    @property
    def fallback(self) -> bool:
        return self.estimate is None


INHERITED = ("text", "tokenizer", "words", "length", "regression", "shape")
"""Options of the run's data that a newcomer's table takes over where it does not say otherwise."""


def read(path: str, client: str | None = None, saved: Saved | None = None) -> tuple[tuple[Tensor, Tensor], str]:
    """One client's labelled samples from a file, spelled as for --data, and its name; NoLabels where there are none.

    A table is encoded as the run's was: columns, categories, scale and classes. Labels of other data that are names
    must be those of all classes of the run: numbered by themselves, fewer would be other ones.
    """
    place, options = spelled(path)
    given: dict[str, Any] = {**_as_in_the_run(place, saved), **options}
    try:
        source = load(place, **given)
    except NoLabels:
        source = load(place, **{**given, "skip": True})  # leaves out samples without a label, and nothing else is wrong
    if saved is not None and source.classes is not None and len(source.classes) != saved.classes:
        raise CoterieError(
            f"{path} names {len(source.classes)} classes and the run has {saved.classes}; name all of them in the "
            "run's order, with the option classes=NAME,NAME,..."
        )
    x, y = source.x, source.y
    if source.client is not None:
        names = sorted({str(c) for c in source.client})
        if client is None and len(names) > 1:
            raise CoterieError(f"{path} holds the samples of {len(names)} clients; name the newcomer with --client.")
        if client is not None and client not in names:
            raise unknown(f"client in {path}", client, names)
        name = client or names[0]
        mine = torch.from_numpy(np.array([str(c) == name for c in source.client]))
        return (x[mine], y[mine]), name
    if client is not None:
        raise CoterieError(f"{path} names no clients; leave --client out.")
    return (x, y), Path(place).stem


def _as_in_the_run(place: str, saved: Saved | None) -> dict[str, Any]:
    """How the run read its table, for one more: its encoding, and how it made samples of texts."""
    if saved is None or saved.encoding is None or saved.experiment is None or find(place) != "table":
        return {}
    asked = spelled(saved.experiment.data)[1]
    return {"schema": saved.encoding, **{name: asked[name] for name in INHERITED if name in asked}}


def personalize(
    saved: Saved, data: tuple[Tensor, Tensor] | None, name: str = "newcomer", adapt: Adapt = "auto",
    future: int | None = None, seed: int = 0,
) -> Personal:
    """The newcomer's model by the run's method, with an estimate for `future` further samples (by default n / 3).

    Without labels, or with fewer than FEWEST of them, it is the method's fallback, and there is no estimate.
    """
    desk = Desk(saved, seed)
    n = 0 if data is None else len(data[0])
    if data is None or n < FEWEST:
        return desk.give_fallback(name, n)
    x, y = desk.checked(*data, name)
    if future is not None and future < 1:
        raise CoterieError(f"the interval is for at least 1 further sample, not {future}.")
    outer = cut(np.arange(n), FOLDS, generator(seed, "folds"))
    asked = adapt == "auto"
    inner = [cut(kept, INNER, generator(seed, "inner", k)) if asked else []
             for k, kept in enumerate([np.arange(n), *(kept for kept, _ in outer)])]
    scored = iter(desk.score(x, y, [*outer * REPLICAS, *(part for parts in inner for part in parts)], name))
    replicas = [[next(scored) for _ in outer] for _ in range(REPLICAS)]
    decided, *inside = [decide([next(scored) for _ in parts], adapt) for parts in inner]
    held = [[folds[k][decision.adapt] for folds in replicas] for k, decision in enumerate(inside)]  # [fold][replica]
    estimate = _estimate(held, future or max(1, round(n / 3)), bool(saved.classes))
    return desk.give(x, y, name, decided, estimate)


def hand_out(
    saved: Saved, data: str, out: Path, client: str | None, adapt: str, future: int | None, seed: int, report: str
) -> str:
    """What `coterie personalize` does: read, personalize, write the model and its json; the text to print."""
    for what, given, known in (("value of --adapt", adapt, get_args(Adapt)), ("kind of report", report, REPORTS)):
        if given not in known:
            raise unknown(what, given, known)
    if out.suffix != ".safetensors":
        raise CoterieError(f"the model is written as safetensors, so -o must end in .safetensors, not {out.name}.")
    if not out.parent.is_dir():
        raise CoterieError(f"there is no folder {out.parent} to write {out.name} to.")
    name = client or Path(spelled(data)[0]).stem
    samples, lacking = None, ""
    try:
        samples, name = read(data, client, saved)
    except NoLabels as reason:
        lacking = str(reason)
    found = personalize(saved, samples, name, adapt, future, seed)  # type: ignore[arg-type]
    found = replace(found, why=(*found.why, lacking)) if lacking else found
    facts = described(saved, found)
    beside = write_model(out, found.clients.layout, found.row, facts)
    if report == "json":
        return json.dumps({**facts, "file": str(out)}, indent=2)
    return "\n".join([*found.why, *_stated(found.estimate), f"model: {out}, {beside}"])


def described(saved: Saved, found: Personal) -> dict[str, Any]:
    """What the json beside a newcomer's model says."""
    job = job_of(saved)
    return {
        "method": job["method"], "model": job["model"], "run": str(saved.folder.path.resolve()), "client": found.client,
        "round": found.round, "newcomer": True, "adapted": found.adapted, "fallback": found.fallback,
        "estimate": None if found.estimate is None else {**vars(found.estimate), "level": LEVEL},
        "why": list(found.why), "facts": dict(found.facts), "job": job,
    }


def _stated(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return []
    share = estimate.metric == "accuracy"

    def shown(value: float) -> str:
        return f"{value:.1%}".replace("%", " %") if share else f"{value:.4g}"

    metric = "accuracy" if share else "mean squared error"
    (low, high), (least, most), level = estimate.interval, estimate.confidence, f"{LEVEL:.0%}".replace("%", " %")
    return [
        f"Estimate: {metric} {shown(estimate.value)}, by {estimate.folds}-fold cross-validation of all of this, the "
        f"choice whether to adapt included, on its {counted(estimate.n, 'labelled sample')}.",
        f"On {counted(estimate.future, 'further sample')} of this client: {shown(low)} to {shown(high)} ({level} "
        "prediction interval).",
        f"On endlessly many: {shown(least)} to {shown(most)} ({level} confidence interval).",
    ]


# -- inside ------------------------------------------------------------------------------------------------------------


Part = tuple[Ints, Ints]
"""Sample numbers kept for everything that makes a model, and those held out to score it."""


@dataclass(frozen=True)
class Held:
    """Held-out samples: whether each was predicted correctly (0 or 1) and its loss, `[h]`."""

    right: Array
    loss: Array

    @classmethod
    def of(cls, parts: Iterable[Held]) -> Held:
        """All of them together."""
        right, loss = zip(*((part.right, part.loss) for part in parts), strict=True)
        return cls(np.concatenate(right), np.concatenate(loss))

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better: correct samples, then the loss."""
        return float(self.right.sum()), -float(self.loss.sum())

    def facts(self) -> dict[str, Any]:
        return {"n": len(self.loss), "correct": int(self.right.sum()), "loss": float(self.loss.mean())}


@dataclass(frozen=True)
class Decision:
    """Whether to adapt, and the cross-validation that says so: served and adapted; none where it was not asked."""

    adapt: bool
    served: Held | None = None
    adapted: Held | None = None


def decide(folds: Sequence[tuple[Held, Held]], adapt: Adapt) -> Decision:
    """To adapt where that gives more correct held-out samples, or as many and a smaller loss."""
    if not folds:
        return Decision(adapt == "yes")
    served, adapted = (Held.of(both[stage] for both in folds) for stage in (0, 1))
    return Decision(adapted.rank > served.rank, served, adapted)


class Desk:
    """One run's server, ready for newcomers. Folds of one newcomer are computed together, each a client of its own."""

    def __init__(self, saved: Saved, seed: int = 0) -> None:
        self.saved, self.seed = saved, seed
        self.factory = saved.factory()
        self.server, self.meta = saved.server()
        self.t = int(self.meta["round"])
        self.number = saved.arrived(self.t)

    def checked(self, x: Tensor, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """The samples, if they are what the run is about."""
        if tuple(x.shape[1:]) != self.saved.shape:
            raise CoterieError(
                f"the run's samples have shape {list(self.saved.shape)}; those of {name} have {list(x.shape[1:])}."
            )
        made = Federation.from_clients([(x, y)], val=0.0, test=0.0, classes=self.saved.classes, names=[name])
        if made.outputs != self.saved.outputs:
            raise CoterieError(f"the run predicts {self.saved.outputs} numbers a sample; {name} has {made.outputs}.")
        return x, y

    def clients(self, federation: Federation) -> Clients:
        """Newcomers with these data, all of them the first one after the run's clients."""
        saved = self.saved
        made = Clients(
            saved.method, self.factory, federation, anywhere(saved.training), saved.head, choices=self.meta["choices"],
            population=self.number, first=self.number,
        )
        if made.layout.digest != self.meta["layout"]:
            raise CoterieError(
                f"the model {saved.model} has layout {made.layout.digest} and {made.layout.size} columns; the run's "
                f"checkpoint holds another one (layout {self.meta['layout']})."
            )
        return made

    def arrive(self, clients: Clients) -> tuple[Tensor, Cohort, dict[str, Any]]:
        """The rows `[C, D]` these newcomers are served, none knowing of another; their cohort; what led to the first.

        Each is admitted to a copy of the server of its own.
        """
        method, device = self.saved.method, clients.device
        server = self.server.map(lambda t: t.to(device))
        cohort = clients.at(self.t, np.arange(clients.federation.clients))
        hello = records.spread(method.hello(server), cohort.size)
        told = introduce(method, cohort, hello)
        number = torch.tensor([self.number], device=device)
        sent, admitted = [], None
        for i in range(cohort.size):
            alone = type(told).of({name: t[i : i + 1] for name, t in told.tensors().items()})
            state: Record = method.admit(server, number, alone)
            admitted = admitted or state
            sent.append(records.spread(method.send(state, number), 1))
        payload = type(sent[0]).of(records.concatenate([one.tensors() for one in sent]))
        mine = method.join(cohort, payload)
        rows = deploy(method, cohort, payload, mine)
        assert admitted is not None
        return rows, cohort, {"told": told, "server": admitted, "payload": payload, "mine": mine}

    def federation(self, x: Tensor, y: Tensor, parts: Sequence[Part], names: Sequence[str]) -> Federation:
        """A client for each part; of the samples kept a share is for validation, as for the run's own clients."""
        pieces: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
        for (kept, held), name in zip(parts, names, strict=True):
            train, val, _ = deal(kept, self.saved.val, 0.0, generator(self.seed, "split", name))
            for into, chosen in zip(pieces, (train, held, val), strict=True):
                into.append((x[torch.from_numpy(chosen)], y[torch.from_numpy(chosen)]))
        return Federation.from_splits(*pieces, classes=self.saved.classes, names=names)

    def score(self, x: Tensor, y: Tensor, parts: Sequence[Part], name: str) -> list[tuple[Held, Held]]:
        """Each part's held-out samples by the models that the kept ones lead to: served, and adapted."""
        found: list[tuple[Held, Held]] = []
        most = max(1, HELD // max(1, x.nbytes))
        for first in range(0, len(parts), most):
            some = parts[first : first + most]
            names = [f"{name}/part{first + k}" for k in range(len(some))]
            clients = self.clients(self.federation(x, y, some, names))
            rows, cohort, _ = self.arrive(clients)
            trained, net = adapted(cohort, rows, self.saved.training), clients.engine.net
            net.mode(training=False)
            with clients.engine.computing():
                for k, (xs, ys) in enumerate(cohort.samples("test")):
                    one, other = (_held(net, stage[k], xs, ys) for stage in (rows, trained))
                    found.append((one, other))
        return found

    def give(self, x: Tensor, y: Tensor, name: str, decided: Decision, estimate: Estimate) -> Personal:
        """The model from all samples."""
        none = np.arange(0)
        clients = self.clients(self.federation(x, y, [(np.arange(len(x)), none)], [name]))
        rows, cohort, led = self.arrive(clients)
        spent = int(cohort.spent[0])
        facts, why = _explained(self.saved.method, self.number, rows, cohort, led)
        row = adapted(cohort, rows, self.saved.training)[0] if decided.adapt else rows[0]
        if spent:
            why.append(f"The rule took {spent} local steps.")
        why.append(_why_adapted(decided, int(cohort.spent[0]) - spent, bool(self.saved.classes)))
        facts["adapt"] = {
            "kept": decided.adapt,
            "served": None if decided.served is None else decided.served.facts(),
            "adapted": None if decided.adapted is None else decided.adapted.facts(),
        }
        return Personal(row, clients, name, self.t, decided.adapt, estimate, tuple(why), facts)

    def give_fallback(self, name: str, n: int) -> Personal:
        """The method's model for somebody of whom nothing is known."""
        saved = self.saved
        x, y = torch.zeros(1, *saved.shape), torch.zeros(1, dtype=torch.int64 if saved.classes else torch.float32)
        if not saved.classes and saved.outputs > 1:
            y = torch.zeros(1, saved.outputs)
        x = x.long() if _tokens(self.factory) else x
        clients = self.clients(Federation.from_splits([(x, y)], classes=saved.classes, names=[name]))
        server = self.server.map(lambda t: t.to(clients.device))
        row = saved.method.fallback(server, clients.init, saved.report())
        few = f"{name} has {n} labelled samples, and at least {FEWEST} are needed" if n else f"{name} has no labels"
        why = (
            f"{few}: nothing was chosen or trained for it, and nothing can be said about how good the model is.",
            f"It gets {saved.method.name}'s fallback, which is the same for every such client.",
        )
        return Personal(row, clients, name, self.t, False, None, why, {"samples": n})


def adapted(cohort: Cohort, rows: Tensor, training: Training) -> Tensor:
    """`rows [C, D]` after GENTLE times the run's local work at a GENTLE-th of its learning rate, so as far in all.

    Nobody averages this model with others', so its steps must not jump about: at the learning rate of a round the last
    few batches decide what it is.
    """
    return cohort.train(
        rows, lr=cohort.lr / GENTLE, epochs=GENTLE * training.epochs if training.steps is None else None,
        steps=None if training.steps is None else GENTLE * training.steps,
    )


def cut(samples: Ints, folds: int, rng: np.random.Generator) -> list[Part]:
    """The parts of a cross-validation; no fold is empty."""
    pieces = np.array_split(rng.permutation(samples), min(folds, len(samples)))
    return [
        (np.concatenate([piece for j, piece in enumerate(pieces) if j != k]), held) for k, held in enumerate(pieces)
    ]


def _held(net: Net, row: Tensor, x: Tensor, y: Tensor) -> Held:
    """Samples by the model of a row `[D]`."""
    with torch.no_grad():
        outputs = net(row, x)
        loss = net.task.loss(outputs, y)
    right = outputs.argmax(1) == y if net.task.classes else torch.zeros(len(x))
    return Held(right.double().cpu().numpy(), loss.double().cpu().numpy())


def drift(folds: Sequence[Array]) -> float:
    """tau^2: how much the mean of a model's scores varies when it is made again, beyond what each sample does alone.

    `folds` hold the scores `[replicas, h]` of a fold's held-out samples. tau^2 is the mean covariance, over replicas,
    of two different samples of a fold (never below 0): Var(sum) = sum of variances + sum of covariances.
    """
    found = pairs = 0.0
    for scores in folds:
        found += float(scores.sum(1).var(ddof=1) - scores.var(0, ddof=1).sum())
        pairs += scores.shape[1] * (scores.shape[1] - 1)
    return max(found / pairs, 0.0) if pairs else 0.0


def _estimate(folds: Sequence[Sequence[Held]], future: int, classes: bool) -> Estimate:
    """From every fold's replicas: the first ones are counted, all of them give tau^2.

    The model handed out is one more draw, and the estimate the mean of as many draws as folds: tau^2 (1 + 1 / folds).
    """
    counted = Held.of(replicas[0] for replicas in folds)
    n = len(counted.loss)
    stacked = [np.stack([one.right if classes else one.loss for one in replicas]) for replicas in folds]
    extra = drift(stacked) * (1 + 1 / len(folds))
    if classes:
        correct = int(counted.right.sum())
        worth = intervals.worth(correct, n, extra)
        k = correct * worth / n
        interval, confidence = intervals.predictive(k, worth, future), intervals.clopper_pearson(k, worth)
        return Estimate("accuracy", correct / n, interval, future, confidence, n, len(folds), extra**0.5)
    mean, deviation = float(counted.loss.mean()), float(counted.loss.std(ddof=1))
    interval, endless = (intervals.mean_predictive(mean, deviation, n, m, extra) for m in (future, 0))
    return Estimate("loss", mean, interval, future, endless, n, len(folds), extra**0.5)


def _tokens(factory: Any) -> bool:
    """Whether a model takes whole numbers: its first layer with weights is an embedding."""
    with torch.random.fork_rng(devices=[]):
        first = next((m for m in factory().modules() if next(m.parameters(recurse=False), None) is not None), None)
    return isinstance(first, torch.nn.Embedding)


# -- why ---------------------------------------------------------------------------------------------------------------


def _explained(
    method: Method, clients: int, rows: Tensor, cohort: Cohort, led: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """What the rule chose, from what passed between client and server: a cluster, one of K models, weights."""
    facts: dict[str, Any] = {"rule": method.newcomer, "samples": int(cohort.n[0])}
    why = [f"{method.name} gives a newcomer {method.newcomer}."] if method.newcomer else []
    clusters, models = method.clusters(led["server"]), method.few(led["server"])
    if clusters is not None and models is not None:
        cluster, count = clusters.tolist(), len(models)
        mine, members = cluster[clients], cluster[:clients].count(cluster[clients])
        facts["cluster"] = {"chosen": mine, "clusters": count, "members": members}
        why.append(f"It went to cluster {mine} of {count} (numbered from 0), where {members} of the run's "
                   f"{clients} clients are.")
    sent = led["payload"].rows if isinstance(led["payload"], Models) else None
    if sent is not None and sent.shape[-1] == rows.shape[-1]:  # [1, K, D]
        losses = {split: cohort.loss(sent, split)[0].tolist() for split in ("train", "val")}
        same = [k for k, one in enumerate(sent[0]) if torch.equal(one, rows[0])]
        facts["models"] = {"chosen": same[0] if same else None, "loss": losses}
        seen = {split: ", ".join(f"{loss:.3g}" for loss in values[:10]) for split, values in losses.items()}
        what = f"It uses model {same[0]} of the {sent.shape[1]} it was sent" if same else (
            f"It uses a model of its own made with the {sent.shape[1]} it was sent")
        why.append(f"{what}; their losses are {seen['train']} on its training and {seen['val']} on its validation "
                   "samples.")
    small = {**led["told"].tensors(), **led["mine"].tensors()}
    small = {name: t[0].flatten() for name, t in small.items() if t.is_floating_point()}  # no numbers of clusters
    weights = {name: t.tolist() for name, t in small.items() if 0 < len(t) <= 32}
    for name, values in weights.items():
        why.append(f"Its {name} is {', '.join(f'{v:.3g}' for v in values)}.")
    if weights:
        facts["weights"] = weights
    return facts, why


def _why_adapted(decided: Decision, steps: int, classes: bool) -> str:
    served, adapted = decided.served, decided.adapted
    if served is None:
        return f"It was adapted by {steps} local steps, as asked." if decided.adapt else "It was not adapted, as asked."
    assert adapted is not None
    n, (more, gain), (few, loss) = len(served.loss), adapted.rank, served.rank
    if classes and more != few:
        numbers = f"{more:.0f} of {n} correct against {few:.0f} without"
    else:
        same = f"{few:.0f} of {n} correct either way, " if classes else ""
        numbers = f"{same}mean loss {-gain / n:.3g} against {-loss / n:.3g} without"
    if decided.adapt:
        return f"It was adapted by {steps} local steps, which did better in a {INNER}-fold comparison: {numbers}."
    return f"It was not adapted, because that did no better in a {INNER}-fold comparison: {numbers}."
