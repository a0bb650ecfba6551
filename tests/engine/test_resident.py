"""How training is fed: class weights, label smoothing and augmentation, on every path of every engine."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from coterie import registry, streams
from coterie.data import Federation
from coterie.data.augment import Augment
from coterie.engine.programs import Direct

EXACT = {"rtol": 1e-10, "atol": 1e-10}
METHODS = sorted(registry.methods())
SHAPE = (2, 4, 5)
ENGINES = ["stack", "loop", "direct", "reference"]


def chain():
    return nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.ReLU(), nn.Linear(6, 3))


def convolved():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.Dropout(0.3), nn.Linear(6, 3))


def normed():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(18, 3))


def pictures(sizes=(7, 12, 1, 5), seed=0):
    """Clients with images; the labels of client i lean on i."""
    generator = torch.Generator().manual_seed(seed)

    def pairs(counts):
        return [(torch.randn(n, *SHAPE, generator=generator, dtype=torch.float64),
                 (torch.randint(0, 3, (n,), generator=generator) * (torch.arange(n) % 3 > 0) + i) % 3)
                for i, n in enumerate(counts)]

    return Federation.from_splits(pairs(sizes), pairs((3, 4, 2, 5)), pairs((2, 3, 0, 1)), classes=3)


def class_weights(sim, client):
    """scikit-learn's, for all three classes; those that the client does not hold never meet a sample."""
    labels = sim.federation.client(client, "train")[1].numpy()
    held = np.unique(labels)
    found = torch.zeros(3, dtype=torch.float64)
    found[torch.from_numpy(held)] = torch.from_numpy(compute_class_weight("balanced", classes=held, y=labels))
    return found


# -- class weights and label smoothing against PyTorch's own ----------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [chain, convolved])
def test_class_weights_are_those_of_pytorch_divided_by_the_number_of_samples(tiny, engine, build):
    """(1/B) sum_b w_{y_b} l_b, with PyTorch's `weight` and scikit-learn's weights of each client's own labels."""
    sim = tiny.simulation(model=build, data=pictures(), engine=engine, epochs=2, class_weights="balanced")
    start = tiny.rows(sim)
    found, losses = tiny.cohort(sim).train_watched(start)
    for client, n in enumerate(tiny.SIZES):
        weight = class_weights(sim, client)

        def weighted(module, x, y, weight=weight):
            return F.cross_entropy(module(x), y, weight=weight, reduction="sum") / len(y)

        expected, history = tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3, 2), objective=weighted)
        torch.testing.assert_close(found[client], expected, **EXACT)
        last = history[len(history) // 2 :]
        mean = sum(loss * count for loss, count in last) / sum(count for _, count in last)
        assert losses[client].item() == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weighed", [False, True])
def test_label_smoothing_is_that_of_pytorch(tiny, engine, weighed):
    """With class weights a sample's smoothed loss counts w_y times, y being its label."""
    options = {"class_weights": "balanced"} if weighed else {}
    sim = tiny.simulation(model=chain, data=pictures(), engine=engine, epochs=2, label_smoothing=0.3, **options)
    start = tiny.rows(sim)
    found, losses = tiny.cohort(sim).train_watched(start)
    for client, n in enumerate(tiny.SIZES):
        weight = class_weights(sim, client) if weighed else torch.ones(3, dtype=torch.float64)

        def smoothed(module, x, y, weight=weight):
            return (weight[y] * F.cross_entropy(module(x), y, label_smoothing=0.3, reduction="none")).mean()

        expected, history = tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3, 2), objective=smoothed)
        torch.testing.assert_close(found[client], expected, **EXACT)
        last = history[len(history) // 2 :]
        mean = sum(loss * count for loss, count in last) / sum(count for _, count in last)
        assert losses[client].item() == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_by_hand(tiny, engine):
    """Labels 0 0 0 1, all scores 0, one full batch: p = 1/3, so the bias moves by -lr (1/4) sum_b w_b (p - t_b).

    w_0 = 4 / (2 * 3) = 2/3 and w_1 = 4 / (2 * 1) = 2; smoothing 0.3 makes t = 0.7 onehot + 0.1.
    """
    data = Federation.from_splits([(torch.zeros(4, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 0]))], classes=3)
    sim = tiny.simulation(model="linear", data=data, engine=engine, batch=0, lr=1.0, class_weights="balanced",
                          label_smoothing=0.3)
    moved = sim.layout.views(tiny.cohort(sim).train(torch.zeros(1, sim.layout.size, dtype=torch.float64)))["bias"][0]
    one, other = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([0.1, 0.8, 0.1])
    expected = -(3 * (2 / 3) * (1 / 3 - one) + 2 * (1 / 3 - other)) / 4
    torch.testing.assert_close(moved, expected.double(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_are_neither_weighted_nor_smoothed_and_gradients_are_those_of_training(tiny, engine):
    """`loss` compares models on the samples as they are; `grad` is the slope of what is trained, over all samples."""
    sim = tiny.simulation(model=chain, data=pictures(), engine=engine, class_weights="balanced", label_smoothing=0.2,
                          augment="flip+crop(pad=1)")
    rows, cohort = tiny.rows(sim), tiny.cohort(sim)
    losses, gradients = cohort.loss(rows), cohort.grad(rows)
    sim.engine.evaluation_batch = 4  # several batches a client
    torch.testing.assert_close(cohort.grad(rows), gradients, **EXACT)
    for client in range(4):
        x, y = sim.federation.client(client, "train")
        module = sim.layout.load(chain().double(), rows[client])
        assert losses[client].item() == pytest.approx(F.cross_entropy(module(x), y).item(), rel=1e-12)
        each = F.cross_entropy(module(x), y, label_smoothing=0.2, reduction="none")
        (class_weights(sim, client)[y] * each).mean().backward()
        expected = torch.cat([p.grad.flatten() for p in module.parameters()])
        torch.testing.assert_close(gradients[client], expected, **EXACT)


def test_hooks_bounds_and_copies_of_a_chain_are_those_of_the_stack(tiny):
    """With `correct` or `clip` the chain's gradient is not the step, and K models share a client's samples."""
    found = []
    for engine in ("direct", "stack", "reference"):
        sim = tiny.simulation(model=chain, data=pictures(), engine=engine, class_weights="balanced",
                              label_smoothing=0.1, augment="flip+crop(pad=2)")
        start, cohort = tiny.rows(sim, 2), tiny.cohort(sim)
        found.append([cohort.train(start, clip=0.05), cohort.train(start, distinct=True, epochs=2),
                      cohort.train(start, {"pull": start[:, 0]}, correct=lambda g, v, near: g + v - near.pull)])
    torch.testing.assert_close(found[0], found[1], **EXACT)
    torch.testing.assert_close(found[0], found[2], **EXACT)


# -- augmentation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [chain, convolved])
def test_training_sees_the_images_of_the_steps_key(tiny, engine, build):
    """torch.optim.SGD on images changed by the draws of key(client's stream, step), batch after batch."""
    sim = tiny.simulation(model=build, data=pictures(), engine=engine, epochs=2, augment="flip+crop(pad=1)")
    start, augment = tiny.rows(sim), Augment.of("flip+crop(pad=1)")
    found, plain = tiny.cohort(sim).train(start), tiny.simulation(model=build, data=pictures(), engine=engine, epochs=2)
    for client, n in enumerate(tiny.SIZES):
        key, step = tiny.stream(sim, client), iter(range(100))

        def changed(module, x, y, key=key, step=step):
            return F.cross_entropy(module(augment(x, streams.key(key, next(step)))), y)

        expected, _ = tiny.sgd(sim, client, start[client], tiny.steps_of(n, 3, 2), objective=changed)
        torch.testing.assert_close(found[client], expected, **EXACT)
    assert (found - tiny.cohort(plain).train(start)).abs().max() > 1e-3


def looking(net, s, batches, given):
    """Writes down the images of every step; nothing is computed with them."""
    one, other = batches
    now = (torch.arange(s.seen.shape[0], device=s.seen.device) == s.step)[:, None, None, None, None, None]
    shown = torch.stack([one.x, other.x])
    return {"seen": torch.where(now, shown, s.seen), "step": s.step + 1}


def seen_images(tiny, **options):
    """`[clients, steps, streams, B, *SHAPE]`: what a loop of two passes and two streams sees; 0 where nobody trains."""
    sim = tiny.simulation(model=options.pop("model", dropping), data=pictures((6, 12, 3, 9)),
                          augment="flip+crop(pad=1)", **options)
    found = []
    for wave in np.array_split(np.arange(4), -(-4 // (sim.wave or 4))):
        state = {"seen": torch.zeros(len(wave), 8, 2, 3, *SHAPE, dtype=torch.float64),
                 "step": torch.zeros(len(wave), dtype=torch.int64)}
        found.append(sim.cohort(wave).loop(looking, state, epochs=2, streams=2)["seen"])
    return torch.cat(found)


def test_stacked_looped_waved_and_plain_engines_see_the_same_bits(tiny):
    expected = seen_images(tiny, engine="stack")
    assert expected[1].any(dim=(2, 3, 4, 5)).all()  # the largest client trains in all 8 steps, in both streams
    for options in ({"engine": "loop"}, {"engine": "reference"}, {"engine": "stack", "wave": 1},
                    {"engine": "stack", "wave": 3}, {"engine": "stack", "model": normed}):
        assert torch.equal(seen_images(tiny, **options), expected), options
    assert not torch.equal(seen_images(tiny, engine="stack", seed=1), expected)


@pytest.mark.parametrize("build", [chain, convolved, dropping, normed])
def test_the_same_rows_however_clients_are_computed(tiny, build):
    """Incomplete batches, a client with one sample, stragglers, three rounds."""
    options = {"model": build, "data": pictures(), "stragglers": 0.5, "augment": "flip+crop(pad=1)",
               "class_weights": "balanced", "label_smoothing": 0.1, "method": "ditto"}
    expected = tiny.after(3, engine="stack", **options)
    for other in ({"engine": "loop"}, {"engine": "reference"}, {"engine": "auto"}, {"engine": "stack", "wave": 2}):
        torch.testing.assert_close(tiny.after(3, **options, **other), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", METHODS)
def test_every_method_is_fed_alike_on_every_engine(tiny, spec):
    """Whatever a method's objective or inner step averages over a batch: reference and stack, all options on."""
    options = {"model": dropping, "data": pictures((7, 12, 4, 5)), "augment": "flip+crop(pad=1)",
               "class_weights": "balanced", "label_smoothing": 0.1}
    found = [tiny.after(2, spec, engine=engine, **options) for engine in ("reference", "stack")]
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-8)
    assert all(t.isfinite().all() for t in found[1].values() if t.is_floating_point())


def test_joined_runs_see_what_they_see_alone(tiny):
    alone, together, stack = tiny.side_by_side(
        ["fedprox:mu=0.1", "fedprox:mu=1"], chain, data=pictures(), augment="flip+crop(pad=1)",
        class_weights="balanced", label_smoothing=0.1,
    )
    assert stack.joined
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("change", [{"augment": "flip"}, {"class_weights": "balanced"}, {"label_smoothing": 0.2}])
def test_runs_that_are_fed_differently_share_no_engine(tiny, change):
    first = tiny.simulation(model=chain, data=pictures())
    assert tiny.simulation(model=chain, data=pictures(), twin=first, seed=1).engine is first.engine
    assert tiny.simulation(model=chain, data=pictures(), twin=first, **change).engine is not first.engine


def test_samples_beyond_a_block_are_drawn_as_those_within(tiny, monkeypatch):
    """On a host the chain gathers many steps at once; blocks of one step give the same rows."""
    options = {"model": convolved, "data": pictures(), "engine": "direct", "augment": "flip+crop(pad=1)", "epochs": 3}
    expected = tiny.after(2, **options)
    monkeypatch.setattr(Direct, "BLOCK", 1)
    assert all(torch.equal(t, expected[name]) for name, t in tiny.after(2, **options).items())


def test_a_resumed_run_sees_the_same_images(tiny):
    """Draws hang on the round and the step, so a state after two rounds leads to that after four, bit for bit."""
    options = {"model": chain, "data": pictures(), "augment": "flip+crop(pad=1)", "class_weights": "balanced"}
    whole = tiny.simulation("ditto", **options)
    for _ in range(2):
        whole.round()
    resumed = tiny.simulation("ditto", **options, choices=whole.choices)
    resumed.restore(*whole.snapshot())
    for sim in (whole, resumed):
        sim.round()
        sim.round()
    assert all(torch.equal(t, tiny.state(resumed)[name]) for name, t in tiny.state(whole).items())


def test_scoring_sees_images_as_they_are(tiny):
    """Losses, accuracies and sums over a split do not depend on the augmentation."""
    found = []
    for augment in ("none", "flip+crop(pad=3)"):
        for engine in ENGINES:
            sim = tiny.simulation(model=chain, data=pictures(), engine=engine, augment=augment)
            cohort, rows = tiny.cohort(sim), tiny.rows(sim)
            total = cohort.total(lambda net, row, batch, given: (batch.x.flatten(1).sum(1) * batch.weight).sum(), rows)
            found.append([cohort.measure(rows, "test"), cohort.loss(rows), cohort.grad(rows), total])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, **EXACT)
