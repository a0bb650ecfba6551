"""A model for a client that arrives after training, and an honest estimate of how good it is.

The newcomer goes through the method's own rule for unseen clients (hello, introduce, admit, send, join, deploy), as in
the evaluator; then its model may be adapted by local training. Whatever looks at its samples, the choice whether to
adapt included, is repeated inside every fold of the cross-validation that makes the estimate.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from coterie.contract.cohort import Cohort, Init
from coterie.contract.frozen import duplicate
from coterie.contract.ground import grounded
from coterie.contract.layout import Layout
from coterie.contract.net import Task
from coterie.contract.records import Models
from coterie.contract.tokens import per_token
from coterie.contract.units import Unit, answering
from coterie.data import Federation, groups
from coterie.data.partition import Ints, generator
from coterie.data.splits import deal
from coterie.errors import CoterieError, counted
from coterie.evaluation.score import LOSS
from coterie.evaluation.stages import ADAPTED, SERVED
from coterie.running import arrival
from coterie.running.arrival import Arrival
from coterie.running.chosen import CHOSEN, HandedOut
from coterie.running.clients import Clients
from coterie.running.saved import Saved, anywhere
from coterie.running.training import Training
from coterie.serving.estimate import (
    FOLDS,
    INNER,
    REPLICAS,
    Adapt,
    ConstantScore,
    Decision,
    Estimate,
    Fold,
    Held,
    Renaming,
    constant_answer,
    cut,
    decide,
    estimated,
    held_out,
    renaming,
)
from coterie.serving.newcomer_data import ONE_LABEL, other_units

GENTLE = 5
"""How many times smaller the learning rate of the adaptation is than a round's, and how many times longer it takes."""
FEWEST = 5
"""Labelled samples below which nothing is chosen or trained for a newcomer."""
HELD = 1 << 28
"""Bytes of samples computed together: folds are copies of a newcomer's samples."""


@dataclass(frozen=True)
class Personalized:
    """A newcomer's model and how it came about."""

    row: Tensor  # [D]
    clients: Clients  # layout, module and samples
    client: str
    taken: HandedOut  # the round whose server it came to
    adapted: bool
    estimate: Estimate | None  # none for the fallback
    why: tuple[str, ...]  # sentences
    facts: Mapping[str, Any]  # the same as numbers
    residual: Tensor | None = None  # what is added to the frozen weights of adapted layers

    @property
    def layout(self) -> Layout:
        """That of the row, with the frozen weights that it stands on."""
        return grounded(self.clients.init.module, self.clients.layout, self.residual)[1]

    @property
    def round(self) -> int:
        return self.taken.round

    @property
    def fallback(self) -> bool:
        return self.estimate is None

    def module(self) -> nn.Module:
        """The model, ready for use."""
        row = self.row.cpu()
        module = duplicate(self.clients.init.module).to(row.dtype).cpu()
        module, layout = grounded(module, self.clients.layout, self.residual)
        return answering(layout.load(module, row).eval(), self.clients.federation.unit)


def personalize(
    saved: Saved, data: tuple[Tensor, Tensor] | None, name: str = "newcomer", adapt: Adapt = "auto",
    future: int | None = None, seed: int = 0, group: ArrayLike | None = None, when: str = "chosen",
) -> Personalized:
    """The newcomer's model by the run's method, with an estimate for `future` further samples (by default n / 3).

    It comes to the server of the round that tables report for its stage, served or adapted, or to that of the last.

    Without labels, or with fewer than FEWEST of them, it is the method's fallback, and there is no estimate. Samples of
    one `group [n]` are held out together, as in the run's own split.
    """
    desk = Desk(saved, seed, SERVED, when)
    other = Desk(saved, seed, ADAPTED, when)  # the stages may have chosen different rounds
    n = 0 if data is None else len(data[0])
    if data is None or n < FEWEST:
        return desk.give_fallback(name, data)
    x, y = desk.checked(*data, name)
    if future is not None and future < 1:
        raise CoterieError(f"the interval is for at least 1 further sample, not {future}.")
    desk.group = other.group = None if group is None else groups.coded(group, n)
    desk.together = other.together = desk.fitting(x, y, name)
    outer = cut(np.arange(n), FOLDS, generator(seed, "folds"), desk.group)
    asked = adapt == "auto"
    inner = [cut(kept, INNER, generator(seed, "inner", k), desk.group) if asked else []
             for k, kept in enumerate([np.arange(n), *(kept for kept, _ in outer)])]
    folds = [*outer * REPLICAS, *(part for parts in inner for part in parts)]
    both = desk.score(x, y, folds, name)
    if other.t != desk.t:
        trained = [one for _, one in other.score(x, y, folds, name)]
        both = [(served, one) for (served, _), one in zip(both, trained, strict=True)]
    scored = iter(both)
    replicas = [[next(scored) for _ in outer] for _ in range(REPLICAS)]
    decided, *inside = [decide([next(scored) for _ in parts], adapt) for parts in inner]
    held = [[folds[k][decision.adapt] for folds in replicas] for k, decision in enumerate(inside)]  # [fold][replica]
    loss = saved.folder.scales()[LOSS.name]
    estimate = estimated(held, future or max(1, round(n / 3)), bool(saved.spec.classes), loss)
    constant, other_names = desk.constant(y, outer), None
    if saved.spec.classes and constant is not None and desk.t:  # nobody has trained the models of round 0
        labels = y.cpu().numpy()[np.concatenate([held for _, held in outer])]
        other_names = renaming(Held.of(served for served, _ in replicas[0]).answer, labels, constant.value)
    return (other if decided.adapt else desk).give(x, y, name, decided, estimate, constant, other_names)


class Desk:
    """One run's server, ready for newcomers. Folds of one newcomer are computed together, each a client of its own."""

    def __init__(self, saved: Saved, seed: int = 0, stage: str = SERVED, when: str = "chosen") -> None:
        """The server is that of the round that tables report for a stage, or of the last."""
        self.saved, self.seed = saved, seed
        self.factory, self.loss = saved.factory(), saved.loss()
        self.taken = saved.handed_out(stage, when)
        self.tensors, self.meta = saved.checkpoint(stage, when)
        self.t = self.taken.round
        self.number = saved.arrived(self.t)
        self.group: Ints | None = None  # [n] of the newcomer's samples, where they belong together
        self.together = 1  # folds that are computed at once
        self.answers = saved.spec.outputs  # numbers that the model answers a sample

    def checked(self, x: Tensor, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """The samples, if they are what the run is about."""
        spec = self.saved.spec
        if spec.classes and per_token(y):
            raise CoterieError(ONE_LABEL)
        if tuple(x.shape[1:]) != spec.shape:
            raise CoterieError(f"the run's samples have shape {list(spec.shape)}; those of {name} have "
                               f"{list(x.shape[1:])}{_of_images(spec.shape, tuple(x.shape[1:]))}.")
        made = Federation.from_clients([(x, y)], val=0.0, test=0.0, classes=spec.classes, names=[name])
        if made.outputs != spec.outputs:
            raise CoterieError(f"the run predicts {spec.outputs} numbers a sample; {name} has {made.outputs}.")
        return x, y

    def clients(self, federation: Federation) -> Clients:
        """Newcomers with these data, all of them the first one after the run's clients."""
        saved = self.saved
        return Clients(
            saved.method, self.factory, federation, anywhere(saved.spec.training), saved.spec.head,
            self.loss, choices=self.meta["choices"], population=self.number, first=self.number,
        )

    def arrive(self, clients: Clients) -> tuple[Arrival, Cohort]:
        """These newcomers by the method's rule, none knowing of another, and their cohort."""
        server = self.saved.server(clients.init, self.tensors, self.meta)
        cohort = clients.at(self.t, np.arange(clients.federation.clients))
        return arrival.each_alone(server, cohort, self.number), cohort

    def federation(self, x: Tensor, y: Tensor, folds: Sequence[Fold], names: Sequence[str]) -> Federation:
        """A client for each fold; of the samples kept a share is for validation, as for the run's own clients."""
        pieces: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
        for (kept, held), name in zip(folds, names, strict=True):
            train, val, _ = deal(kept, self.saved.val, 0.0, generator(self.seed, "split", name), group=self.group)
            for into, chosen in zip(pieces, (train, held, val), strict=True):
                into.append((x[torch.from_numpy(chosen)], y[torch.from_numpy(chosen)]))
        spec = self.saved.spec
        return Federation.from_splits(*pieces, classes=spec.classes, names=names, unit=Unit.of(spec.unit))

    def fitting(self, x: Tensor, y: Tensor, name: str) -> int:
        """How many folds, each with the models that a newcomer receives, memory holds at once."""
        alone = self.clients(self.whole(x, y, name))
        fit = alone.fitting(alone.models_in(self.arrive(alone)[0].payload))
        return max(1, min(fit, HELD // max(1, x.nbytes)))

    def whole(self, x: Tensor, y: Tensor, name: str) -> Federation:
        """One client with all the samples, none held out."""
        return self.federation(x, y, [(np.arange(len(x)), np.arange(0))], [name])

    def score(self, x: Tensor, y: Tensor, folds: Sequence[Fold], name: str) -> list[tuple[Held, Held]]:
        """Each fold's held-out samples by the models that the kept ones lead to: served, and adapted."""
        names = [f"{name}/part{k}" for k in range(len(folds))]
        found: list[tuple[Held, Held]] = []
        for first in range(0, len(folds), self.together):
            wave = slice(first, first + self.together)
            if self.together < len(folds):
                gc.collect()  # an engine lies in a circle of references, and models of earlier waves with it
            found += self._scored(self.federation(x, y, folds[wave], names[wave]))
        return found

    def _scored(self, federation: Federation) -> list[tuple[Held, Held]]:
        """The same of folds that are computed at once, each a client; nothing of them stays in memory."""
        clients = self.clients(federation)
        came, cohort = self.arrive(clients)
        rows, found = came.rows, []
        trained, net = adapted(cohort, rows, clients.training), clients.engine.net
        net.mode(training=False)
        net.ground.stand_on(cohort.residual)
        with clients.engine.computing():
            held = clients.engine.samples(cohort.members.places, "test", raw=False)
            for k, (xs, ys) in enumerate(held):
                if not k:
                    with torch.no_grad():
                        self.answers = net(rows[k], xs[:1]).numel()
                one, other = (held_out(net, stage[k], xs, ys) for stage in (rows, trained))
                found.append((one, other))
        return found

    def constant(self, y: Tensor, folds: Sequence[Fold]) -> ConstantScore | None:
        """What a constant answer scores on the folds that were scored; None where a loss of somebody's own takes
        more than the numbers to predict, such as a deviation beside a mean: what to answer is not known then."""
        spec = self.saved.spec
        if self.loss is not None and not spec.classes and self.answers != spec.outputs:
            return None
        return constant_answer(y, folds, spec.classes, Task.of(spec.classes, self.loss).scored)

    def give(
        self, x: Tensor, y: Tensor, name: str, decided: Decision, estimate: Estimate, constant: ConstantScore | None,
        other_names: Renaming | None = None,
    ) -> Personalized:
        """The model from all samples."""
        clients = self.clients(self.whole(x, y, name))
        came, cohort = self.arrive(clients)
        spent = int(cohort.spent[0])
        facts, why = _explained(came, cohort, self.number)
        unlike = other_units(self.saved.spec.encoding, x, y)
        why = [*unlike.values(), *why]
        facts["other_units"] = list(unlike)
        if other_names is not None and came.server.state.tensors():  # where nothing is shared, the run has no model
            why.insert(0, other_names.said(self.saved.spec.class_names))
            facts["other_names"] = asdict(other_names)
        row = adapted(cohort, came.rows, clients.training)[0] if decided.adapt else came.rows[0]
        if spent:
            why.append(f"The rule took {spent} local steps.")
        why.append(_why_adapted(decided, int(cohort.spent[0]) - spent, bool(self.saved.spec.classes)))
        if said := _held_together(self.group, self.saved.grouped):
            why.append(said)
            facts["groups"] = None if self.group is None else int(self.group.max()) + 1
        why += self._of_round()
        if constant is not None:
            beaten = constant.beside(estimate)
            why += [beaten] if beaten else []
            facts["constant"] = {"answer": constant.words, "value": constant.value, "does_as_well": bool(beaten)}
        facts["adapt"] = {
            "kept": decided.adapt,
            "served": None if decided.served is None else decided.served.facts(),
            "adapted": None if decided.adapted is None else decided.adapted.facts(),
        }
        return Personalized(row, clients, name, self.taken, decided.adapt, estimate, tuple(why), facts, cohort.residual)

    def _of_round(self) -> list[str]:
        """Which round's server it came to."""
        taken = self.taken
        how = f"{taken.when} for the stage {taken.stage}" if taken.when == CHOSEN else "the last one"
        return [f"The server is that after round {taken.round}, {how}.", *filter(None, [taken.note])]

    def give_fallback(self, name: str, data: tuple[Tensor, Tensor] | None) -> Personalized:
        """The method's model for somebody of whom too little is known."""
        saved, spec, n = self.saved, self.saved.spec, 0 if data is None else len(data[0])
        unlike = {} if data is None else other_units(spec.encoding, *data)
        y = torch.zeros(1, dtype=torch.int64 if spec.classes else torch.float32)
        if not spec.classes and spec.outputs > 1:
            y = torch.zeros(1, spec.outputs)
        samples = (spec.blank_samples(1, 0), y)
        made = Federation.from_splits([samples], classes=spec.classes, names=[name], unit=Unit.of(spec.unit))
        clients = self.clients(made)
        server = saved.server(clients.init, self.tensors, self.meta)
        row = saved.method.fallback(server.state, clients.init, saved.report(self.t))
        if clients.training.buffers == "local" and len(clients.layout.normalisation(row.device)[1]):
            raise CoterieError(
                f"{name} has no labels, or fewer than {FEWEST}, so nothing can be trained for it; and in this run each "
                "client keeps the statistics of its batch normalisation (buffers=local), so the server has none for it."
            )
        held = f"{counted(n, 'labelled sample')}, and at least {FEWEST} are needed" if n else "no labels"
        few = f"{name} has {held}"
        why = (
            *unlike.values(),
            f"{few}: nothing was chosen or trained for it, and nothing can be said about how good the model is.",
            f"It gets {saved.method.name}'s fallback, which is the same for every such client.",
            *as_drawn(row, clients.init),
            *self._of_round(),
        )
        facts = {"samples": n, "other_units": list(unlike)}
        residual = saved.method.residual(server.state)
        return Personalized(row, clients, name, self.taken, False, None, why, facts, residual)


def as_drawn(row: Tensor, init: Init) -> list[str]:
    """A sentence on the layers of a row `[D]` that nobody trained, where there are such.

    The factors A of adapters are no such layers: what is as drawn in them is trained through B.
    """
    fixed = {pair.a.name for pair in init.layout.pairs}
    told = [e for e in init.layout.entries if e.kind != "counter" and e.name not in fixed]
    same = [e for e in told if torch.equal(row[e.start : e.stop], init.row[e.start : e.stop].to(row))]
    if not same:
        return []
    if len(same) == len(told):
        return ["All of it is as it was drawn at the start: it answers by chance."]
    layers = list(dict.fromkeys(e.name.rpartition(".")[0] or e.name for e in same))
    named = ", ".join(layers[:5]) + (f" and {len(layers) - 5} more" if len(layers) > 5 else "")
    return [f"Of this model {named} never trained, as clients keep theirs: expect little more than chance."]


def adapted(cohort: Cohort, rows: Tensor, training: Training) -> Tensor:
    """`rows [C, D]` after GENTLE times the run's local work at a GENTLE-th of its learning rate, so as far in all.

    Nobody averages this model with others', so its steps must not jump about: at the learning rate of a round the last
    few batches decide what it is.
    """
    return cohort.train(
        rows, lr=cohort.lr / GENTLE, epochs=GENTLE * training.epochs if training.steps is None else None,
        steps=None if training.steps is None else GENTLE * training.steps,
    )


def _of_images(wanted: Sequence[int], found: Sequence[int]) -> str:
    """What to type where images `[C, H, W]` of another colour or size were found; empty for other samples."""
    if not len(wanted) == len(found) == 3 or {wanted[0], found[0]} - {1, 3}:
        return ""
    colour = f"colour={'rgb' if wanted[0] == 3 else 'grey'}" if wanted[0] != found[0] else ""
    size = f"size={wanted[2]}x{wanted[1]}" if tuple(wanted[1:]) != tuple(found[1:]) else ""
    return f"; of images, --data FOLDER:{','.join(filter(None, (colour, size)))} reads them as the run's"


# -- why ---------------------------------------------------------------------------------------------------------------


def _explained(came: Arrival, cohort: Cohort, clients: int) -> tuple[dict[str, Any], list[str]]:
    """What the rule chose for the first newcomer of a run with so many clients: a cluster, one of K models, weights."""
    method, rows = came.server.method, came.rows
    facts: dict[str, Any] = {"rule": method.newcomer, "samples": int(cohort.n[0])}
    why = [f"{method.name} gives a newcomer {method.newcomer}."] if method.newcomer else []
    clusters, models = method.clusters(came.server.state), method.few(came.server.state)
    if clusters is not None and models is not None:
        cluster, count = clusters.tolist(), len(models)
        mine, members = cluster[clients], cluster[:clients].count(cluster[clients])
        facts["cluster"] = {"chosen": mine, "clusters": count, "members": members}
        why.append(f"It went to cluster {mine} of {count} (numbered from 0), where {members} of the run's "
                   f"{clients} clients are.")
    sent = came.payload.rows if isinstance(came.payload, Models) else None
    if sent is not None and sent.shape[-1] == rows.shape[-1]:  # [1, K, D]
        sent = cohort.settled(sent) if cohort.members.own_buffers else sent
        losses = {
            "train": cohort.score(sent, "train", ())["loss"][0].tolist(),
            "val": cohort.score(sent, "val", ())["loss"][0].tolist(),
        }
        same = [k for k, one in enumerate(sent[0]) if torch.equal(one, rows[0])]
        facts["models"] = {"chosen": same[0] if same else None, "loss": losses}
        seen = {split: ", ".join(f"{loss:.3g}" for loss in values[:10]) for split, values in losses.items()}
        what = f"It uses model {same[0]} of the {sent.shape[1]} it was sent" if same else (
            f"It uses a model of its own made with the {sent.shape[1]} it was sent")
        why.append(f"{what}; their losses are {seen['train']} on its training and {seen['val']} on its validation "
                   "samples.")
    small = {**came.told.tensors(), **came.mine.tensors()}
    small = {name: t[0].flatten() for name, t in small.items() if t.is_floating_point()}  # no numbers of clusters
    weights = {name: t.tolist() for name, t in small.items() if 0 < len(t) <= 32}
    for name, values in weights.items():
        why.append(f"Its {name} is {', '.join(f'{v:.3g}' for v in values)}.")
    if weights:
        facts["weights"] = weights
    return facts, why


def _held_together(group: Ints | None, grouped: bool) -> str:
    """What groups mean for the estimate; empty where neither the newcomer nor the run has any."""
    if group is None:
        return ("The run keeps groups of samples together, and this client's data name none: samples were held out one "
                "by one, so the estimate is too good if some of them belong together.") if grouped else ""
    count = int(group.max()) + 1
    if count == 1:
        return "All its samples are of one group, so the estimate is for further samples of this group alone."
    return (f"Samples were held out by their {count} groups; the intervals count samples, and are too narrow where "
            "those of one group are much alike.")


def _why_adapted(decided: Decision, steps: int, classes: bool) -> str:
    served, adapted = decided.served, decided.adapted
    how = (f"It was adapted by {steps} local steps, at a {GENTLE}th of a round's learning rate and {GENTLE} times as "
           "long, so it is not the model that tables call adapted")
    if served is None:
        return f"{how}, as asked." if decided.adapt else "It was not adapted, as asked."
    assert adapted is not None
    n, (more, gain), (few, loss) = len(served.loss), adapted.rank, served.rank
    if not math.isfinite(gain):
        return f"It was not adapted, because that diverged in a {INNER}-fold comparison; a smaller lr may not."
    if classes and more != few:
        numbers = f"{more:.0f} of {n} correct against {few:.0f} without"
    else:
        same = f"{few:.0f} of {n} correct either way, " if classes else ""
        numbers = f"{same}mean loss {-gain / n:.3g} against {-loss / n:.3g} without"
    if decided.adapt:
        return f"{how}; it did better than without in a {INNER}-fold comparison: {numbers}."
    return f"It was not adapted, because that did no better in a {INNER}-fold comparison: {numbers}."
