"""What training options mean and what they refuse, before anything is trained."""

import math

import pytest

from coterie.errors import CoterieError
from coterie.options import build
from coterie.running.training import Training


def test_the_learning_rate_rises_in_equal_steps_and_then_stays():
    """warmup=3: 1/4, 2/4 and 3/4 of lr, then lr."""
    training = Training(rounds=6, lr=0.8, warmup=3)
    assert [training.lr_at(t) for t in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8], rel=1e-15)


def test_a_schedules_clock_starts_after_the_warm_up():
    """After 2 rounds, decay^0, decay^1, ... and half a cosine over the remaining 4 rounds."""
    decay = Training(rounds=6, lr=1.0, warmup=2, schedule="decay", decay=0.5)
    assert [decay.lr_at(t) for t in range(6)] == pytest.approx([1 / 3, 2 / 3, 1, 0.5, 0.25, 0.125], rel=1e-15)
    cosine = Training(rounds=6, lr=1.0, warmup=2, schedule="cosine")
    half = [0.5 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    assert [cosine.lr_at(t) for t in range(6)] == pytest.approx([1 / 3, 2 / 3, *half], rel=1e-15)
    assert cosine.lr_at(6) == 1e-3  # as without a warm-up: never 0


def test_a_warm_up_of_all_rounds_is_one_that_never_ends_before_them():
    assert [Training(rounds=3, lr=1.0, warmup=3).lr_at(t) for t in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert Training(rounds=3, lr=1.0, warmup=3, schedule="cosine").lr_at(3) == 1.0


def test_clients_train_with_the_rounds_rate(tiny):
    """Plain SGD of one step: (start - end) / gradient is the rate, here 0.1 / 3 and then 0.2 / 3."""
    sim = tiny.simulation(batch=0, lr=0.1, warmup=2, rounds=5)
    assert [sim.at(t, sim.federation.seen).lr for t in range(3)] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    for round in range(2):
        cohort = sim.at(round, sim.federation.seen)
        rows = tiny.rows(sim)
        moved = (rows - cohort.train(rows)) / cohort.grad(rows)
        assert moved.mean().item() == pytest.approx(0.1 * (round + 1) / 3, rel=1e-9)


@pytest.mark.parametrize(("options", "said"), [
    ({"warmup": -1}, "warmup must be at least 0, not -1"),
    ({"warmup": 51}, "warmup must be at most the number of rounds, 50, not 51"),
    ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, not 1.0"),
    ({"label_smoothing": -0.1}, "label_smoothing must be at least 0 and below 1"),
    ({"class_weights": "balance"}, "did you mean 'balanced'"),
    ({"augment": "flop"}, "did you mean 'flip'"),
    ({"augment": "crop(pad=0)"}, "pad must be at least 1"),
    ({"smoothing": 0.1}, "label_smoothing"),
])
def test_what_cannot_be_is_a_sentence(options, said):
    with pytest.raises(CoterieError, match=said):
        build(Training, options, "training")


@pytest.mark.parametrize(("options", "fit", "said"), [
    ({"class_weights": "balanced"}, (0, (4,)), "class_weights=balanced is for classes, and this is a regression"),
    ({"label_smoothing": 0.1}, (0, (4,)), "label_smoothing=0.1 is for classes, and this is a regression"),
    ({"label_smoothing": 0.1}, (3, (4,), True), "is for the cross entropy, and the loss is your own"),
    ({"augment": "flip"}, (3, (4,)), r"these samples have shape \[4\]"),
    ({"augment": "crop"}, (3, (1, 4, 4)), "use a pad below 4"),
])
def test_what_does_not_fit_the_data_is_refused(options, fit, said):
    with pytest.raises(CoterieError, match=said):
        Training(**options).require(*fit)
    Training().require(*fit)


@pytest.mark.parametrize(("model", "options"), [
    ("regression", {"class_weights": "balanced"}), ("regression", {"label_smoothing": 0.1}),
    ("mlp", {"augment": "flip"}),
])
def test_a_run_refuses_before_its_first_round(tiny, model, options):
    with pytest.raises(CoterieError, match=r"use (class_weights|label_smoothing|augment)="):
        tiny.simulation(model=model, **options)


def test_class_weights_go_with_a_loss_of_ones_own(tiny):
    """They are the mean's, not the loss's: where every sample's loss is 1, a full batch has the mean of the weights."""
    sim = tiny.simulation(loss=lambda outputs, y: outputs[:, 0] * 0 + 1, class_weights="balanced", batch=0)
    _, running = tiny.cohort(sim).train_watched(tiny.rows(sim))
    assert running.tolist() == pytest.approx([1.0] * 4, rel=1e-12)
