"""The engine against plain PyTorch: one client, one nn.Module, torch.optim.SGD, a Python loop."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie import registry
from coterie.contract.records import Model, Record
from coterie.errors import CoterieError

METHODS = sorted(registry.methods())
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, **EXACT)


# -- (a) train equals torch.optim.SGD ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("model", ["mlp", "dropout", "bn", "words", "regression"])
def test_training_is_torch_sgd_on_each_client(tiny, model, engine):
    """Two epochs of unequal clients equal a separate run of torch.optim.SGD on the nn.Module of each client."""
    sim = tiny.simulation(model=model, engine=engine, epochs=2)
    start = tiny.rows(sim)
    found, losses = tiny.cohort(sim).train_watched(start)
    for client, n in enumerate(tiny.SIZES):
        expected, history = tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3, 2))
        assert_close(found[client], expected)
        last = history[len(history) // 2 :]  # the running loss: the samples' mean over the second epoch
        mean = sum(loss * count for loss, count in last) / sum(count for _, count in last)
        assert losses[client].item() == pytest.approx(mean, rel=1e-12)


def test_batchnorm_counts_and_statistics_are_those_of_the_true_batches(tiny):
    """Seven samples in batches of 3 make batches of 3, 3 and 1: two of them count, and the single one moves nothing."""
    sim = tiny.simulation(model="bn")
    start = tiny.rows(sim)
    trained = sim.layout.views(tiny.cohort(sim).train(start))
    counted = [2, 4, 0, 2]  # 7 = 3+3+1, 12 = 3+3+3+3, 1 = 1, 5 = 3+2
    assert trained["1.num_batches_tracked"].tolist() == counted
    alone = sim.layout.views(start)["1.running_mean"][2]
    assert torch.equal(trained["1.running_mean"][2], alone)


@pytest.mark.parametrize("engine", ["stack", "loop", "reference"])
def test_batches_of_one_use_the_running_statistics(tiny, engine):
    """A single sample has no statistics, so with batch=1 every step is torch's with BatchNorm in evaluation mode."""
    sim = tiny.simulation(model="bn", batch=1, engine=engine)
    start = tiny.rows(sim)
    found = tiny.cohort(sim).train(start)
    for client, n in enumerate(tiny.SIZES):
        assert_close(found[client], tiny.sgd(sim, client, start[client], n)[0])


def test_batchnorm_short_batch_has_the_variance_of_its_own_samples(tiny):
    """With momentum 1 the running variance is the last batch's unbiased variance, here of two samples."""
    def model():
        return nn.Sequential(nn.BatchNorm1d(tiny.FEATURES, momentum=1.0), nn.Linear(tiny.FEATURES, tiny.CLASSES))

    sim = tiny.simulation(model=model)
    trained = sim.layout.views(tiny.cohort(sim).train(tiny.rows(sim)))
    x, _ = sim.federation.client(3)
    last = tiny.batches(tiny.stream(sim, 3), 5, 3, 2)[-1]
    assert len(last) == 2
    assert_close(trained["0.running_var"][3], x[last].var(0))
    assert_close(trained["0.running_mean"][3], x[last].mean(0))


def test_convolutions_with_batchnorm_stack(tiny):
    """BatchNorm2d: the same reference with images of 2 x 2 pixels."""
    def model():
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
            nn.Linear(27, tiny.CLASSES),
        )

    sim = tiny.simulation(model=model, data=tiny.federation(sizes=(7, 12, 5)))
    assert sim.choices["engine"] == "stack"
    start = sim.init.row.expand(3, -1)
    trained = tiny.cohort(sim).train(start)
    for client, n in enumerate((7, 12, 5)):
        assert_close(trained[client], tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3))[0])
    loop = tiny.simulation(model=model, data=tiny.federation(sizes=(7, 12, 5)), engine="loop")
    assert_close(trained, tiny.cohort(loop).train(start))
    assert sim.layout.views(trained)["2.num_batches_tracked"].tolist() == [2, 4, 2]  # the batch of one does not count


def test_tracking_instance_norm_does_not_see_padding(tiny):
    """InstanceNorm's running mean averages over the samples of the batch, so a padded batch would move it."""
    def model():
        norm = nn.InstanceNorm1d(2, track_running_stats=True, momentum=1.0)
        return nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Linear(4, tiny.CLASSES))

    sim = tiny.simulation(model=model, data=tiny.federation(sizes=(7, 5)))
    trained = sim.layout.views(tiny.cohort(sim).train(sim.init.row.expand(2, -1)))
    x, _ = sim.federation.client(1)
    last = tiny.batches(tiny.stream(sim, 1), 5, 3, 2)[-1]
    assert_close(trained["1.running_mean"][1], x[last].view(2, 2, 2).mean((0, 2)))


@pytest.mark.parametrize("model", ["mlp", "dropout", "bn"])
@pytest.mark.parametrize("distinct", [False, True])
def test_several_models_a_client(tiny, model, distinct):
    """K models of a client share its batches; with `distinct` model k has the stream of copy k."""
    sim = tiny.simulation(model=model)
    start = tiny.rows(sim, models=3)
    found = tiny.cohort(sim).train(start, distinct=distinct)
    for client, n in enumerate(tiny.SIZES):
        for k in range(3):
            key = tiny.stream(sim, client, copy=k if distinct else 0)
            expected, _ = tiny.sgd(sim, client, start[client, k], tiny.steps_of(n, 3), key=key)
            assert_close(found[client, k], expected)


@pytest.mark.parametrize("model", ["mlp", "bn", "words"])
def test_only_the_part_trains(tiny, model):
    """part=head equals an optimizer that holds the head's parameters only; other parameters keep their bits."""
    sim = tiny.simulation(model=model)
    start = tiny.rows(sim)
    found = tiny.cohort(sim).train(start, part="head")
    for client, n in enumerate(tiny.SIZES):
        expected, _ = tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3), part="head")
        assert_close(found[client], expected)
    names = [entry.name for entry in sim.layout.within("base") if entry.kind == "parameter"]
    for name in names:
        assert torch.equal(sim.layout.views(found)[name], sim.layout.views(start)[name])


@pytest.mark.parametrize("part", ["none", "buffers"])
def test_nothing_to_train_changes_nothing(tiny, part):
    sim = tiny.simulation(model="bn")
    start, cohort = tiny.rows(sim), tiny.cohort(sim)
    assert torch.equal(cohort.train(start, part=part), start)
    assert cohort.spent.tolist() == [0, 0, 0, 0]


def test_frozen_parameters_never_train(tiny):
    """requires_grad=False is an optimizer without that parameter."""
    def model():
        module = tiny.mlp()
        module[0].weight.requires_grad_(False)
        return module

    sim = tiny.simulation(model=model)
    start = tiny.rows(sim)
    found = tiny.cohort(sim).train(start)
    assert "0.weight" not in sim.layout.views(found)
    assert_close(found[0], tiny.sgd(sim, 0, start[0], 3)[0])


@pytest.mark.parametrize("given_as", ["rows", "numbers"])
def test_correct_hook(tiny, given_as):
    """`gradient + strength * (row - anchor)` tensor by tensor, against the same written into .grad."""
    sim = tiny.simulation()
    start = tiny.rows(sim)
    anchor = tiny.rows(sim, seed=5)
    strength = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    given = {"anchor": anchor if given_as == "rows" else anchor[:, 0], "strength": strength}

    def pull(gradient, row, g):
        return gradient + g.strength * (row - g.anchor)

    found = tiny.cohort(sim).train(start, given, correct=pull)
    for client, n in enumerate(tiny.SIZES):
        mine = sim.layout.views(anchor[client])

        def reference(name, gradient, value, mine=mine, client=client):
            target = mine[name] if given_as == "rows" else anchor[client, 0]
            return gradient + strength[client] * (value - target)

        assert_close(found[client], tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3), correct=reference)[0])


def test_a_number_per_client_is_no_row_even_if_there_are_as_many_clients_as_columns(tiny):
    """A linear regression has D = 5 columns; with 5 clients a tensor [5] of one number each must not be cut."""
    data = tiny.federation(sizes=(4, 4, 4, 4, 4), kind="regression")
    sim = tiny.simulation(model="regression", data=data)
    assert sim.layout.size == sim.population == 5
    decay = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    start = tiny.rows(sim)
    found = tiny.cohort(sim).train(start, {"decay": decay}, correct=lambda gradient, row, g: gradient + g.decay * row)
    for client in range(5):
        expected, _ = tiny.sgd(sim, client, start[client], 2, correct=lambda _, g, v, c=client: g + decay[c] * v)
        assert_close(found[client], expected)


def ridge(net, row, batch, given):
    return net.loss(row, batch) + given.strength * net.tensors(row)["0.weight"].square().sum()


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_custom_objective_with_given(tiny, engine):
    """A penalised loss whose strength differs by client, against the same loss in plain PyTorch."""
    sim = tiny.simulation(engine=engine)
    start = tiny.rows(sim)
    strength = torch.tensor([0.0, 0.5, 1.0, 0.2], dtype=torch.float64)
    found = tiny.cohort(sim).train(start, {"strength": strength}, objective=ridge)
    for client, n in enumerate(tiny.SIZES):
        def reference(module, x, y, client=client):
            return F.cross_entropy(module(x), y) + strength[client] * module[0].weight.square().sum()

        assert_close(found[client], tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3), objective=reference)[0])


@pytest.mark.parametrize("model", ["mlp", "bn", "dropout"])
def test_steps_instead_of_epochs(tiny, model):
    """steps=5 gives every client five batches, small clients passing over their data several times."""
    sim = tiny.simulation(model=model)
    start = tiny.rows(sim)
    cohort = tiny.cohort(sim)
    found = cohort.train(start, steps=5)
    assert cohort.spent.tolist() == [5, 5, 5, 5]
    for client in range(4):
        assert_close(found[client], tiny.sgd(sim, client, start[client], 5)[0])


@pytest.mark.parametrize("model", ["mlp", "bn", "dropout"])
def test_full_batches(tiny, model):
    """batch=0 takes all samples at once, however unequal the clients."""
    sim = tiny.simulation(model=model, batch=0, epochs=2)
    start = tiny.rows(sim)
    found = tiny.cohort(sim).train(start)
    for client in range(4):
        assert_close(found[client], tiny.sgd(sim, client, start[client], 2)[0])


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_stragglers_do_the_first_part_of_their_steps(tiny, model):
    """A fraction f of S steps is ceil(f S) of them, at least one, and they are the first ones."""
    sim = tiny.simulation(model=model, epochs=3)
    start = tiny.rows(sim)
    pace = np.array([0.5, 1.0, 0.01, 0.34])
    cohort = tiny.cohort(sim, pace=pace)
    found = cohort.train(start)
    full = [9, 12, 3, 6]
    expected_steps = [5, 12, 1, 3]  # ceil(4.5), 12, at least one, ceil(2.04)
    assert cohort.spent.tolist() == expected_steps
    assert [tiny.steps_of(n, 3, 3) for n in tiny.SIZES] == full
    for client in range(4):
        assert_close(found[client], tiny.sgd(sim, client, start[client], expected_steps[client])[0])


def test_learning_rate_of_the_call_wins(tiny):
    sim = tiny.simulation()
    start = tiny.rows(sim)
    assert_close(tiny.cohort(sim).train(start, lr=0.7)[1], tiny.sgd(sim, 1, start[1], 4, lr=0.7)[0])


def test_zero_epochs_but_steps_train(tiny):
    """`steps` is meant instead of `epochs`, so epochs=0 next to steps=2 takes two steps."""
    sim = tiny.simulation(epochs=0, steps=2)
    start = tiny.rows(sim)
    assert_close(tiny.cohort(sim).train(start)[0], tiny.sgd(sim, 0, start[0], 2)[0])


# -- (b) however clients are grouped ----------------------------------------------------------------------------------


# -- (c) what cannot be stacked ---------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Looks at a number on the host, which vmap cannot do; always takes the same branch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) if x.abs().sum().item() >= 0 else self.head(-x)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Ruleless(nn.Module):
    """A custom autograd function without a rule for vmap; it doubles the scores."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return _Double.apply(self.head(x))


@pytest.mark.parametrize("module", [Branching, Ruleless])
def test_a_module_that_cannot_be_stacked_runs_as_a_loop_and_says_so(tiny, module):
    sim = tiny.simulation(model=module, epochs=2)
    assert sim.choices["engine"] == "loop"
    assert sim.choices["reason"].startswith("the model cannot be stacked: ")
    start = tiny.rows(sim)
    found = tiny.cohort(sim).train(start)
    for client, n in enumerate(tiny.SIZES):
        assert_close(found[client], tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3, 2))[0])
    with pytest.raises(CoterieError, match="cannot be stacked"):
        tiny.simulation(model=module, engine="stack")


class Jittered(nn.Module):
    """Draws from PyTorch's own generator, in a way that no dropout layer does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + torch.randn_like(x) if self.training else x)


def test_a_module_with_noise_of_its_own_is_reproducible(tiny):
    """The loop seeds PyTorch's generator by client, round and step: neither its state nor waves nor order matter."""
    torch.manual_seed(1)
    reference = tiny.after(2, "fedavg", Jittered)
    state = torch.get_rng_state()
    for options in ({"wave": 1}, {"engine": "loop"}, {"wave": 3}):
        tiny.close(tiny.after(2, "fedavg", Jittered, **options), reference)
    assert torch.equal(torch.get_rng_state(), state)  # and the user's generator is left as it was
    assert not torch.equal(tiny.after(2, "fedavg", Jittered, seed=1)["server.row"], reference["server.row"])


def test_batchnorm_without_running_statistics_is_refused(tiny):
    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))

    with pytest.raises(CoterieError, match="track_running_stats=True or use GroupNorm"):
        tiny.simulation(model=model)


# -- (d) sums over a split --------------------------------------------------------------------------------------------


def outputs(sim, client, row, split):
    module = sim.layout.load(copy.deepcopy(sim.init.module).double(), row).eval()
    x, y = sim.federation.client(client, split)
    return module(x), y


@pytest.mark.parametrize("model", ["mlp", "bn", "dropout"])
@pytest.mark.parametrize("wave", [512, 2])
def test_measure_is_the_module_in_evaluation_mode(tiny, model, wave):
    """Loss and accuracy of the whole split at once, whatever the evaluation batch."""
    sim = tiny.simulation(model=model)
    sim.engine.evaluation_batch = wave
    start = tiny.cohort(sim).train(tiny.rows(sim))
    found = tiny.cohort(sim).measure(start, "test")
    for client in range(4):
        scores, y = outputs(sim, client, start[client], "test")
        assert found["loss"][client].item() == pytest.approx(F.cross_entropy(scores, y).item(), rel=1e-12)
        assert found["accuracy"][client].item() == pytest.approx((scores.argmax(1) == y).double().mean().item())


def test_measure_of_several_models(tiny):
    sim = tiny.simulation()
    start = tiny.rows(sim, models=2)
    found = tiny.cohort(sim).loss(start, "train")
    for client in range(4):
        for k in range(2):
            scores, y = outputs(sim, client, start[client, k], "train")
            assert found[client, k].item() == pytest.approx(F.cross_entropy(scores, y).item(), rel=1e-12)


@pytest.mark.parametrize("models", [None, 2])
def test_clients_without_validation_data_use_their_training_data(tiny, models):
    """Client 2 has no validation sample: its loss is its training loss, the others' that on validation data."""
    sim = tiny.simulation()
    start, cohort = tiny.rows(sim, models=models), tiny.cohort(sim)
    found, train = cohort.loss(start, "val"), cohort.loss(start, "train")
    assert torch.equal(found[2], train[2])
    for client in (0, 1, 3):
        scores, y = outputs(sim, client, start[client] if models is None else start[client, 1], "val")
        value = found[client] if models is None else found[client, 1]
        assert value.item() == pytest.approx(F.cross_entropy(scores, y).item(), rel=1e-12)
    nobody = tiny.simulation(data=tiny.federation(val=(0,)))
    cohort = tiny.cohort(nobody)
    assert torch.equal(cohort.loss(start, "val"), cohort.loss(start, "train"))


def test_no_test_data_gives_nan_for_that_client_only(tiny):
    sim = tiny.simulation(data=tiny.federation(test=(3, 0, 2, 5)))
    found = tiny.cohort(sim).measure(tiny.rows(sim), "test")
    assert torch.isnan(found["loss"]).tolist() == [False, True, False, False]
    assert torch.isnan(found["accuracy"]).tolist() == [False, True, False, False]
    nobody = tiny.simulation(data=tiny.federation(test=(0,)))
    assert torch.isnan(tiny.cohort(nobody).measure(tiny.rows(sim, models=2), "test")["loss"]).all()


@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("model", ["mlp", "bn", "dropout"])
def test_full_gradient(tiny, model, engine):
    """The gradient of the mean loss over all samples in evaluation mode, from autograd on the module; 0 at buffers."""
    sim = tiny.simulation(model=model, engine=engine)
    sim.engine.evaluation_batch = 4  # several batches for the larger clients
    start = tiny.rows(sim)
    before = start.clone()
    found = tiny.cohort(sim).grad(start)
    assert torch.equal(start, before)
    for client in range(4):
        module = sim.layout.load(copy.deepcopy(sim.init.module).double(), start[client]).eval()
        x, y = sim.federation.client(client)
        F.cross_entropy(module(x), y).backward()
        for name, gradient in sim.layout.views(found[client]).items():
            known = dict(module.named_parameters())
            assert_close(gradient, known[name].grad if name in known else torch.zeros_like(gradient))


def test_gradient_of_an_objective_with_given(tiny):
    sim = tiny.simulation()
    start = tiny.rows(sim)
    strength = torch.tensor([0.0, 0.5, 1.0, 0.2], dtype=torch.float64)
    cohort = tiny.cohort(sim)
    found = cohort.grad(start, {"strength": strength}, ridge) - cohort.grad(start)
    weight = sim.layout.views(start)["0.weight"]
    assert_close(sim.layout.views(found)["0.weight"], 2 * strength[:, None, None] * weight)  # of s |W|^2
    assert sim.layout.cut(found, "2").abs().max() < 1e-12


def class_sums(net, row, batch, given):
    here = F.one_hot(batch.y, net.task.classes).to(batch.weight.dtype) * batch.weight[:, None]
    return {"count": here.sum(0), "sum": here.T @ net.features(row, batch.x)}


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_total_sums_a_dictionary_over_the_split(tiny, engine):
    """Counts and sums of features per class, against a loop over samples."""
    sim = tiny.simulation(engine=engine)
    sim.engine.evaluation_batch = 4
    start = tiny.rows(sim)
    found = tiny.cohort(sim).total(class_sums, start)
    assert torch.equal(found["count"], tiny.cohort(sim).histogram.double())
    for client in range(4):
        module = sim.layout.load(copy.deepcopy(sim.init.module).double(), start[client])
        x, y = sim.federation.client(client)
        expected = torch.zeros(3, 5, dtype=torch.float64)
        for one, label in zip(torch.tanh(module[0](x)), y):
            expected[label] += one.detach()
        assert_close(found["sum"][client], expected)


def test_sums_over_a_split_that_nobody_has_are_zero(tiny):
    """A lone client without validation data gives what it gives in company: zeros of the right shape."""
    sim = tiny.simulation()
    start = tiny.rows(sim)
    together, alone = tiny.cohort(sim), tiny.cohort(sim, ids=[2])
    for name, value in together.total(class_sums, start, split="val").items():
        assert not value[2].any()
        assert torch.equal(alone.total(class_sums, start[2:3], split="val")[name], value[2:3])
    assert torch.equal(alone.grad(start[2:3], split="val"), torch.zeros_like(start[2:3]))
    assert not together.grad(start, split="val")[2].any()


# -- (e) a method's own step ------------------------------------------------------------------------------------------


def plain(net, state, batch, given):
    return {"row": state.row - given.lr * net.grad(state.row, batch)}


@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("model", ["mlp", "dropout", "bn", "words"])
def test_a_plain_step_equals_train(tiny, model, engine):
    """`row - lr * gradient` as a method's own step is local SGD: same batches, same noise, same running statistics."""
    sim = tiny.simulation(model=model, engine=engine, epochs=2)
    start = tiny.rows(sim)
    one, two = tiny.cohort(sim), tiny.cohort(sim)
    assert_close(one.loop(plain, Model(start)).row, two.train(start))
    assert one.spent.tolist() == two.spent.tolist()


@dataclass(frozen=True)
class Two(Record):
    row: Tensor
    previous: Tensor


def remember(net, state, batch, given):
    return {"row": state.row - given.lr * net.grad(state.row, batch), "previous": state.row}


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_a_step_may_hand_on_its_old_state_under_another_name(tiny, engine):
    """After S steps `previous` is the row after S - 1 of them."""
    sim = tiny.simulation(engine=engine)
    start = tiny.rows(sim)
    found = tiny.cohort(sim).loop(remember, Two(start, torch.zeros_like(start)), steps=4)
    assert_close(found.row, tiny.cohort(sim).train(start, steps=4))
    assert_close(found.previous, tiny.cohort(sim).train(start, steps=3))


@dataclass(frozen=True)
class Seen(Record):
    sums: Tensor  # [C, streams, features]


def watch(net, state, batches, given):
    return {"sums": state.sums + torch.stack([(b.x * b.weight[:, None]).sum(0) for b in batches])}


def test_three_streams_are_three_batches_and_the_first_is_trains(tiny):
    """After one step the sums are those of the first batch of streams 0, 1, 2, from the definition of the streams."""
    sim = tiny.simulation()
    empty = Seen(torch.zeros(4, 3, tiny.FEATURES, dtype=torch.float64))
    found = tiny.cohort(sim).loop(watch, empty, steps=1, streams=3).sums
    x, _ = sim.federation.client(1)
    for number in range(3):
        first = tiny.batches(tiny.stream(sim, 1, number=number), 12, 3, 1)[0]
        assert_close(found[1, number], x[first].sum(0))
    assert len({tuple(t.tolist()) for t in found[1]}) == 3
    whole = tiny.cohort(sim).loop(watch, empty, streams=3).sums  # one epoch: every stream saw every sample once
    assert_close(whole[1], x.sum(0).expand(3, -1))


def noise(net, state, batches, given):
    drawn = []
    for batch in batches:
        with net.noise(batch.key):
            drawn.append(net.uniform((2,)))
    return {"sums": torch.stack(drawn)}


def test_streams_have_noise_of_their_own(tiny):
    sim = tiny.simulation()
    empty = Seen(torch.zeros(4, 3, 2, dtype=torch.float32))
    drawn = tiny.cohort(sim).loop(noise, empty, steps=1, streams=3).sums
    assert len({tuple(t.tolist()) for t in drawn.flatten(0, 1)}) == 12  # 4 clients times 3 streams, all different


@dataclass(frozen=True)
class Counts(Record):
    samples: Tensor
    passes: Tensor


def tally(net, state, batch, given):
    return {"samples": state.samples + batch.weight.sum(), "passes": state.passes + batch.weight.sum() / given.n}


def test_a_fraction_uses_that_many_samples(tiny):
    """ceil(f n) samples: half of 7, 12, 1, 5 are 4, 6, 1, 3."""
    sim = tiny.simulation()
    zero = torch.zeros(4, dtype=torch.float64)
    cohort = tiny.cohort(sim)
    found = cohort.loop(tally, Counts(zero, zero), {"n": cohort.n.double()}, fraction=0.5)
    assert found.samples.tolist() == [4, 6, 1, 3]
    assert cohort.spent.tolist() == [2, 2, 1, 1]  # batches of 3


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_until_drops_the_clients_that_are_done(tiny, engine):
    """Client i is done after i + 1 passes, at most three: it has seen (i + 1) n_i samples and taken no other steps."""
    sim = tiny.simulation(engine=engine)
    cohort = tiny.cohort(sim)
    zero = torch.zeros(4, dtype=torch.float64)
    wanted = torch.tensor([1.0, 2.0, 3.0, 9.0], dtype=torch.float64)

    def done(state):
        return state.passes > state.samples.new_tensor(0.999) * state.wanted

    @dataclass(frozen=True)
    class Goal(Counts):
        wanted: Tensor

    def step(net, state, batch, given):
        return {**tally(net, state, batch, given), "wanted": state.wanted}

    found = cohort.loop(step, Goal(zero, zero, wanted), {"n": cohort.n.double()}, epochs=3, until=done)
    assert found.samples.tolist() == [7, 24, 3, 15]
    assert cohort.spent.tolist() == [3, 8, 3, 6]


def never(state):
    return torch.zeros(len(state.row), dtype=torch.bool)


@pytest.mark.parametrize("pace", [None, np.array([0.5, 1.0, 0.01, 0.34])])
@pytest.mark.parametrize("model", ["mlp", "dropout", "bn"])
def test_until_never_is_no_until(tiny, model, pace):
    """Asking after each pass changes nothing: same batches, same noise in later passes, same partial work."""
    sim = tiny.simulation(model=model, epochs=3)
    start = tiny.rows(sim)
    asked, plainly = tiny.cohort(sim, pace=pace), tiny.cohort(sim, pace=pace)
    assert_close(asked.loop(plain, Model(start), until=never).row, plainly.loop(plain, Model(start)).row)
    assert asked.spent.tolist() == plainly.spent.tolist()


def test_a_step_must_return_its_state(tiny):
    sim = tiny.simulation()
    with pytest.raises(CoterieError, match="must return the state"):
        tiny.cohort(sim).loop(lambda net, s, b, g: {"other": s.row}, Model(tiny.rows(sim)))


def test_a_step_that_closes_over_a_tensor_is_refused(tiny):
    sim = tiny.simulation()
    start = tiny.rows(sim)
    with pytest.raises(CoterieError, match="closes over a tensor"):
        tiny.cohort(sim).loop(lambda net, s, b, g: {"row": s.row + start[0]}, Model(start))
    with pytest.raises(CoterieError, match="closes over a tensor"):
        tiny.cohort(sim).train(start, correct=lambda g, row, given: g + start[0, 0])
    with pytest.raises(CoterieError, match="closes over a tensor"):
        tiny.cohort(sim).grad(start, objective=lambda net, row, b, g: start.sum())


# -- the net ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Scores by the transposed embedding, the way language models do; the head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 4), nn.Linear(4, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(x)


class Deep(nn.Module):
    """A head of two layers, declared."""

    parts = {"head": "classifier"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.classifier = nn.Sequential(nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.classifier(self.body(x))


@pytest.mark.parametrize("model", ["mlp", "linear", Tied, Deep])
def test_head_after_features_is_the_module(tiny, model):
    """net.head(row, net.features(row, x)) == net(row, x) for any row, also for tied, deep and bare heads."""
    sim = tiny.simulation(model=model)
    x, _ = sim.federation.client(1)
    row, net = tiny.rows(sim)[1], sim.engine.net
    net.mode(training=False)
    expected = sim.layout.load(copy.deepcopy(sim.init.module).double(), row)(x)
    assert_close(net(row, x), expected)
    assert_close(net.head(row, net.features(row, x)), expected)
    if model is Deep:
        assert_close(net.features(row, x), sim.layout.load(copy.deepcopy(sim.init.module).double(), row).body(x))


def teach(net, row, batch, given):
    """Follow a teacher: its forward pass runs in training mode too."""
    return batch.mean((net(row, batch.x) - net(given.teacher, batch.x).detach()).square().mean(1))


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_a_forward_pass_leaves_the_statistics_of_other_rows_alone(tiny, engine):
    """A teacher's row in `given` is only read: two epochs equal two calls of one epoch on the same teacher."""
    sim = tiny.simulation(model="bn", engine=engine, data=tiny.federation(sizes=(6, 12)))
    start, teacher = tiny.rows(sim)[:2], tiny.rows(sim, seed=3)[:2]
    before = teacher.clone()
    found = tiny.cohort(sim).train(start, {"teacher": teacher}, objective=teach, epochs=1)
    assert torch.equal(teacher, before)
    assert torch.isfinite(found).all()
    other = tiny.simulation(model="bn", engine="loop" if engine == "stack" else "stack", data=sim.federation)
    assert_close(found, tiny.cohort(other).train(start, {"teacher": teacher}, objective=teach, epochs=1))


# -- bounded steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_clip_bounds_the_length_of_a_step(tiny, engine):
    """One full-batch step moves by lr * min(|g|, clip) along the gradient, whose length plain training shows.

    As in PyTorch's clip_grad_norm_, a gradient that is too long is divided by |g| + 1e-6.
    """
    sim = tiny.simulation(batch=0, engine=engine)
    start = tiny.rows(sim)
    cohort = tiny.cohort(sim)
    gradient = (start - cohort.train(start)) / sim.training.lr
    lengths = gradient.norm(dim=1)
    clip = float(lengths.median())  # some are longer, some shorter
    moved = (start - cohort.train(start, clip=clip)) / sim.training.lr
    expected = gradient * (clip / (lengths + 1e-6)).clamp(max=1)[:, None]
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-9)
    assert (lengths > clip).any()


def test_batchnorm_part_is_every_tensor_of_such_layers(tiny):
    names = [entry.name for entry in tiny.simulation(model="bn").layout.within("batchnorm")]
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert sorted(names) == sorted(f"1.{name}" for name in tensors)
    assert tiny.simulation().layout.within("batchnorm") == ()


@pytest.mark.parametrize("model", ["mlp", "bn"])
def test_clients_may_have_learning_rates_of_their_own(tiny, model):
    """One rate a client, in plain training of two models each and in a step: each client as with its rate alone."""
    sim = tiny.simulation("fedavg", model)
    cohort, start, rates = tiny.cohort(sim), tiny.rows(sim, models=2), torch.tensor([0.3, 0.01, 0.2, 0.07])
    effort = cohort.effort(None, None, "train")

    def step(net, s, batch, given):
        return {"row": s.row - given.lr * net.grad(s.row, batch)}

    trained, _, _ = sim.engine.train(np.arange(4), start, {}, effort, rates)
    moved, _ = sim.engine.loop(np.arange(4), step, {"row": start[:, 0]}, {}, effort, rates)
    for client, rate in enumerate(rates.tolist()):
        alone = tiny.cohort(sim, [client])
        assert_close(trained[client], alone.train(start[[client]], lr=rate)[0])
        assert_close(moved["row"][client], alone.loop(step, {"row": start[[client], 0]}, lr=rate)["row"][0])
