"""What is trained and what is scored, and what people call it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.contract.layout import Layout
from coterie.contract.net import Batch, Net, Smoothed, Task
from coterie.errors import CoterieError

OUTPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1, 1, 2, 0])


def huber(outputs, y):
    return F.smooth_l1_loss(outputs[:, 0], y.to(outputs), reduction="none")


@pytest.mark.parametrize(("classes", "loss", "name"), [
    (4, None, "cross entropy"), (0, None, "squared error"), (0, huber, "huber"), (4, huber, "huber"),
    (0, nn.HuberLoss(reduction="none"), "HuberLoss"), (0, lambda outputs, y: outputs[:, 0], "own loss"),
])
def test_a_loss_is_called_by_its_name(classes, loss, name):
    task = Task.of(classes, loss)
    assert (task.name, task.loss) == (name, task.scored)


def test_smoothed_labels_are_trained_and_labels_as_they_are_scored():
    """By hand: -(1 - s) log p_y - (s / C) sum_c log p_c; what is scored stays the cross entropy."""
    task, logs = Task.of(4, smoothing=0.2), OUTPUTS.log_softmax(1)
    expected = -0.8 * logs[torch.arange(6), LABELS] - 0.2 / 4 * logs.sum(1)
    torch.testing.assert_close(task.loss(OUTPUTS, LABELS), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(task.scored(OUTPUTS, LABELS), -logs[torch.arange(6), LABELS], rtol=1e-12, atol=1e-12)
    assert task.name == "cross entropy"
    assert task.loss == Smoothed(0.2)


def test_a_batchs_mean_is_over_its_samples_and_not_over_their_worths():
    """(2 * 1 + 0.5 * 3) / 2 = 1.75: padding counts nothing, and the worths' sum of 2.5 divides nothing."""
    values, weight = torch.tensor([1.0, 3.0, 7.0]), torch.tensor([1.0, 1.0, 0.0])
    batch = Batch(values, values, weight, torch.tensor(0), torch.tensor([2.0, 0.5, 9.0]))
    assert batch.mean(values).item() == 1.75
    assert batch._replace(worth=None).mean(values).item() == 2.0


def test_means_of_batches_average_to_the_mean_of_all_samples():
    """So a step is unbiased: over equal batches, the mean of (1/B) sum w l is (1/n) sum w l."""
    generator = torch.Generator().manual_seed(1)
    values, worth = (torch.rand(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    ones, key = torch.ones(4, dtype=torch.float64), torch.tensor(0)
    parts = [Batch(v, v, ones, key, w).mean(v) for v, w in zip(values, worth, strict=True)]
    assert torch.stack(parts).mean().item() == pytest.approx((values * worth).mean().item(), rel=1e-12)


@pytest.mark.parametrize(("loss", "said"), [
    (F.cross_entropy, r"the loss cross_entropy gives shape \(\) for 2 samples; it must give one number for each"),
    (lambda outputs, y: outputs - y[:, None], r"gives shape \(2, 3\) for 2 samples"),
    (lambda outputs, y: 0.0, "gives a float for 2 samples"),
    (huber.__get__(1), r"the loss huber cannot take outputs \(2, 3\) and labels \(2,\) .torch.int64.: TypeError: "),
])
def test_a_loss_that_gives_no_number_for_each_sample_is_refused(loss, said):
    """A mean over the batch would count incomplete batches, class weights and scores wrongly."""
    module = nn.Linear(4, 3)
    net = Net(module, Layout.of(module), Task.of(3, loss))
    with pytest.raises(CoterieError, match=said):
        net.probe(net.layout.row(module, torch.float32), torch.zeros(2, 4), torch.tensor([0, 2]))
