"""The textbook's linear-regression experiment (Output 14.7.1, exercises 14.7.2 and 14.7.3), run by the library itself.

Six clients share twelve weights except for one each. A global model is wrong for everybody, a local model has too few
samples; starting from the global model and training on one's own data beats both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.ticker import NullLocator, ScalarFormatter
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.table import Table

from coterie import registry
from coterie.data import Federation
from coterie.data.sources import textbook_clients
from coterie.evaluation.stages import SERVED
from coterie.models import Linear
from coterie.report.bubbles import INK, write_figure
from coterie.report.plots import COLOURS, dress, new_figure
from coterie.running.simulation import Simulation
from coterie.running.training import Training

SIZES = (5, 10, 14, 20, 30, 50, 100, 200, 2000)
WEIGHTS = tuple(step / 10 for step in range(11))
ROUNDS, STEPS, OWN_STEPS = 400, 5, 200
# Full batches make every round the same contraction. Once a round moves no weight by more than this, 400 of them could
# not reach the third decimal, and the rest are skipped.
SETTLED = 1e-8

Floats = NDArray[np.float64]


class Errors(NamedTuple):
    """Test mean squared errors of the three models, of one client or over all."""

    client: str
    shared: float
    local: float
    personalized: float


class Mix(NamedTuple):
    """One client's test errors of a * local + (1 - a) * global over the grid of a, and the best of them."""

    client: str
    errors: tuple[float, ...]
    weight: float
    error: float


class Threshold(NamedTuple):
    """Means over clients for one number of training samples."""

    n_train: int
    shared: float
    local: float
    personalized: float


class _Trained(NamedTuple):
    together: Simulation
    alone: Simulation
    shared: Floats  # [clients] test errors
    local: Floats
    personalized: Floats


def table(n_train: int = 14) -> list[Errors]:
    """Output 14.7.1: one line for each client, then the mean and the worst."""
    found = _trained(n_train)
    columns = np.stack([found.shared, found.local, found.personalized], axis=1)  # [clients, 3]
    named = [(str(client), row) for client, row in enumerate(columns)]
    named += [("mean", columns.mean(axis=0)), ("worst", columns.max(axis=0))]
    return [Errors(name, *(float(value) for value in row)) for name, row in named]


def interpolation() -> list[Mix]:
    """Exercise 14.7.2: between the local (a = 1) and the global model (a = 0), which mixture is best on test data?"""
    found = _trained(14)
    clients = found.together.federation.seen
    shared, local = (torch.stack([run.row(int(i)) for i in clients])[:, None] for run in (found.together, found.alone))
    weights = torch.tensor(WEIGHTS, dtype=shared.dtype, device=shared.device)[:, None]
    mixed = weights * local + (1 - weights) * shared  # [clients, weights, D]
    errors = found.together.cohort(clients).measure(mixed, "test")["loss"].tolist()
    return [
        Mix(str(client), tuple(row), WEIGHTS[int(np.argmin(row))], min(row)) for client, row in enumerate(errors)
    ]


def thresholds(sizes: Sequence[int] = SIZES) -> list[Threshold]:
    """Exercise 14.7.3: from how many training samples on is a client better off alone?"""
    found = [(n, _trained(n)) for n in sizes]
    return [
        Threshold(n, float(one.shared.mean()), float(one.local.mean()), float(one.personalized.mean()))
        for n, one in found
    ]


def show() -> Group:
    """The experiment and both exercises as tables for the terminal."""
    return Group(_errors_table(), _mix_table(), _thresholds_table())


def draw(folder: str | Path) -> list[Path]:
    """Draw both exercises into a folder; returns the paths written."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return [
        _draw_mix(Path(folder) / "textbook_interpolation.png"),
        _draw_thresholds(Path(folder) / "textbook_thresholds.png"),
    ]


# -- training ----------------------------------------------------------------------------------------------------------


@cache
def _trained(n_train: int) -> _Trained:
    """The three models; they are kept, because the table and both exercises ask for the same ones."""
    train, test = textbook_clients(n_train)
    federation = Federation.from_splits(train, test)
    with _one_thread():
        together = _simulation("fedavg", federation, ROUNDS)
        _settle(together)
        personal = _simulation(f"fedavgft:finetune_epochs={OWN_STEPS}", federation, ROUNDS)
        personal.restore(*together.snapshot())
        alone = _simulation("local", federation, OWN_STEPS // STEPS)
        for _ in range(alone.training.rounds):
            alone.round()
        return _Trained(together, alone, _errors(together), _errors(alone), _errors(personal))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Steps this small gain nothing from a second core, and on a busy machine they spend their time waiting for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _simulation(method: str, federation: Federation, rounds: int, steps: int = STEPS) -> Simulation:
    model = partial(Linear, 12, 1, bias=False, zeros=True)
    # Full batches, so that an epoch is one step; on the CPU, because steps this small would only wait for a GPU.
    training = Training(rounds=rounds, epochs=steps, batch=0, lr=0.03, precision="float64", device="cpu")
    return Simulation(registry.method(method), model, federation, training)


def _settle(simulation: Simulation) -> None:
    before = simulation.row(0)
    while simulation.rounds_done < simulation.training.rounds:
        simulation.round()
        after = simulation.row(0)
        if float((after - before).abs().max()) < SETTLED:
            return
        before = after


def _errors(simulation: Simulation) -> Floats:
    return simulation.evaluate().stages[SERVED].test["loss"]


# -- for the terminal --------------------------------------------------------------------------------------------------


def _columns(title: str, first: str, *names: str) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    made.add_column(first)
    for name in names:
        made.add_column(name, justify="right")
    return made


def _errors_table() -> Table:
    made = _columns("14.7.1: test MSE, 14 training samples", "client", "global", "local", "personalized")
    for line in table():
        last_client = line.client == "5"
        made.add_row(line.client, *(f"{value:.3f}" for value in line[1:]), end_section=last_client)
    return made


def _mix_table() -> Table:
    made = _columns("14.7.2: mixing a local + (1 - a) global", "client", "best a", "MSE", "a = 0", "a = 1")
    for mix in interpolation():
        ends = (f"{value:.3f}" for value in (mix.error, mix.errors[0], mix.errors[-1]))
        made.add_row(mix.client, f"{mix.weight:.1f}", *ends)
    return made


def _thresholds_table() -> Table:
    made = _columns("14.7.3: mean MSE by training samples", "samples", "global", "local", "personalized")
    for line in thresholds():
        made.add_row(str(line.n_train), *(f"{value:.3f}" for value in line[1:]))
    return made


# -- pictures ----------------------------------------------------------------------------------------------------------


def _draw_mix(path: Path) -> Path:
    figure = new_figure(7.2, 4.4)
    axes = figure.add_subplot()
    for mix, colour in zip(interpolation(), COLOURS):
        axes.plot(WEIGHTS, mix.errors, color=colour, linewidth=1.6, zorder=3)
        axes.plot(mix.weight, mix.error, "o", color=colour, markersize=7, markeredgecolor="white", zorder=4)
        text = f"client {mix.client}: {mix.error:.2f} at a = {mix.weight:.1f}"
        axes.annotate(text, (1, mix.errors[-1]), (6, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
        axes.plot(1, mix.errors[-1], "s", color=colour, markersize=4, zorder=4, clip_on=False)
    axes.set_xlim(0, 1)
    axes.set_xticks(WEIGHTS)
    axes.set_xlabel("weight a of the local model (0: global, 1: local)", fontsize=9, color=INK)
    axes.set_ylabel("test MSE", fontsize=9, color=INK)
    axes.set_title("Mixing the local and the global model; each client's best", loc="left", fontsize=10, color=INK)
    dress(axes)
    return write_figure(figure, path)


def _draw_thresholds(path: Path) -> Path:
    lines = thresholds()
    sizes = [line.n_train for line in lines]
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    axes.axhline(1.0, color="#9a9a9a", linewidth=0.8, linestyle=":", zorder=1)
    axes.annotate("noise of the data", (sizes[-1], 1.0), (0, -4), textcoords="offset points", ha="right", va="top",
                  fontsize=8, color="#777777")
    drawn = (("global", "shared", "s"), ("local", "local", "^"), ("personalized", "personalized", "o"))
    for (name, field, marker), colour in zip(drawn, COLOURS):
        values = [getattr(line, field) for line in lines]
        axes.plot(sizes, values, marker=marker, markersize=5, color=colour, linewidth=1.6, label=name, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.set_yticks([1, 2, 5, 10, 20])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0.85, 22)
    axes.set_xlabel("training samples of a client", fontsize=9, color=INK)
    axes.set_ylabel("mean test MSE", fontsize=9, color=INK)
    axes.set_title("How many samples make a client independent", loc="left", fontsize=10, color=INK)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    dress(axes)
    return write_figure(figure, path)
