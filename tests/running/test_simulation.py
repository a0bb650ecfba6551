"""The round loop: who takes part, what travels, what evaluation and checkpoints leave untouched."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from coterie import registry
from coterie.contract.method import Upload
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedper import FedPer
from coterie.running.training import Training

METHODS = sorted(registry.methods())


# -- who takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("participation", "count"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.01, 1)])
def test_participation_counts(tiny, participation, count):
    """round(p M) clients of 8, at least one; different ones in different rounds; all of them over time."""
    data = tiny.federation(sizes=(3,) * 8)
    sim = tiny.simulation(data=data, participation=participation)
    rounds = [sim.selected(t) for t in range(60)]
    assert all(len(set(ids.tolist())) == count for ids in rounds)
    assert sorted({i for ids in rounds for i in ids.tolist()}) == list(range(8))
    caught = tiny.seen_clients(sim)
    outcome = sim.round()
    assert outcome.participants == count
    assert outcome.dropped == 0
    assert caught == [rounds[0].tolist()]


def test_selection_is_even_and_does_not_depend_on_the_order_of_clients(tiny):
    """Each of 8 clients is asked in half of 400 rounds: 200 +- 5 standard deviations of sqrt(400 / 4) = 10."""
    data = tiny.federation(sizes=(3,) * 8)
    sim = tiny.simulation(data=data, participation=0.5)
    asked = np.bincount(np.concatenate([sim.selected(t) for t in range(400)]), minlength=8)
    assert np.abs(asked - 200).max() < 50
    order = [3, 1, 7, 5, 0, 2, 6, 4]
    names = [data.names[i] for i in order]
    moved = tiny.simulation(
        data=Federation.from_splits([data.client(i) for i in order], classes=3, names=names), participation=0.5
    )
    for t in range(5):
        assert {names[i] for i in moved.selected(t)} == {data.names[i] for i in sim.selected(t)}


def test_only_participants_move(tiny):
    """Local's clients that are not selected keep their rows bit for bit; the others move."""
    sim = tiny.simulation("local", participation=0.5)
    before = tiny.state(sim)["own.row"]
    sim.round()
    moved = (tiny.state(sim)["own.row"] != before).any(1)
    assert moved.nonzero()[:, 0].tolist() == sim.selected(0).tolist()


def test_dropouts_leave_the_mean_to_the_others(tiny):
    """FedAvg after a round with dropouts is the mean of the answering clients' own SGD, weighted by their samples."""
    sim = tiny.simulation(dropouts=0.5, seed=3)
    start = sim.server.state.row
    caught = tiny.seen_clients(sim)
    sim.round()
    answered = caught[0]
    assert 0 < len(answered) < 4
    sim.rounds_done = 0  # the reference draws round 0's batches
    trained = [tiny.sgd(sim, i, start, tiny.steps_of(tiny.SIZES[i], 3))[0] for i in answered]
    n = torch.tensor([tiny.SIZES[i] for i in answered], dtype=torch.float64)
    expected = (n / n.sum()) @ torch.stack(trained)
    torch.testing.assert_close(sim.server.state.row, expected, rtol=1e-12, atol=1e-12)


def test_stragglers_work_between_a_tenth_and_all(tiny):
    """Slow clients take fewer steps with work uniform in [0.1, 1], the fraction of slow clients is as asked."""
    data = tiny.federation(sizes=(3,) * 200)
    sim = tiny.simulation(data=data, stragglers=0.5)
    work = sim._straggling(np.arange(200), 0)
    slow = work < 1
    assert 65 < slow.sum() < 135  # 100 +- 5 standard deviations of sqrt(200 / 4) = 7.1
    assert work.min() >= 0.1
    assert abs(work[slow].mean() - 0.55) < 0.13  # 5 standard deviations of 0.26 / sqrt(100)
    assert tiny.simulation(data=data)._straggling(np.arange(200), 0) is None


def test_a_stragglers_upload_is_its_partial_work(tiny):
    """FedAvg with stragglers is the mean of SGD stopped after ceil(w S) of S steps."""
    sim = tiny.simulation(stragglers=0.9, epochs=4)
    start, work = sim.server.state.row, sim._straggling(np.arange(4), 0)
    full = [tiny.steps_of(n, 3, 4) for n in tiny.SIZES]
    steps = [max(math.ceil(s * w), 1) for s, w in zip(full, work)]
    assert steps != full
    trained = torch.stack([tiny.sgd(sim, i, start, steps[i])[0] for i in range(4)])
    sim.round()
    n = torch.tensor(tiny.SIZES, dtype=torch.float64)
    torch.testing.assert_close(sim.server.state.row, (n / n.sum()) @ trained, rtol=1e-12, atol=1e-12)


# -- evaluation -------------------------------------------------------------------------------------------------------


TRAINS_WHAT_IT_DEPLOYS = ["fedavg", "local", "fedper", "fedprox:mu=0", "ifca", "fedfew"]


@pytest.mark.parametrize("model", ["mlp", "dropout", "bn"])
@pytest.mark.parametrize("method", TRAINS_WHAT_IT_DEPLOYS)
def test_adapted_is_the_copy_trained_in_that_round(tiny, method, model):
    """At round t `adapted` uses round t's stream: it equals the plain SGD run of that round from the served row."""
    sim = tiny.simulation(method, model)
    sim.round()
    sim.round()
    for client in range(4):
        served, adapted = sim.row(client), sim.row(client, adapted=True)
        expected, _ = tiny.sgd(sim, client, served, tiny.steps_of(tiny.SIZES[client], 3))
        torch.testing.assert_close(adapted, expected, rtol=1e-12, atol=1e-12)
    if method == "local":  # and it is what the round itself makes
        ahead = [sim.row(client, adapted=True) for client in range(4)]
        sim.round()
        assert all(torch.equal(sim.row(client), ahead[client]) for client in range(4))


def test_fedavgs_next_model_is_the_mean_of_the_adapted_rows(tiny):
    sim = tiny.simulation()
    sim.round()
    adapted = torch.stack([sim.row(client, adapted=True) for client in range(4)])
    sim.round()
    n = torch.tensor(tiny.SIZES, dtype=torch.float64)
    torch.testing.assert_close(sim.row(0), (n / n.sum()) @ adapted, rtol=1e-13, atol=1e-13)


def test_scores_are_those_of_the_served_and_adapted_rows(tiny):
    """Loss and accuracy of the nn.Module with the row that `row()` gives; steps are what adapting took."""
    sim = tiny.simulation(data=tiny.federation(test=(3, 4, 0, 5)))
    sim.round()
    found = sim.evaluate()
    assert found.round == 1
    for stage, adapted in (("served", False), ("adapted", True)):
        scores = found.stages[stage]
        assert scores.steps.tolist() == ([3, 4, 1, 2] if adapted else [0, 0, 0, 0])
        assert scores.samples.tolist() == [3, 4, 0, 5]
        assert np.isnan(scores.test["loss"]).tolist() == [False, False, True, False]
        assert np.isnan(scores.val["loss"]).tolist() == [False, False, True, False]  # client 2 has no validation data
        for client in (0, 1, 3):
            module = sim.layout.load(copy.deepcopy(sim.init.module).double(), sim.row(client, adapted=adapted))
            for split, values in (("test", scores.test), ("val", scores.val)):
                x, y = sim.federation.client(client, split)
                assert values["loss"][client] == pytest.approx(F.cross_entropy(module(x), y).item(), rel=1e-12)
                accuracy = (module(x).argmax(1) == y).double().mean().item()
                assert values["accuracy"][client] == pytest.approx(accuracy)


def test_unseen_clients_get_what_the_method_says(tiny):
    """FedAvg gives them the shared model; FedPer the shared body and a head trained on it, the body untouched."""
    data = tiny.federation(sizes=(7, 12, 1, 5), unseen=1)
    sim = tiny.simulation("fedavg", data=data)
    sim.round()
    assert torch.equal(sim.row(3), sim.server.state.row)
    sim = tiny.simulation("fedper", data=data)
    sim.round()
    row, layout = sim.row(3), sim.layout
    assert torch.equal(layout.cut(row, "base"), sim.server.state.row)
    fresh = layout.put(sim.init.row, "base", sim.server.state.row)
    n = int(data.sizes("train")[3])
    expected, _ = tiny.sgd(sim, 3, fresh, tiny.steps_of(n, 3), part="head")
    torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-12)


# -- buffers ----------------------------------------------------------------------------------------------------------


def buffers_of(sim, row):
    views = sim.layout.views(row)
    return views["1.running_mean"], views["1.running_var"], views["1.num_batches_tracked"]


def trained_by_hand(tiny, sim):
    """Every client's row after this round's SGD from the served row, by plain PyTorch."""
    pairs = enumerate(tiny.SIZES)
    return torch.stack([tiny.sgd(sim, i, sim.row(i), tiny.steps_of(n, 3))[0] for i, n in pairs])


def test_buffers_average(tiny):
    """Statistics are the mean weighted by samples; the counter is the largest one, not a mean."""
    sim = tiny.simulation(model="bn")
    trained = trained_by_hand(tiny, sim)
    sim.round()
    share = torch.tensor(tiny.SIZES, dtype=torch.float64) / sum(tiny.SIZES)
    mean, variance, count = buffers_of(sim, sim.server.state.row)
    means, variances, counts = buffers_of(sim, trained)
    torch.testing.assert_close(mean, share @ means, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variance, share @ variances, rtol=1e-12, atol=1e-12)
    assert counts.tolist() == [2, 4, 0, 2]
    assert count.item() == 4


def test_buffers_local_never_travel(tiny):
    """Bytes are smaller by the buffers, the server's buffers stay as they started, each client goes on from its own."""
    sim = tiny.simulation(model="bn", buffers="local")
    start = buffers_of(sim, sim.server.state.row)
    outcome = sim.round()
    size, kept = sim.layout.size, 5 + 5 + 1  # running mean, running variance, counter
    assert outcome.down == {"row": 8 * (size - kept)}
    assert outcome.up == {"update": 8 * (size - kept)}
    for now, before in zip(buffers_of(sim, sim.server.state.row), start):
        assert torch.equal(now, before)
    counts = torch.stack([buffers_of(sim, sim.row(i))[2] for i in range(4)])
    assert counts.tolist() == [2, 4, 0, 2]
    trained = trained_by_hand(tiny, sim)  # from the shared parameters and each client's own statistics
    sim.round()
    for client in range(4):
        for now, expected in zip(buffers_of(sim, sim.row(client)), buffers_of(sim, trained[client])):
            torch.testing.assert_close(now, expected, rtol=1e-12, atol=1e-12)
    share = torch.tensor(tiny.SIZES, dtype=torch.float64) / sum(tiny.SIZES)
    expected = sim.layout.cut(share @ trained, "parameters")
    torch.testing.assert_close(sim.layout.cut(sim.server.state.row, "parameters"), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["stacked", "reference"])
def test_a_client_without_statistics_of_its_own_estimates_them(tiny, engine):
    """buffers=local: an unseen client, and one that was never asked, takes statistics of its own samples to the shared
    model: by hand those of each batch of a pass, weighted as training weighs them, 0.1 (1 - 0.1)^(k - 1 - b) for batch
    b of k, without the start. Its parameters are the server's, and no step is counted."""
    data = tiny.federation(sizes=(7, 12, 4, 5, 8), unseen=1)
    sim = tiny.simulation(model="bn", buffers="local", data=data, engine=engine, participation=0.5)
    sim.round()
    absent = next(i for i in range(4) if i not in sim.selected(0))
    for client in (int(data.unseen[0]), absent):
        row = sim.row(client)
        assert torch.equal(sim.layout.cut(row, "parameters"), sim.layout.cut(sim.server.state.row, "parameters"))
        x, _ = sim.federation.client(client)
        chosen = tiny.batches(tiny.stream(sim, client, "statistics"), len(x), 3, tiny.steps_of(len(x), 3))
        views = sim.layout.views(sim.server.state.row)
        hidden = [x[batch] @ views["0.weight"].T + views["0.bias"] for batch in chosen if len(batch) > 1]
        k = len(hidden)
        weight = torch.tensor([0.1 * 0.9 ** (k - 1 - b) for b in range(k)], dtype=torch.float64)
        weight = weight / weight.sum()
        mean, variance, count = buffers_of(sim, row)
        torch.testing.assert_close(mean, weight @ torch.stack([h.mean(0) for h in hidden]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(variance, weight @ torch.stack([h.var(0) for h in hidden]), rtol=1e-9, atol=1e-9)
        assert count == k
    assert sim.evaluate().stages["unseen_served"].steps.tolist() == [0]


def test_a_client_chooses_its_first_model_with_statistics_of_its_own(tiny):
    """buffers=local, IFCA: whoever takes part for the first time after round 0 trains the model that it was served, the
    one of least loss with its own statistics; with those of the start the losses would be of models nobody uses."""
    data = tiny.federation(sizes=(7, 12, 4, 5, 8, 9), val=(0,))
    sim = tiny.simulation("ifca:models=2", "bn", data=data, buffers="local", participation=0.34)
    merge, first, seen = sim.server.merge, 0, set()

    def noted(up):
        uploads.append(up)
        return merge(up)

    for t in range(12):
        served = {int(i): sim.layout.cut(sim.row(int(i)), "parameters") for i in sim.selected(t)}
        models, uploads = sim.layout.cut(sim.server.state.rows, "parameters"), []
        sim.server.merge = noted
        sim.round()
        if t:
            for client, choice in zip(uploads[0].ids.tolist(), uploads[0].choice.tolist()):
                assert torch.equal(served[client], models[choice])
                first += client not in seen
        seen |= served.keys()
    assert first >= 3  # or nothing was tried


@pytest.mark.parametrize("method", ["ifca:models=2", "fedfew:models=2", "fesem:models=2"])
def test_few_models_are_scored_with_the_statistics_that_clients_have(tiny, method):
    """buffers=local: of the model that a client uses, the report's matrix tells what the table does."""
    data = tiny.federation(sizes=(7, 12, 4, 5, 8))
    sim = tiny.simulation(method, "bn", data=data, buffers="local", participation=0.6)
    for _ in range(3):
        sim.round()
    found, table = sim.models(), sim.evaluate().stages["served"].test["accuracy"]
    own = [row[choice] for row, choice in zip(found["test"], found["choice"])]
    np.testing.assert_allclose(own, table, atol=1e-4)  # the matrix is kept with a few digits


@pytest.mark.parametrize("method", ["fedavg", "fedfew:models=2", "ditto", "fedfomo", "scaffold"])
def test_an_unseen_client_is_not_scored_with_untrained_statistics(tiny, method):
    """Inputs far from 0 and wide: under the statistics of the start, mean 0 and variance 1, the trained model says
    nothing. With its own an unseen client is served about as well as with averaged ones."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    pairs = []
    for _ in range(8):
        x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
        pairs.append((30 + 10 * x, (x @ w).argmax(1)))
    data = Federation.from_clients(pairs, unseen=2, seed=0)
    found = {}
    for policy in ("average", "local"):
        sim = tiny.simulation(method, "bn", data=data, buffers=policy, batch=10, epochs=2)
        for _ in range(20):
            sim.round()
        found[policy] = sim.evaluate().stages["unseen_served"].test["accuracy"].mean()
    assert found["local"] > found["average"] - 0.1
    assert found["local"] > 0.7


def test_buffers_server_stay_as_the_server_started(tiny):
    """Everybody uses the server's statistics; they are sent down but never up, and never change."""
    sim = tiny.simulation(model="bn", buffers="server")
    start = [t.clone() for t in buffers_of(sim, sim.server.state.row)]
    outcome = sim.round()
    assert outcome.down == {"row": 8 * (sim.layout.size - 11), "row buffers": 8 * 11}
    assert outcome.up == {"update": 8 * (sim.layout.size - 11)}
    for row in (sim.server.state.row, sim.row(1), sim.row(1, adapted=True)):
        for now, before in zip(buffers_of(sim, row), start):
            assert torch.equal(now, before)


def test_buffers_local_needs_whole_models(tiny):
    with pytest.raises(CoterieError, match="whole models"):
        tiny.simulation("fedper", "bn", buffers="local")


def test_fedper_can_keep_head_and_buffers(tiny):
    """`head+buffers` stays, everything else travels: neither the head nor a buffer is in the shared body."""
    sim = tiny.simulation(FedPer(personal="head+buffers"), "bn")
    shared = sim.layout.only("~head+buffers")
    assert {entry.name for entry in shared.entries} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    outcome = sim.round()
    assert outcome.up == {"update": 8 * shared.size}
    counts = [buffers_of(sim, sim.row(i))[2].item() for i in range(4)]
    assert counts == [2, 4, 0, 2]  # everyone's own


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        ("fedavg", {"row": 43}, {"update": 43}),
        ("fedprox", {"row": 43}, {"update": 43}),
        ("fedavgft", {"row": 43}, {"update": 43}),
        ("local", {}, {}),
        ("fedper", {"row": 25}, {"update": 25}),
        ("ifca", {"rows": 3 * 43}, {"update": 43, "choice": 2}),
        ("fedfew:models=2", {"rows": 2 * 43}, {"update": 2 * 43, "loss": 2}),
    ],
)
def test_bytes_are_counted(tiny, method, down, up):
    """4 bytes a number: D = 4*5 + 5 + 5*3 + 3 = 43 columns, 25 of them the body; a cluster's number takes 8 bytes."""
    sim = tiny.simulation(method, data=tiny.federation(dtype=torch.float32), precision="float32")
    outcome = sim.round()
    assert outcome.down == {name: 4 * count for name, count in down.items()}
    assert outcome.up == {name: 4 * count for name, count in up.items()}


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_other_data_or_another_model_is_refused(tiny):
    tensors, meta = tiny.simulation().snapshot()
    with pytest.raises(CoterieError, match="not those that the run began with"):
        tiny.simulation(data=tiny.federation(seed=9)).restore(tensors, meta)
    with pytest.raises(CoterieError, match="another model"):
        tiny.simulation(model="linear").restore(tensors, meta)


# -- learning rates ---------------------------------------------------------------------------------------------------


def test_schedules():
    """constant; lr * decay^t; half a cosine, which is lr/2 in the middle and never exactly 0."""
    assert Training(lr=0.2).lr_at(7) == 0.2
    assert Training(lr=0.2, schedule="decay", decay=0.5).lr_at(3) == pytest.approx(0.025)
    cosine = Training(lr=0.2, schedule="cosine", rounds=10)
    assert cosine.lr_at(0) == pytest.approx(0.2)
    assert cosine.lr_at(5) == pytest.approx(0.1)
    assert cosine.lr_at(2) == pytest.approx(0.1 * (1 + math.cos(0.2 * math.pi)))
    assert 0 < cosine.lr_at(10) < 0.001


def test_a_round_trains_with_its_learning_rate(tiny):
    """One client is plain SGD: the third round's steps use lr * 0.5^2."""
    sim = tiny.simulation(data=tiny.federation(sizes=(5,)), schedule="decay", decay=0.5)
    sim.round()
    sim.round()
    expected, _ = tiny.sgd(sim, 0, sim.server.state.row, 2, lr=0.1 * 0.25)
    sim.round()
    torch.testing.assert_close(sim.server.state.row, expected, rtol=1e-12, atol=1e-12)


# -- aggregation ------------------------------------------------------------------------------------------------------


def test_a_client_of_weight_zero_is_absent_even_if_it_diverged(tiny):
    """The contract says that clients of weight 0 are absent, so a NaN among their updates must not spread."""
    layout = tiny.simulation().layout
    updates = torch.ones(2, layout.size, dtype=torch.float64)
    updates[1] = torch.nan
    found = FedAvg().aggregate(updates, torch.tensor([1.0, 0.0], dtype=torch.float64), layout)
    assert torch.equal(found, updates[0])


def test_the_servers_learning_rate_leaves_counters_whole(tiny):
    """Buffers are not directions: with a step of 0.5 the counter is still the largest client's."""
    sim = tiny.simulation("fedavg:server=sgd(lr=0.5)", "bn")
    sim.round()
    assert buffers_of(sim, sim.server.state.row)[2].item() == 4


# -- mistakes of a method's author ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("broken", "sentence"), [
    ({"deploy": lambda self, cohort, payload, mine: payload.row[0]},
     r"Broken.deploy must return a tensor \[4, \d+\], a row for each client, not one \[\d+\]"),
    ({"deploy": lambda self, cohort, payload, mine: payload}, "not a Model"),
    ({"local": lambda self, cohort, payload, mine: Upload(update=payload.row)},
     "Broken.local must return an Upload and a Record, not a Upload"),
])
def test_what_a_method_returns_is_checked_and_named(tiny, broken, sentence):
    sim = tiny.simulation(type("Broken", (FedAvg,), broken)())
    with pytest.raises(CoterieError, match=sentence):  # noqa: PT012
        sim.round()
        sim.evaluate()


def test_a_method_file_without_dataclass_or_class_name(tmp_path):
    """Options of a class that is no dataclass would silently be ignored."""
    path = tmp_path / "mine.py"
    path.write_text("from coterie.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    share: float = 0.5\n")
    with pytest.raises(CoterieError, match=r"Mine in .* has options but is no dataclass; write @dataclass"):
        registry.method(f"{path}:Mine")
    with pytest.raises(CoterieError, match=r"which class of .*mine.py is the method\? Write .*mine.py:NAME"):
        registry.method(str(path))
