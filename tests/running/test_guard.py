"""A private run: what merge may see, who takes part, who is refused, and what is written down."""

import json
import math
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from coterie import registry
from coterie.aggregators.private import SLACK, Private
from coterie.contract.method import Method, Uploads, aggregate
from coterie.contract.records import Model, Upload
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.privacy import account
from coterie.privacy.noise import SECRET, Streams
from coterie.report.table import comparison, markdown, rows
from coterie.running import checkpoint, runs
from coterie.running.folder import Folder
from coterie.running.guard import Guard

FEW = "fedfew:weigh=client,scale=false"


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_a_round_by_hand(tiny):
    """FedAvg's server moves by lr times the noisy mean of the clipped updates, computed here from plain SGD."""
    sim = tiny.simulation("fedavg:server=sgd(lr=0.5)+private:sigma=0.3,clip=0.05", seed=4)
    moves = []
    for client in range(sim.population):
        steps = tiny.steps_of(len(sim.federation.client(client, "train")[0]), 3)
        moves.append(tiny.sgd(sim, client, sim.init.row, steps)[0] - sim.init.row)
    clipped = [move * min(1, 0.05 * (1 - SLACK) / float(move.norm())) for move in moves]
    noise = 0.3 * 0.05 * Streams(4).normal(0, "sum", sim.layout.size)
    before = sim.server.state.row.clone()
    report = sim.round().report
    torch.testing.assert_close(sim.server.state.row, before + 0.5 * (sum(clipped) + noise) / 4, rtol=1e-10, atol=1e-12)
    assert report["epsilon"] == pytest.approx(account.epsilon(0.3, 1.0, 1, 1e-5), rel=2e-3)


@pytest.mark.parametrize("spec", ["fedavg+private", "fedper+private:quantile=0.5", f"{FEW}+private"])
def test_waves_snapshots_and_empty_rounds(tiny, spec):
    """Neither waves nor a resumed state change anything; a round without participants moves the server by noise."""
    data = tiny.federation(sizes=(4, 3, 2, 3, 5), val=(1,), test=(2,))
    options = {"data": data, "sampling": "poisson", "participation": 0.25, "seed": 1}
    whole = tiny.simulation(spec, **options)
    parts = tiny.simulation(spec, wave=1, **options)
    empty = 0
    for t in range(8):
        if t == 4:
            kept = whole.snapshot()
        before = tiny.state(whole)
        done = whole.round()
        parts.round()
        assert done.participants == len(whole.selected(t))
        if not done.participants:
            empty += 1
            name = next(name for name in before if name.startswith("server."))
            assert float((tiny.state(whole)[name] - before[name]).norm()) > 0.1  # sigma C sqrt(D) / 1.25 is above 2
    assert empty
    tiny.close(tiny.state(parts), tiny.state(whole), 1e-10)
    after = tiny.state(whole)
    whole.restore(*kept)
    for _ in range(4):
        whole.round()
    tiny.same(tiny.state(whole), after)


def test_one_stack_of_several_runs(tiny):
    """Runs joined in one stack are the runs alone: private or not, with other seeds and other noise."""
    specs = ["fedavg", "fedavg+private:clip=0.1", "fedavg+private:clip=0.1,sigma=2"]
    apart, joined, _ = tiny.side_by_side(specs, sampling="poisson", participation=0.5)
    tiny.agree(apart, joined)


def test_running_statistics_stay(tiny):
    """With buffers=server nothing of them travels, and no noise is put there; frozen parameters stay too."""
    sim = tiny.simulation("fedavg+private", "bn", buffers="server")
    start = sim.layout.cut(sim.server.state.row, "buffers").clone()
    sim.round()
    assert torch.equal(sim.layout.cut(sim.server.state.row, "buffers"), start)
    sim = tiny.simulation("fedavg+private", "bn", buffers="local")
    sim.round()
    assert torch.equal(sim.layout.cut(sim.server.state.row, "buffers"), start)


def test_what_is_not_trained_gets_no_noise(tiny):
    """FedNH's scale, where it is fixed, is a column that nobody sends anything for."""
    sim = tiny.simulation("fednh:learn_scale=false")
    (scale,) = [entry for entry in sim.layout.entries if entry.name.endswith("scale")]
    assert not scale.trainable
    noisy = torch.randn(1, sim.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plugged = registry.method("fedavg+private").aggregator
    move = aggregate(plugged, noisy, torch.ones(1, dtype=torch.float64), sim.layout)
    assert move[scale.start : scale.stop].tolist() == [0.0]
    trained = [slice(e.start, e.stop) for e in sim.layout.entries if e.trainable]
    assert all(torch.equal(move[columns], noisy[0, columns]) for columns in trained)


def test_records_and_table(tiny, tmp_path):
    """Every round says what was spent so far; tables have a column for it; nothing about pairs of clients is kept."""
    data = tiny.federation(sizes=(4, 3, 2, 3, 5), val=(1,), test=(2,))
    options = {"rounds": 3, "evaluate_every": 1, "device": "cpu", "sampling": "poisson", "participation": 0.5}
    result = runs.run("fedavg+private:sigma=2", tiny.mlp, data, folder=tmp_path / "run", **options)
    spent = [r["report"]["epsilon"] for r in result.rounds]
    assert spent == pytest.approx([account.epsilon(2.0, 0.5, t, 1e-5) for t in (1, 2, 3)], rel=2e-3)
    assert result.epsilon == spent[-1]
    assert all(set(r["report"]) == {"epsilon"} for r in result.rounds)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [r["report"]["epsilon"] for r in map(json.loads, lines) if r["kind"] == "round"] == spent
    plain = runs.run("fedavg", tiny.mlp, data, **options)
    assert [math.isnan(line.epsilon) for line in rows([plain, result])] == [True, False, True, False]
    assert "| epsilon |" in markdown([plain, result])
    assert f"{spent[-1]:.2f}" in markdown([plain, result])
    assert "epsilon" not in markdown([plain])
    assert [column.header for column in comparison([result]).columns].count("epsilon") == 1


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_poisson_sampling(tiny):
    """500 rounds of 40 clients with q = 0.3: each client is in 150 +- 5 deviations (10.2), and so is every pair's 45.

    Sizes vary as a binomial's do: variance 40 * 0.3 * 0.7 = 8.4 within 5 standard errors, 5 * 8.4 * sqrt(2 / 500).
    Each bound fails with probability 1e-6 (times 780 pairs); the streams are fixed.
    """
    q, rounds, clients = 0.3, 500, 40
    sim = tiny.simulation(data=tiny.federation(sizes=(2,) * clients), sampling="poisson", participation=q)
    there = np.zeros((rounds, clients))
    for t in range(rounds):
        there[t, sim.selected(t)] = 1
    assert np.abs(there.sum(0) - rounds * q).max() < 5 * math.sqrt(rounds * q * (1 - q))
    pairs = (there.T @ there)[np.triu_indices(clients, 1)]
    assert np.abs(pairs - rounds * q**2).max() < 5 * math.sqrt(rounds * q**2 * (1 - q**2))
    assert abs(there.sum(1).var() - 8.4) < 5 * 8.4 * math.sqrt(2 / rounds)
    assert sim.selected(3).tolist() == sim.selected(3).tolist() == np.flatnonzero(there[3]).tolist()


def test_poisson_with_everybody(tiny):
    """q = 1 asks all, so both ways of sampling give the same run; without privacy an empty round changes nothing."""
    tiny.same(tiny.after(2, "fedavg", sampling="poisson"), tiny.after(2, "fedavg"))
    sim = tiny.simulation(sampling="poisson", participation=0.05)
    empty = next(t for t in range(20) if not len(sim.selected(t)))
    sim.rounds_done, before = empty, tiny.state(sim)
    assert sim.round().participants == 0
    tiny.same(tiny.state(sim), before)


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "cfl": "introduce themselves by 'moves'", "cwfedavg": "introduce themselves by 'mix'",
    "feddyn": "takes more from the updates than their mean", "fedfew": "uploads 'loss'.*use fedfew:weigh=client",
    "fedexlora": "takes more from the updates than their mean",
    "fedmtl": "takes more from the updates than their mean",
    "flexlora": "takes more from the updates than their mean",
    "flora": "takes more from the updates than their mean",
    "lorafair": "takes more from the updates than their mean", "fednh": "uploads 'counts' and 'means'",
    "fedpac": "introduce themselves by 'H'", "fedsoft": "uploads 'offset' and 'u'",
    "fedplora": "uploads 'modules'", "hetlora": "introduce themselves by 'rank'",
    "raflora": "introduce themselves by 'rank'", "fedalt": "uploads 'own'", "hilora": "introduce themselves by 'up'",
    "fesem": "introduce themselves by 'cluster'", "ifca": "uploads 'choice'",
    "pacfl": "introduce themselves by 'basis'", "scaffold": "uploads 'control'",
}


@pytest.mark.parametrize("name", sorted(name for name, cls in registry.methods().items() if cls.averages))
def test_every_method_runs_or_is_refused(tiny, name):
    """Before the first round, with the reason; the others run."""
    data = tiny.federation(sizes=(4, 3, 2, 3, 5), val=(1,), test=(2,))
    if name in REFUSED:
        with pytest.raises(CoterieError, match=REFUSED[name]):
            tiny.simulation(f"{name}+private", data=data)
        return
    sim = tiny.simulation(f"{name}+private:sigma=0.1", data=data, sampling="poisson", participation=0.5)
    sim.round()
    assert all(torch.isfinite(t).all() for t in tiny.state(sim).values())


@dataclass(frozen=True)
class Named(FedAvg):
    """Looks who sent what."""

    def merge(self, server, up):
        return Model(server.row + self.aggregate(up.update, (up.ids + 1.0) / (up.ids + 1.0).sum(), up.layout))


@dataclass(frozen=True)
class Counted(FedAvg):
    """Looks at the clients' sizes."""

    def merge(self, server, up):
        return Model(server.row + self.aggregate(up.update, up.share_in((0 * up.share).long(), 1)[:, 0], up.layout))


@dataclass(frozen=True)
class Largest(FedAvg):
    """Takes the largest update instead of the mean."""

    def merge(self, server, up):
        return Model(server.row + up.update[up.update.norm(dim=1).argmax()])


@dataclass(frozen=True)
class Silent(Method):
    """Uploads nothing."""

    def local(self, cohort, payload, mine):
        return Upload(), mine

    def merge(self, server, up):
        return server


@pytest.mark.parametrize(("method", "said"), [
    (Named, "asks for the clients' ids"), (Counted, "asks for the clients' n,"),
    (Largest, "takes more from the updates"), (Silent, "uploads nothing to average"),
])
def test_methods_that_look_at_clients_are_refused(tiny, method, said):
    """Whatever a new method does with the uploads beyond their mean is found by trying it."""
    with pytest.raises(CoterieError, match=said):
        tiny.simulation(replace(method(), aggregator=Private()))


@pytest.mark.parametrize(("options", "said"), [
    ({"participation": 0.5}, "set sampling=poisson"),
    ({"patience": 2}, "set patience=0"),
    ({"model": "bn"}, "set buffers=local or buffers=server"),
    ({"data": "one"}, "there is only one"),
])
def test_runs_that_must_not_begin(tiny, options, said):
    options = {k: tiny.federation(sizes=(3,)) if v == "one" else v for k, v in options.items()}
    with pytest.raises(CoterieError, match=said):
        tiny.simulation("fedavg+private", **options)


def test_a_comparison_is_refused_before_it_begins(tiny, tmp_path):
    """Though the first methods could run."""
    with pytest.raises(CoterieError, match="uploads 'control'"):
        runs.compare(["fedprox", "scaffold+private"], tiny.mlp, tiny.federation(), rounds=1, folder=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_the_budget(tiny):
    """20 rounds with sigma 1 cost more than 9; the advice is followed to the letter, and then it fits."""
    spec, options = "fedavg+private:epsilon=9,sigma={}", {"sampling": "poisson", "participation": 0.5}
    with pytest.raises(CoterieError, match=r"20 rounds would spend epsilon .* of 9; set rounds=\d+ or") as refused:
        tiny.simulation(spec.format(1), rounds=20, **options)
    words = str(refused.value)
    fitting = int(words.split("rounds=")[1].split()[0])
    sigma = words.split("sigma=")[1].rstrip(".")
    tiny.simulation(spec.format(sigma), rounds=20, **options)
    sim = tiny.simulation(spec.format(1), rounds=fitting, **options)
    for _ in range(fitting):
        sim.round()
    before = tiny.state(sim)
    with pytest.raises(CoterieError, match="would exceed the budget of epsilon 9"):
        sim.round()
    tiny.same(tiny.state(sim), before)
    with pytest.raises(CoterieError, match=r"budget of 0\.1; set private's sigma="):
        tiny.simulation("fedavg+private:epsilon=0.1", rounds=20, **options)


# -- noise of a run ----------------------------------------------------------------------------------------------------

GOOD = "6f1d2b8c94e07a35b1c8f02d7e6a49530c9d1b7f8a2e4c6d"
KEPT = {"rounds": 5, "evaluate_every": 1, "checkpoint_every": 10, "device": "cpu", "sampling": "poisson",
        "participation": 0.5}


def losses(result):
    return {e.round: e.stages["served"].test["loss"].tolist() for e in result.history}


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_killed_run_has_the_same_noise_again(tiny, tmp_path, monkeypatch, at):
    """Also where it is killed before the first checkpoint that was asked for: the nonce is on the disk before the
    first round. Rounds that are repeated are the same to the last bit, as the clients' losses show; two copies go on
    to the same end, and a new run to another."""
    monkeypatch.setenv(SECRET, GOOD)
    data, spec = tiny.federation(sizes=(4, 3, 2, 3, 5), val=(1,), test=(2,)), "fedavg+private:sigma=2,clip=0.1"

    class Killed(BaseException):
        """Nothing in the library waits for it."""

    def kill(progress):
        if progress.record is not None and progress.record["round"] == at:
            raise Killed

    with pytest.raises(Killed):
        runs.run(spec, tiny.mlp, data, folder=tmp_path / "run", watch=kill, **KEPT)
    first = {e.round: e.stages["served"].test["loss"].tolist() for e in Folder(tmp_path / "run").history()}
    assert max(first) >= at
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    one, other = (runs.run(spec, tiny.mlp, data, folder=tmp_path / name, resume=True, **KEPT)
                  for name in ("run", "copy"))
    assert losses(one) == losses(other)
    assert {t: losses(one)[t] for t in first} == first
    assert checkpoint.digest(checkpoint.load(one.folder / "checkpoint.safetensors")[0]) == checkpoint.digest(
        checkpoint.load(other.folder / "checkpoint.safetensors")[0])
    fresh = runs.run(spec, tiny.mlp, data, **KEPT)
    assert losses(fresh)[0] == losses(one)[0]
    assert losses(fresh)[5] != losses(one)[5]


def test_another_secret_or_none_ends_a_resume_before_anything_is_touched(tiny, tmp_path, monkeypatch):
    """The records stay as they are, lines after the checkpoint too; the secret is nowhere in the folder. Reading the
    run needs no secret."""
    data, run = tiny.federation(sizes=(4, 3, 2, 3, 5), val=(1,), test=(2,)), tmp_path / "run"
    monkeypatch.setenv(SECRET, GOOD)
    runs.run("fedavg+private:sigma=2", tiny.mlp, data, folder=run, **{**KEPT, "rounds": 3})
    (run / "result.json").unlink()
    tensors, meta = checkpoint.load(run / "checkpoint.safetensors")
    checkpoint.save(run / "checkpoint.safetensors", tensors, {**meta, "round": 2})
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert all(GOOD.encode() not in content for content in before.values())

    def refused(said, **environment):
        for name, value in environment.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        with pytest.raises(CoterieError, match=said):
            runs.run("fedavg+private:sigma=2", tiny.mlp, data, folder=run, resume=True, **{**KEPT, "rounds": 3})
        assert {path.name: path.read_bytes() for path in run.iterdir()} == before

    refused("is not the secret that the run began with", **{SECRET: GOOD[::-1]})
    refused("set COTERIE_SECRET to it", **{SECRET: None})
    refused("could be guessed", **{SECRET: "test"})
    monkeypatch.delenv(SECRET)
    assert len(Folder(run).result().rounds) == 3
    checkpoint.save(run / "checkpoint.safetensors", tensors, {k: v for k, v in meta.items() if k != "privacy"} | {
        "round": 2})
    before["checkpoint.safetensors"] = (run / "checkpoint.safetensors").read_bytes()
    refused("begun by an earlier version, whose noise was named otherwise")
    for damaged in ("text", {"nonce": "1"}, None):
        checkpoint.save(run / "checkpoint.safetensors", tensors, {**meta, "round": 2, "privacy": damaged})
        before["checkpoint.safetensors"] = (run / "checkpoint.safetensors").read_bytes()
        refused("does not say what names the run's noise")


def test_a_weak_secret_is_refused_before_a_folder_is_made(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, "test")
    with pytest.raises(CoterieError, match="could be guessed; make a random one: python -c"):
        runs.run("fedavg+private", tiny.mlp, tiny.federation(), folder=tmp_path / "run", rounds=1)
    assert not (tmp_path / "run").exists()
    runs.run("fedavg", tiny.mlp, tiny.federation(), rounds=1, device="cpu")  # without privacy it means nothing


# -- one update a client -----------------------------------------------------------------------------------------------


def test_fifty_rows_of_one_client_are_no_fifty_clients(tiny):
    """Each would be clipped by itself, and the client would move the sum by 50 C. Nor is one client there twice."""
    sim = tiny.simulation("fedavg+private:clip=0.1")
    before = sim.server.state.row.clone()
    ones = torch.ones(50, sim.layout.size, dtype=torch.float64)

    def merge(updates, ids):
        n = torch.ones(len(ids), dtype=torch.int64)
        sim.server.merge(Uploads({"update": updates}, torch.tensor(ids), n, n.double(), 4, 0, sim.layout))

    for updates, ids, said in ((ones, [2], "given 50 from 1 client"), (ones[:3], [0, 1], "given 3 from 2 clients"),
                               (ones[:2], [1, 1], "given 2 from 1 client"), (ones[:1], [0, 1], "given 1 from 2")):
        with pytest.raises(CoterieError, match=f"one update from each client, and was {said}"):
            merge(updates, ids)
    assert torch.equal(sim.server.state.row, before)
    merge(ones[:2], [0, 1])


def test_clients_are_never_mixed_without_the_guard(tiny):
    """An engine that forgets the guard gets an error and no unprotected mean."""
    sim = tiny.simulation("fedavg+private")
    assert isinstance(sim.server.guard, Guard)
    sim.server.guard = None
    with pytest.raises(CoterieError, match="was given the clients' own updates"):
        sim.round()


# -- FedFew with weights of the client's own ---------------------------------------------------------------------------


def test_fedfew_weighs_at_the_client(tiny):
    """Model k moves by the mean of w_ik (trained - received), w_i = softmax_k(-L_ik / mu), and no loss travels."""
    sim = tiny.simulation(f"{FEW},mu=0.5", "linear")
    cohort = tiny.cohort(sim)
    received = sim.server.state.rows.expand(sim.population, -1, -1)
    w = torch.softmax(-cohort.loss(received) / 0.5, 1)
    expected = (w[:, :, None] * (cohort.train(received) - received)).mean(0)
    before = sim.server.state.rows.clone()
    done = sim.round()
    torch.testing.assert_close(sim.server.state.rows - before, expected, rtol=1e-10, atol=1e-12)
    assert set(done.up) == {"update"}


def test_fedfew_weighs_alike_where_clients_are_alike(tiny):
    """Clients with the same data have the same losses, so alpha_i = 1/m and both ways of weighing agree."""
    one = tiny.federation(sizes=(6,), val=(2,), test=(2,))
    splits = [[one.client(0, split)] * 3 for split in ("train", "test", "val")]
    data = type(one).from_splits(*splits, classes=one.classes)
    there, here = (
        tiny.after(2, spec, data=data, batch=0) for spec in (f"{FEW},mu=0.5", "fedfew:scale=false,mu=0.5")
    )
    tiny.close(there, here, 1e-10)


@pytest.mark.parametrize("options", ["weigh=client", "weigh=client,scale=false,normalise=true"])
def test_fedfew_refuses_what_a_client_cannot_know(tiny, options):
    with pytest.raises(CoterieError, match="set scale=false and normalise=false"):
        tiny.simulation(f"fedfew:{options}")
