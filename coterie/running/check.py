"""`coterie check mine.py:Mine`: does a method keep the contract? Small runs on made-up clients, a line a demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from coterie import registry
from coterie.contract import records
from coterie.contract.sent import Sender
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.evaluation.stages import ADAPTED, unseen
from coterie.models.lora import adapted
from coterie.running.clients import introduce, local
from coterie.running.simulation import Simulation
from coterie.running.training import Training

SIZES = (12, 7, 9, 1, 6, 10)
"""Training samples of the clients; the last two are there where newcomers are tried, and take no part in training."""
ROUNDS = 3
SAME = 1e-10
"""How far two ways to the same result may be apart, by the size of the numbers."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried; `wrong` says what happened instead, and is empty where it holds."""

    demand: str
    wrong: str


def examine(spec: str) -> list[Finding]:
    """What a method, by its spelling, must do on any federation, tried on tiny ones in float64, on the CPU."""
    registry.method(spec)  # an unknown one is refused here
    return [Finding(demand, _tried(tried, spec)) for demand, tried in DEMANDS.items()]


def _tried(tried: Callable[[str], str], spec: str) -> str:
    try:
        return tried(spec)
    except CoterieError as sentence:
        return str(sentence)
    except Exception as error:  # the author's code may raise anything, and the author wants to know where
        return f"{type(error).__name__}: {error}{_line(error)}"


def _line(error: BaseException) -> str:
    """The innermost line of the author's file, or else the innermost line."""
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
    own = [place for place in places if not place[0].startswith(ours)]
    return " ({}, line {})".format(*(own or places)[-1]) if places else ""


# -- tiny federations --------------------------------------------------------------------------------------------------


def _clients(seed: int = 0) -> list[list[tuple[Tensor, Tensor]]]:
    """[train, test, val][client]: 4 numbers a sample, 3 classes.

    The first four have a rule each, which of the numbers decides between which two classes; the last two have those of
    the first two.
    """
    rng = np.random.default_rng(seed)
    splits = []
    for count in (lambda n: n, lambda n: 4, lambda n: 3):
        pairs = []
        for i, n in enumerate(SIZES):
            x = rng.standard_normal((count(n), 4))
            pairs.append((torch.from_numpy(x), torch.from_numpy((x[:, i % 4] > 0).astype(np.int64) + i % 2)))
        splits.append(pairs)
    return splits


def _federation(splits: list[list[tuple[Tensor, Tensor]]], order: list[int], unseen: int) -> Federation:
    """These clients under their own names; the last `unseen` are kept out of training."""
    made = Federation.from_splits(
        *([pairs[i] for i in order] for pairs in splits), classes=3, names=[f"c{i}" for i in order]
    )
    return Federation(made.x, made.y, made.bounds, len(order) - unseen, 3, made.names, made.recipe)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 3))


def _simulation(spec: str, data: Federation | None = None, **options: object) -> Simulation:
    data = _federation(_clients(), [0, 1, 2, 3], 0) if data is None else data
    training = Training(rounds=ROUNDS, batch=4, lr=0.1, device="cpu", precision="float64", **options)  # type: ignore[arg-type]
    method = registry.method(spec)
    adapter = f"lora:rank=2,base={'frozen' if method.moves else 'trains'}" if method.adapters else ""
    return Simulation(method, adapted(_net, adapter), data, training)


def _after(simulation: Simulation, rounds: int = ROUNDS) -> Simulation:
    for _ in range(rounds):
        simulation.round()
    return simulation


def _rows(simulation: Simulation) -> Tensor:
    """The rows `[clients, D]` that all clients use."""
    return torch.stack([simulation.row(i) for i in range(simulation.federation.clients)])


def _apart(found: Tensor, expected: Tensor, tolerance: float = SAME) -> str:
    """A sentence where two tensors differ by more than they may."""
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} instead of {list(expected.shape)}"
    apart = float((found - expected).abs().max()) if found.numel() else 0.0
    fine = apart <= tolerance * max(1.0, float(expected.abs().max()))
    return "" if fine else f"clients' models differ by up to {apart:.2g}"


# -- demands -----------------------------------------------------------------------------------------------------------


def _trains(spec: str) -> str:
    """Rows stay finite, and are not all those at the start."""
    simulation = _simulation(spec)
    start = _rows(simulation)
    rows = _rows(_after(simulation))
    if not torch.isfinite(rows).all():
        return "clients' models hold NaN or infinite numbers after 3 rounds at learning rate 0.1"
    return "" if float((rows - start).abs().max()) > 0 else "after 3 rounds every client's model is what it was"


def _repeats(spec: str) -> str:
    return _apart(_rows(_after(_simulation(spec))), _rows(_after(_simulation(spec))), 0.0)


def _grouped(spec: str) -> str:
    expected = _rows(_after(_simulation(spec)))
    for name, options in (("engine=loop", {"engine": "loop"}), ("wave=1", {"wave": 1}), ("wave=3", {"wave": 3})):
        if wrong := _apart(_rows(_after(_simulation(spec, **options))), expected):
            return f"with {name} {wrong}"
    return ""


def _ordered(spec: str) -> str:
    order = [2, 0, 3, 1]
    moved = _rows(_after(_simulation(spec, _federation(_clients(), order, 0))))
    return _apart(moved, _rows(_after(_simulation(spec)))[order])


def _alone(spec: str) -> str:
    """What client 1 uploads, computed beside the others, does not depend on the data of client 0."""
    sent = []
    for seed in (0, 9):
        splits = _clients()
        for pairs, others in zip(splits, _clients(seed), strict=True):
            pairs[0] = others[0]
        simulation = _simulation(spec, _federation(splits, [0, 1, 2, 3], 0))
        ids = np.arange(4)
        cohort = simulation.cohort(ids)
        upload, _ = local(simulation.method, cohort, simulation.payload(ids), simulation.own)
        sent.append({name: tensor[1].double() for name, tensor in upload.tensors().items()})
    for name, tensor in sent[0].items():
        if wrong := _apart(sent[1][name], tensor):
            return wrong.replace("clients' models differ", f"client 1's upload '{name}' differs")
    return ""


def _looked_at(spec: str) -> str:
    watched, other = _simulation(spec), _simulation(spec)
    for _ in range(ROUNDS):
        watched.evaluate()
        _after(watched, 1)
    return _apart(_rows(watched), _rows(_after(other)), 0.0)


def _resumed(spec: str) -> str:
    first = _after(_simulation(spec, participation=0.75), 2)
    tensors, meta = first.snapshot()
    again = _simulation(spec, participation=0.75)
    again.restore(tensors, meta)
    return _apart(_rows(_after(again, 2)), _rows(_after(first, 2)), 0.0)


def _newcomers(spec: str) -> str:
    """Two clients that took no part get models, and do not change those of the others."""
    simulation = _simulation(spec, _federation(_clients(), [0, 1, 2, 3, 4, 5], 2))
    rows = _rows(_after(simulation))
    if not torch.isfinite(rows[4:]).all():
        return "an unseen client's model holds NaN or infinite numbers"
    losses = simulation.evaluate().stages[unseen(ADAPTED)].test["loss"]
    if not np.isfinite(losses).all():
        return "the loss of an unseen client is not finite"
    return _apart(rows[:4], _rows(_after(_simulation(spec))))


def _declared(spec: str) -> str:
    """What clients send is named in `uploads` and `introduces`, and holds what is said there."""
    simulation, ids = _simulation(spec), np.arange(4)
    method, sizes = simulation.method, simulation.federation.sizes("train")
    for _ in range(ROUNDS):
        rows = simulation.server.state.tensors().get("rows")
        hello = records.spread(simulation.server.hello(), 4)
        told = introduce(method, simulation.cohort(ids), hello)
        upload, _ = local(method, simulation.cohort(ids), simulation.payload(ids), simulation.own)
        for word, sent_by, declared in (("introduces", told, method.introduces), ("uploads", upload, method.uploads)):
            for name, tensor in sent_by.tensors().items():
                if name not in declared:
                    return f"'{name}' is not declared; say what it may hold: {word} = sent.fields({name}=...)"
                for i in ids:
                    known = Sender(int(sizes[i]), 0 if rows is None else len(rows), simulation.layout.rank)
                    if wrong := declared[name].wrong(tensor[i], known):
                        return f"client {i}'s '{name}' {wrong}, which {word} does not allow"
        _after(simulation, 1)
    return ""


def _absent(spec: str) -> str:
    """Clients that are not drawn, or do not answer, still have a model."""
    rows = _rows(_after(_simulation(spec, participation=0.5, dropouts=0.4, seed=3)))
    return "" if torch.isfinite(rows).all() else "a client's model holds NaN or infinite numbers"


DEMANDS: dict[str, Callable[[str], str]] = {
    "it trains": _trains,
    "the same seed gives the same result": _repeats,
    "the result does not depend on how clients are grouped": _grouped,
    "the result does not depend on the order of clients": _ordered,
    "what a client sends depends on its own data alone": _alone,
    "what a client sends is declared, and is as declared": _declared,
    "evaluation changes nothing": _looked_at,
    "a run that is resumed ends as it would have": _resumed,
    "clients may be absent": _absent,
    "unseen clients get models and change nothing": _newcomers,
}


def lines(findings: list[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"fails  {finding.demand}: {finding.wrong}" if finding.wrong else f"holds  {finding.demand}"
