"""Several runs as one stack: each is the run it would be alone, whoever shares the stack and whatever happens to it."""

import io
import json
import os
import signal
import time
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from commands import as_before
from rich.console import Console
from torch import nn

import coterie
from coterie import registry
from coterie.contract.records import Model, Record, Upload
from coterie.errors import CoterieError, Interrupted
from coterie.methods.fedavg import FedAvg
from coterie.options import build
from coterie.report.progress import Live
from coterie.running import together, together_pays
from coterie.running.driver import Progress
from coterie.running.folder import Folder
from coterie.running.saved import Saved
from coterie.running.together import Stack, Varying, alone
from coterie.running.training import Training

# -- a run in a stack is the run alone --------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "options"), [
    ("dropout", {}), ("words", {}), ("regression", {}), ("bn", {}), ("bn", {"buffers": "local"}),
    ("bn", {"buffers": "server"}), ("mlp", {"stragglers": 0.7, "dropouts": 0.3, "participation": 0.75}),
    ("mlp", {"wave": 3}), ("mlp", {"batch": 0}), ("mlp", {"engine": "loop"}), ("mlp", {"most": 5}),
])
def test_seeds_share_a_stack_whatever_the_model_and_the_training(tiny, model, options):
    """Dropout, embeddings, running statistics and drawn clients all hang on the run's own streams and rows."""
    apart, joined, stack = tiny.side_by_side(["fedavg"], model, seeds=(0, 5, 9), rounds=3, **options)
    tiny.agree(apart, joined)
    assert not stack.apart
    assert stack.joined > 0 or options == {"most": 5}  # three runs of four clients each: no two fit in five


def varied(method):
    """The method with every number halved that has a value."""
    halves = {}
    for f in fields(method):
        value = getattr(method, f.name)
        if isinstance(value, float):
            halves[f.name] = value / 2
    return replace(method, **halves)


@pytest.mark.parametrize("name", sorted(registry.methods()))
def test_a_sweep_over_every_number_of_a_method_gives_the_runs_alone(tiny, name):
    """Numbers that differ are each client's own in what is written for one client; where a method uses them in
    another way, the work is done run by run. Either way it is the run alone."""
    one = registry.method(name)
    apart, joined, _ = tiny.side_by_side([one, varied(one)], seeds=(3,))
    tiny.agree(apart, joined)


@pytest.mark.parametrize("specs", [
    ("fedprox:mu=0.1", "fedprox:mu=1"), ("ditto:personal_lr=0.1", "ditto:personal_lr=0.02"),
    ("fedavgft:finetune_lr=0.1", "fedavgft:finetune_lr=0.01"), ("pfedme:inner_lr=0.01", "pfedme:inner_lr=0.02,lam=3"),
    ("fedavg", "fedavg:server=sgd(lr=0.5)", "fedavg+median"), ("fedfew:mu=0.01", "fedfew:mu=0.1"),
])
def test_sweeps_that_are_one_stack(tiny, specs):
    """A pull, a learning rate, a step's own number, the server's numbers and the aggregator: all in one stack."""
    apart, joined, stack = tiny.side_by_side(specs)
    tiny.agree(apart, joined)
    assert not stack.apart
    assert stack.joined == 3 * 2 * len(specs)  # two rounds and an evaluation of every run
    ends = [state for state, _ in joined]
    assert not any(torch.equal(ends[0][n], ends[2][n]) for n in ends[0] if n.startswith("server")) or "lr" in specs[0]


def test_a_number_used_outside_of_one_clients_functions_keeps_methods_apart_and_seeds_together(tiny):
    """Per-FedAvg writes alpha into a tensor of all clients, which one number for all of them would get wrong."""
    apart, joined, stack = tiny.side_by_side(["perfedavg:alpha=0.1", "perfedavg:alpha=0.02"])
    tiny.agree(apart, joined)
    assert all("differ" in str(reason) for reason in stack.apart.values())
    assert [kind[0].__name__ for kind in stack.apart] == ["local", "local"]  # in round 0, and later
    assert stack.joined == 2 * (2 + 2) + 4  # the two seeds of each still share a stack, and all four the evaluation


@pytest.mark.parametrize("use", [
    lambda v: v + 1, lambda v: 2 * v, lambda v: v / 2, lambda v: v**2, lambda v: -v, bool, float, lambda v: v == 0,
    lambda v: v > 0, lambda v: torch.ones(2) * v, lambda v: torch.lerp(torch.ones(2), torch.zeros(2), v),
    lambda v: torch.ones(2).new_full((2,), v),
])
def test_whatever_is_done_with_an_option_that_differs_raises(use):
    """Nothing may come out of it silently: no single number stands for two."""
    with pytest.raises((CoterieError, TypeError)):
        use(Varying("mu"))


@dataclass(frozen=True)
class Mixing(FedAvg):
    """Every client trains what the first client of its cohort was sent: right alone, where all are sent the same."""

    def train(self, cohort, rows):
        return cohort.train(rows[:1].expand_as(rows))


@dataclass(frozen=True)
class Starting(FedAvg):
    """Clients train the run's initial row, which they read from `cohort.init`."""

    def train(self, cohort, rows):
        return cohort.train(cohort.init.row.expand_as(rows))


@pytest.mark.parametrize("method", [Mixing(), Starting()])
def test_methods_that_cannot_share_a_cohort_are_found_and_computed_run_by_run(tiny, method):
    apart, joined, stack = tiny.side_by_side([method])
    tiny.agree(apart, joined, 0)
    assert {kind[0].__name__ for kind in stack.apart} == {"local"}


def test_runs_that_are_behind_go_first_and_then_share_the_stack(tiny):
    """One run was resumed two rounds ahead. Rounds 0 and 1 of the other are computed alone, the rest together."""
    sims = [tiny.simulation(seed=seed) for seed in (0, 1)]
    sims[1] = tiny.simulation(seed=1, twin=sims[0])
    for _ in range(2):
        sims[1].round()

    def working(sim):
        while sim.rounds_done < 5:
            yield from sim.rounding()

    stack = Stack(100)
    stack.run([working(sim) for sim in sims])
    assert stack.joined == 2 * 3
    for seed in (0, 1):
        tiny.close(tiny.state(sims[seed]), tiny.after(5, seed=seed))


def test_modules_with_tensors_of_their_own_outside_the_row_keep_their_own_engines(tiny):
    """A buffer that is not saved is no column of the row; drawn anew for each seed, it makes another function."""

    class Lensed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("lens", torch.randn(4, 4, dtype=torch.float64), persistent=False)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x @ self.lens)

    apart, joined, stack = tiny.side_by_side(["fedavg"], Lensed)
    tiny.agree(apart, joined)
    assert stack.joined == 0


# -- comparisons ------------------------------------------------------------------------------------------------------


def clients():
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in (12, 16, 20, 24, 28)]


def small():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def compared(methods, folder=None, federation=None, **options):
    federation = federation or coterie.Federation.from_clients(clients(), unseen=1)
    common = {"rounds": 6, "lr": 0.1, "evaluate_every": 2, "checkpoint_every": 4, "device": "cpu"}
    return coterie.compare(methods, small, federation, folder=folder, **{**common, "seeds": 3, **options})


def test_a_comparison_joined_is_the_comparison_one_after_another(tmp_path):
    """The same files with the same scores in them; only the times, and what was chosen, may differ."""
    found = {way: compared(["fedprox", "fedprox:mu=1"], tmp_path / way, together=way) for way in ("on", "off")}
    assert [(r.method, r.seed) for r in found["on"]] == [(r.method, r.seed) for r in found["off"]]
    folders = {way: sorted(p.parent for p in (tmp_path / way).glob("*/*/result.json")) for way in found}
    assert len(folders["on"]) == len(folders["off"]) == 4 * 3
    for one, other in zip(folders["on"], folders["off"], strict=True):
        assert one.relative_to(tmp_path / "on") == other.relative_to(tmp_path / "off")
        mine, theirs = Folder(one).history(), Folder(other).history()
        assert [e.round for e in mine] == [e.round for e in theirs] == [0, 2, 4, 6]
        for a, b in zip(mine, theirs, strict=True):
            for stage in a.stages:
                np.testing.assert_allclose(a.stages[stage].test["loss"], b.stages[stage].test["loss"], rtol=1e-5)
        chosen = [Folder(path).config()["choices"]["together"] for path in (one, other)]
        assert chosen[0] == f"{6 if 'fedprox' in str(one) else 3} runs in one stack: together=on"
        assert chosen[1] == "alone: together=off"
        seconds = [sum(r["seconds"] for r in Folder(path).rounds()) for path in (one, other)]
        assert min(seconds) > 0


def test_seconds_of_joined_runs_add_up_to_the_time_they_took():
    """Each run is charged its share of the common rounds, so that times in a table say what a method costs."""
    start = time.perf_counter()
    results = compared(["fedavg"], together="on", seeds=4, rounds=10)
    assert sum(r.seconds for r in results) <= time.perf_counter() - start


def test_patience_ends_runs_at_different_rounds():
    """Full-batch regression on noise overfits, each seed from its own start; who is done leaves the stack."""
    rng = np.random.default_rng(3)
    noise = [(rng.standard_normal((24, 4)).astype(np.float32), rng.integers(0, 3, 24)) for _ in range(4)]
    data = coterie.Federation.from_clients(noise, val=0.3)
    options = {"federation": data, "rounds": 200, "lr": 0.7, "batch": 0, "evaluate_every": 1, "patience": 2, "seeds": 4,
               "precision": "float64"}
    joined, apart = (compared(["local"], together=way, **options) for way in ("on", "off"))
    ends = [result.history[-1].round for result in apart]
    assert len(set(ends)) > 1
    assert max(ends) < 200
    assert [result.history[-1].round for result in joined] == ends


def test_an_error_in_one_run_reaches_the_caller_and_the_others_are_saved(tmp_path):
    """Seed 1 fails after round 3. The others finish the round they are in, which seed 0, served first, has just begun;
    they are saved, and the comparison can be resumed."""

    def watch(progress):
        if progress.seed == 1 and progress.round == 3 and progress.method == "fedavg":
            raise OSError("the screen is on fire")

    with pytest.raises(OSError, match="on fire"):
        compared(["fedavg"], tmp_path / "cut", together="on", watch=watch)
    rounds = {seed: Folder(tmp_path / "cut" / "fedavg" / f"seed{seed}").rounds() for seed in (0, 1, 2)}
    assert [len(rounds[seed]) for seed in (0, 1, 2)] == [4, 3, 3]
    for seed in (0, 2):
        assert Folder(tmp_path / "cut" / "fedavg" / f"seed{seed}").load()[1]["round"] == len(rounds[seed])
    compared(["fedavg"], tmp_path / "whole", together="on")
    compared(["fedavg"], tmp_path / "cut", together="on", resume=True)
    for path in (tmp_path / "whole").glob("*/*/result.json"):
        again = json.loads((tmp_path / "cut" / path.relative_to(tmp_path / "whole")).read_text())
        assert again["rows_sha256"] == json.loads(path.read_text())["rows_sha256"]


@dataclass(frozen=True)
class Failing(FedAvg):
    """Clients whose row starts with a positive number fail."""

    def train(self, cohort, rows):
        if cohort.round == 2 and (rows[:, 0] > 0).any():
            raise RuntimeError("positive")
        return cohort.train(rows)


def test_an_error_in_joined_work_stops_only_the_run_it_belongs_to(tiny):
    """What failed together is done run by run, so the others finish the round they are in before the error is raised;
    those served before the one that fails have begun the next one."""
    sims = [tiny.simulation(Failing(), seed=0)]
    sims += [tiny.simulation(Failing(), seed=seed, twin=sims[0]) for seed in range(1, 6)]
    stopped = []

    def working(sim):
        for _ in range(4):
            yield from sim.rounding()
            if stopped:
                return

    stack = Stack(100, stop=lambda: stopped.append(True))
    with pytest.raises(RuntimeError, match="positive"):
        stack.run([working(sim) for sim in sims])
    fails = [bool(tiny.after(2, Failing(), seed=seed)["server.row"][0] > 0) for seed in range(6)]
    assert 0 < sum(fails) < 6
    first = fails.index(True)
    expected = [2 if fails[seed] else 4 if seed < first else 3 for seed in range(6)]
    assert [sim.rounds_done for sim in sims] == expected


def test_ctrl_c_in_a_joined_comparison_saves_every_run(tmp_path):
    """All runs end after the round they are in, each with a checkpoint of it."""

    def watch(progress):
        if progress.method == "fedavg" and progress.seed == 0 and progress.round == 3 and progress.latest.round == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted):
        compared(["fedavg"], tmp_path / "cut", together="on", watch=watch)
    assert signal.getsignal(signal.SIGINT) is before
    for seed in (0, 1, 2):
        assert Folder(tmp_path / "cut" / "fedavg" / f"seed{seed}").load()[1]["round"] == 3
    assert all(Folder(p.parent).finished for p in (tmp_path / "cut" / "local").glob("*/config.json"))


# -- which runs, under which name --------------------------------------------------------------------------------------


def test_the_former_name_of_the_option_is_still_read(tmp_path):
    """Run folders and files written before have `join`; its value goes on under the name it has now."""
    assert build(Training, {"join": "off", "lr": 0.1}, "training") == Training(together="off", lr=0.1)
    compared(["fedavg"], tmp_path, together="on", seeds=1, rounds=1)
    path = tmp_path / "fedavg" / "seed0" / "config.json"
    as_before(path, lambda config: config["training"].update(join=config["training"].pop("together")))
    assert Saved.open(path.parent).spec.training.together == "on"


def test_runs_beyond_the_room_wait_for_the_next_stack(tmp_path, monkeypatch):
    """Room for two runs' clients: five seeds are three stacks, of two, two and one."""
    monkeypatch.setattr(together_pays, "MOST", 2 * 4)
    compared(["fedavg"], tmp_path, together="on", seeds=5, rounds=1)
    said = [Folder(tmp_path / "fedavg" / f"seed{seed}").config()["choices"]["together"] for seed in range(5)]
    assert [text.partition(":")[0] for text in said] == [*["2 runs in one stack"] * 4, "alone"]


def test_kin_are_methods_that_differ_in_numbers_and_aggregator_only():
    same = [("fedprox:mu=0.1", "fedprox:mu=2+median"), ("fedfew", "fedfew:mu=1"), ("fedrod", "fedrod+confree")]
    other = [("fedfew:models=2", "fedfew:models=3"), ("fedavg", "fedprox"), ("fedavgft", "fedavgft:finetune_lr=0.1"),
             ("fedrod", "fedrod:gamma=0.5"), ("fedfew", "fedfew:official")]
    for one, two in same:
        assert together.kin(registry.method(one)) == together.kin(registry.method(two))
    for one, two in other:
        assert together.kin(registry.method(one)) != together.kin(registry.method(two))


def test_progress_of_runs_that_take_turns_adds_up(tiny):
    """Two runs of ten rounds, three rounds each in turn: 6 of 20, and the run that spoke is named by its place."""
    latest = tiny.simulation().evaluate()
    with Live(2, Console(force_terminal=True, file=io.StringIO())) as live:
        for t in range(1, 4):
            for seed in (0, 1):
                live(Progress("fedavg", seed, t, 10, latest))
        task = live._bar.tasks[0]
        assert (task.completed, task.total) == (6, 20)
        assert task.description == "2/2 fedavg seed 1"


def test_answers_are_cut_by_clients():
    """Records, uploads, dictionaries, pairs and None; a run gets the slice of its clients."""
    value = (Upload(update=torch.arange(6)), {"a": [torch.arange(6)]}, None, Model(torch.arange(6)), np.arange(6))
    upload, named, nothing, record, array = together._cut(value, slice(2, 4))
    assert upload.update.tolist() == named["a"][0].tolist() == record.row.tolist() == array.tolist() == [2, 3]
    assert nothing is None
    assert isinstance(record, Record)


def test_alone_returns_what_the_work_returns():
    def work():
        first = yield together.Settle(torch.device("cpu"), 0)
        return first + 1

    assert alone(work()) == 2
