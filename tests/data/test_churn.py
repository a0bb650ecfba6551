"""Clients that come and go: who is asked, what newcomers get, and what is recorded of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import coterie
from coterie import cli, registry
from coterie.data import Federation, churn, digits, partition
from coterie.errors import CoterieError
from coterie.models import model
from coterie.report.table import by_age
from coterie.running.folder import Folder
from coterie.running.simulation import Simulation

METHODS = sorted(registry.methods())
TIMES = {"1": (1, churn.NEVER), "2": (0, 2), "3": (1, 3), "5": (2, churn.NEVER)}  # 0, 4 and 6 are always there


def coming(tiny, times=TIMES, **options):
    """Seven clients and one that is unseen, in the order of arrival: 0 2 4 6, 1 3 in round 1, 5 in round 2."""
    data = tiny.federation(sizes=(7, 9, 2, 5, 6, 4, 8), val=(2,), test=(3,), **options)
    unseen = tiny.federation(sizes=(5,), val=(2,), test=(3,), seed=4).client(0)
    splits = [[data.client(i, split) for i in range(7)] + [unseen] for split in ("train", "test", "val")]
    made = Federation.from_splits(*splits, classes=data.classes)
    return churn.with_times(replace(made, trained=7), times)


def test_who_is_there(tiny):
    data = coming(tiny)
    assert data.names == ("0", "2", "4", "6", "1", "3", "5", "7")
    there = [[data.names[i] for i in data.there(t)] for t in range(4)]
    assert there == [list("0246"), list("024613"), list("046135"), list("04615")]
    assert [data.arrived(t) for t in range(4)] == [4, 6, 7, 7]
    plain = tiny.federation()
    assert (plain.arrived(0), plain.there(9).tolist()) == (4, [0, 1, 2, 3])
    x, y = data.client(4)  # the samples move with the name
    whole = tiny.federation(sizes=(7, 9, 2, 5, 6, 4, 8), val=(2,), test=(3,))
    assert torch.equal(x, whole.client(1)[0])
    assert torch.equal(y, whole.client(1)[1])


def test_only_those_who_are_there_are_asked_and_scored(tiny):
    data = coming(tiny)
    sim = tiny.simulation("fedavg", data=data, rounds=5)
    caught = tiny.seen_clients(sim)
    for t in range(5):
        assert sim.evaluate().stages["served"].clients.tolist() == data.there(t).tolist()
        assert sim.round().participants == len(data.there(t))
    assert [sorted(ids) for ids in caught] == [data.there(t).tolist() for t in range(5)]
    some = tiny.simulation("fedavg", data=data, rounds=5, participation=0.5)
    for t in range(5):
        asked = some.selected(t)
        assert len(asked) == round(0.5 * len(data.there(t)))
        assert set(asked) <= set(data.there(t))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_lives_with_churn(tiny, method):
    """Finite models for everybody, also for who left; waves and the loop give the same; a snapshot taken before the
    second arrivals goes on to the same bits; a client that left keeps its own state."""
    data = coming(tiny)

    def begun(**options):
        return tiny.simulation(method, data=data, rounds=3, participation=0.75, **options)

    sim = begun()
    sim.round()
    tensors, meta = sim.snapshot()
    sim.round()
    gone = {name: t[1].clone() for name, t in sim.own.tensors().items()}  # client 2, which leaves in round 2
    sim.round()
    expected = tiny.state(sim)
    for name, t in sim.own.tensors().items():
        assert torch.equal(t[1], gone[name])
    assert all(torch.isfinite(sim.row(i)).all() for i in range(8))
    scores = sim.evaluate().stages
    assert np.isfinite(scores["served"].test["loss"]).all()
    assert np.isfinite(scores["unseen_served"].test["loss"]).all()
    again = begun(choices=meta["choices"])
    again.restore(tensors, meta)
    again.round()
    again.round()
    tiny.same(tiny.state(again), expected)
    for options in ({"wave": 2}, {"engine": "loop"}):
        other = begun(**options)
        for _ in range(3):
            other.round()
        tiny.close(tiny.state(other), expected, 1e-11)


def test_a_newcomer_gets_what_an_unseen_client_would_get(tiny):
    """The same client, unseen in one federation and arriving in round 2 in the other, has the same row then."""
    for method in ("fedper", "fedamp", "cwfedavg", "pacfl", "pfedhn", "fesem", "fedfomo"):
        data = tiny.federation(sizes=(7, 9, 5, 6), val=(2,), test=(3,))
        arriving = tiny.simulation(method, data=churn.with_times(data, {"3": (2, churn.NEVER)}), rounds=2)
        unseen = tiny.simulation(method, data=replace(data, trained=3), rounds=2)
        for sim in (arriving, unseen):
            sim.round()
            sim.round()
        torch.testing.assert_close(arriving.row(3), unseen.row(3), rtol=1e-12, atol=1e-12)


def test_means_over_all_clients_stay_means_when_clients_arrive(tiny):
    """SCAFFOLD's c is the mean of all c_i, FedDyn's s of all g_i, FedMTL's row of all models, also after arrivals."""
    for method, shared in (("scaffold", "control"), ("feddyn", "tilt"), ("fedmtl", "row")):
        sim = tiny.simulation(method, data=coming(tiny), rounds=4, participation=0.75)
        for t in range(1, 5):
            sim.round()
            known = sim.own.row[: sim.federation.arrived(t)]
            torch.testing.assert_close(getattr(sim.server.state, shared), known.mean(0), rtol=1e-9, atol=1e-12)


def test_two_seeds_of_a_comparison_share_a_stack_with_churn(tiny):
    """What newcomers compute on arrival is joined like everything else, and changes nothing."""
    for method in ("fedper", "pacfl"):
        apart, joined, _ = tiny.side_by_side([method], rounds=3, data=coming(tiny), participation=0.75)
        tiny.agree(apart, joined)


def test_random_churn_is_the_same_for_all_and_has_its_rates():
    """Each client has its own stream: others never matter. Waits are geometric, so their means are 1 / probability."""
    names = [f"c{i}" for i in range(4000)]
    recipe = churn.Random(rate=0.2, leave=0.05, start=0.25)
    times = recipe.times(names)
    assert times == recipe.times(names)
    late = np.array([a for a, _ in times.values() if a])
    stays = np.array([b - a for a, b in times.values()])
    assert len(late) == 3000
    assert late.mean() == pytest.approx(1 / 0.2, rel=0.05)
    assert stays.mean() == pytest.approx(1 / 0.05, rel=0.05)
    alone = churn.Random(rate=0.2, start=1.0, leave=0.05).times(names[:7])
    assert all(alone[n][1] == times[n][1] - times[n][0] for n in names[:7])  # the stay is the client's own draw
    assert times != churn.Random(rate=0.2, leave=0.05, start=0.25, seed=1).times(names)
    assert all(b == churn.NEVER or b > 10**8 for _, b in churn.Random(leave=0).times(names).values())


@pytest.mark.parametrize(("text", "says"), [
    ("client,arrives\n0,1\n", "must begin with the line client,arrives,leaves"),
    ("client,arrives,leaves\n0,1\n", "line 2: 2 values"),
    ("client,arrives,leaves\n0,-1,\n", "line 2: '-1' is no round"),
    ("client,arrives,leaves\n0,1.5,\n", "line 2: '1.5' is no round"),
    ("client,arrives,leaves\n0,3,3\n", "leaves in round 3 but arrives in round 3"),
    ("client,arrives,leaves\n0,3,\n0,4,\n", "line 3: client '0' is named twice"),
    ("client,arrives,leaves\n9,3,\n", "unknown client in the churn '9'"),
    ("client,arrives,leaves\n0,1,\n1,1,\n2,4,\n3,2,\n", "no client is there at the beginning; the first"),
    ("", "must begin with the line"),
    ("\x00\xff", "churn file"),
])
def test_bad_churn_files_are_sentences(tiny, tmp_path, text, says):
    path = tmp_path / "churn.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CoterieError, match=says):
        churn.scheduled(tiny.federation(), str(path))


@pytest.mark.parametrize(("spec", "says"), [
    ("randon:rate=0.1", "unknown churn 'randon:rate=0.1'; did you mean 'random:rate=0.1'"),
    ("random:rat=0.1", "unknown option of churn 'rat'; did you mean 'rate'"),
    ("random:rate=2", "rate must be above 0 and at most 1, not 2"),
    ("random:leave=1", "leave must be at least 0 and below 1"),
    ("random:start=0", "start must be above 0"),
    ("random:often", "is no option"),
    ("missing.csv", "cannot be read"),
])
def test_bad_recipes_are_sentences(tiny, spec, says):
    with pytest.raises(CoterieError, match=says):
        churn.scheduled(tiny.federation(), spec)


def test_a_schedule_that_leaves_nobody_is_refused_before_round_1(tiny):
    data = tiny.federation()
    times = dict.fromkeys(data.names, (0, 3))
    with pytest.raises(CoterieError, match="nobody is there in round 3"):
        tiny.simulation("fedavg", data=churn.with_times(data, times), rounds=5)
    tiny.simulation("fedavg", data=churn.with_times(data, times), rounds=2)  # over before
    with pytest.raises(CoterieError, match="leave out the churn"):
        tiny.simulation("fedavg+private:sigma=1", data=churn.with_times(data, {"1": (1, 9)}), sampling="poisson",
                        participation=0.5)
    with pytest.raises(CoterieError, match="is unseen"):
        churn.with_times(replace(data, trained=3), {"3": (1, 2)})


def test_the_records_of_a_run_with_churn(tmp_path):
    """config.json has the schedule, every evaluation the newcomers by age; recomputed here from clients.csv."""
    x, y = digits()
    dealt = partition("iid", y.numpy(), 8, seed=0)
    data = churn.scheduled(Federation.from_assignment(x, y, dealt), "random:rate=0.3,leave=0.02")
    result = coterie.run("fedavg", model("linear", (1, 8, 8), 10), data, rounds=6, evaluate_every=2, device="cpu",
                         folder=tmp_path / "run")
    folder = Folder(tmp_path / "run")
    config = folder.config()
    assert [a for a, _ in config["churn"]] == data.schedule[:, 0].tolist() == list(result.arrives)
    assert [b for _, b in config["churn"]] == [None if b == churn.NEVER else b for b in data.schedule[:, 1].tolist()]
    assert folder.result().arrives == result.arrives
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in found if record["kind"] == "evaluation"]
    ages = 0
    for record, evaluation in zip(evaluations, folder.history(), strict=True):
        scores = evaluation.stages["served"]
        assert scores.clients.tolist() == data.there(evaluation.round).tolist()
        for age, count, mean in record["newcomers"]["served"]:
            mine = [evaluation.round - data.schedule[i, 0] == age and data.schedule[i, 0] > 0 for i in scores.clients]
            assert count == sum(mine)
            assert mean == pytest.approx(scores.test["accuracy"][np.array(mine)].mean())
            ages += count
    assert ages == sum(int((data.schedule[data.there(t), 0] > 0).sum()) for t in (0, 2, 4, 6)) > 0
    found = by_age([result], "served")
    line = [(n, n * m) for e in evaluations for age, n, m in e["newcomers"]["served"] if 1 <= age <= 2]
    assert found[1, 2] == pytest.approx(sum(t for _, t in line) / sum(n for n, _ in line))


def test_a_killed_run_with_churn_is_resumed_to_the_same_bits(tmp_path, monkeypatch):
    """It dies between two checkpoints, after arrivals; the digest of the final rows is that of the whole run."""
    x, y = digits()
    data = Federation.from_assignment(x, y, partition("iid", y.numpy(), 8, seed=0))
    data = churn.scheduled(data, "random:rate=0.3,leave=0.05")
    options = {"rounds": 7, "checkpoint_every": 3, "evaluate_every": 3, "device": "cpu"}
    factory = model("linear", (1, 8, 8), 10)
    coterie.run("fedper", factory, data, folder=tmp_path / "whole", **options)
    original = Simulation.rounding

    def dying(self):
        if self.rounds_done == 5:
            raise KeyboardInterrupt
        return (yield from original(self))

    monkeypatch.setattr(Simulation, "rounding", dying)
    with pytest.raises(KeyboardInterrupt):
        coterie.run("fedper", factory, data, folder=tmp_path / "cut", **options)
    monkeypatch.setattr(Simulation, "rounding", original)
    coterie.run("fedper", factory, data, folder=tmp_path / "cut", resume=True, **options)
    whole, cut = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "cut"))
    assert whole["rows_sha256"] == cut["rows_sha256"]
    assert (tmp_path / "whole" / "clients.csv").read_text() == (tmp_path / "cut" / "clients.csv").read_text()


def test_the_command_shows_newcomers_and_draws_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "churn.csv").write_text("client,arrives,leaves\n1,2,\n3,1,3\n")
    monkeypatch.chdir(tmp_path)
    words = ["compare", "fedper", "--clients", "5", "--model", "linear", "--rounds", "4", "--set", "evaluate_every=1",
             "--set", "device=cpu", "--churn", "churn.csv", "--out", "out"]
    for command in (words, ["show", "out"]):
        monkeypatch.setattr("sys.argv", ["coterie", *command])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown = capsys.readouterr().out
        assert stopped.value.code == 0
        assert "newcomers, served: test accuracy in % by rounds since their arrival" in shown
    assert (tmp_path / "out" / "newcomers.png").stat().st_size > 5000
