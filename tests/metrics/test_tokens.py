"""Loss, accuracy, perplexity and n of a text, token by token, against a count by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from coterie import CoterieError, Federation, registry
from coterie.contract.layout import Layout
from coterie.contract.metric import tallied
from coterie.contract.net import Batch, Given, Net, Smoothed, Task, cross_entropy
from coterie.contract.tokens import IGNORED, counted
from coterie.metrics.tokens import Bits, Perplexity
from coterie.running.simulation import Simulation
from coterie.running.training import Training

# Three lines over the words 1, 2 and 3; 0 is padding. y is the next word.
X = torch.tensor([[1, 2, 3], [1, 1, 0], [2, 3, 0]])
Y = torch.tensor([[2, 3, IGNORED], [1, IGNORED, IGNORED], [3, 1, IGNORED]])
# What the model says of the next word, by the word it reads: of 1 that 2 follows with 1/2, 1 and 3 with 1/4 each;
# of 2 and of 3 that all three are alike.
SAID = {1: (1 / 4, 1 / 2, 1 / 4), 2: (1 / 3,) * 3, 3: (1 / 3,) * 3}


class Table(nn.Module):
    """A row of scores for each word."""

    def __init__(self):
        super().__init__()
        self.head = nn.Embedding(4, 4)
        table = torch.full((4, 4), -60.0)  # nothing is followed by padding
        for word, shares in SAID.items():
            table[word, 1:] = torch.tensor(shares).log()
        self.head.weight = nn.Parameter(table)

    def forward(self, x):
        return self.head(x)


def outputs():
    return Table()(X).detach().double()


# By hand: 1 -> 2 costs log 2, 2 -> 3 log 3, 1 -> 1 log 4, 2 -> 3 log 3, 3 -> 1 log 3: five tokens in all.
COSTS = ([math.log(2), math.log(3)], [math.log(4)], [math.log(3), math.log(3)])
MEAN = sum(sum(line) for line in COSTS) / 5


def test_the_loss_of_a_text_is_the_mean_of_its_tokens_and_a_batch_weighs_them_by_tokens():
    each = cross_entropy(outputs(), Y)
    assert counted(Y).tolist() == [2, 1, 2]
    assert each.tolist() == pytest.approx([sum(line) / len(line) for line in COSTS], abs=1e-9)
    batch = Batch(X, Y, counted(Y).double(), torch.tensor(0))
    assert float(batch.mean(each)) == pytest.approx(MEAN, abs=1e-9)
    assert pytest.approx(float(each.mean()), abs=1e-3) != MEAN  # a mean over texts would be another number


def test_perplexity_bits_and_accuracy_count_tokens():
    tallies = [registry.metric(name) for name in ("perplexity", "bits", "nll", "accuracy", "recall")]
    found = tallied(tallies, outputs(), Y, torch.ones(3))
    assert found["nll.samples"] == 5
    assert set(found) >= {"nll.cost", "nll.samples", "accuracy.right"}  # of three metrics one sum is taken
    sums = {"cost": found["nll.cost"], "samples": found["nll.samples"]}
    product = 2 * 3 * 4 * 3 * 3  # of 1 / probability, over the five tokens
    assert float(Perplexity().value(sums)) == pytest.approx(product ** (1 / 5), rel=1e-7)
    assert float(Bits().value(sums)) == pytest.approx(math.log2(product) / 5, rel=1e-7)
    # Answers: after 1 it is 2 (right once, wrong once); of three alike the first, 1 (right after 3, wrong after 2).
    assert float(found["accuracy.right"]) == 2
    assert float(found["accuracy.samples"]) == 5


def test_a_text_that_is_padding_and_an_ignored_token_count_nowhere():
    weight = torch.tensor([1.0, 0.0, 1.0])
    found = tallied([Perplexity()], outputs(), Y, weight)
    assert float(found["nll.samples"]) == 4
    assert float(found["nll.cost"]) == pytest.approx(sum(COSTS[0]) + sum(COSTS[2]), abs=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_tokens_have_no_gradient(smoothing):
    said = outputs().requires_grad_()
    loss = Smoothed(smoothing)(said, Y)
    loss.sum().backward()
    slope = said.grad.abs().sum(-1)
    assert bool((slope[Y == IGNORED] == 0).all())
    assert bool((slope[Y != IGNORED] > 0).all())


def test_label_smoothing_is_that_of_each_token():
    """(1 - s) times the loss, plus s times the mean of -log p over all words, averaged over a text's tokens."""
    log = outputs().log_softmax(-1)
    uniform = -log.mean(-1)
    there = Y != IGNORED
    each = 0.9 * torch.nn.functional.nll_loss(log.flatten(0, 1), Y.flatten(), reduction="none").view(Y.shape)
    by_hand = ((each + 0.1 * uniform) * there).sum(1) / there.sum(1)
    torch.testing.assert_close(Smoothed(0.1)(outputs(), Y), by_hand)


def federation(**more):
    """Two clients: the first holds the three lines in every split, the second two lines of very unlike length."""
    long = torch.arange(1, 61)[None] % 3 + 1
    x = torch.zeros(2, 60, dtype=torch.int64)
    x[0], x[1, :2] = long, torch.tensor([1, 2])
    y = torch.full((2, 60), IGNORED)
    y[0, :59], y[1, 0] = long[0, 1:], 2
    wide = torch.nn.functional.pad(X, (0, 57)), torch.nn.functional.pad(Y, (0, 57), value=IGNORED)
    pairs = [wide, (x, y)]
    return Federation.from_splits(pairs, pairs, pairs, classes=4, names=["lines", "unlike"], **more)


def test_n_of_a_client_and_its_histogram_are_in_tokens():
    data = federation()
    assert data.sizes().tolist() == [3, 2]
    assert data.counted().tolist() == [5, 60]
    assert data.histogram()[0].tolist() == [0, 2, 1, 2]  # y of the lines: 2 3, 1, 3 1
    assert "65 tokens" in data.task or "195 tokens" in data.task


@pytest.mark.parametrize("engine", ["reference", "loop", "stack"])
def test_scores_of_a_run_are_those_counted_by_hand(engine):
    """A text of one token to predict beside one of 59: the client's loss is the mean over its 60 tokens."""
    options = {"rounds": 0, "device": "cpu", "precision": "float64", "engine": engine}
    training = Training(**options, metric="perplexity", watch=("bits",))
    simulation = Simulation(registry.method("fedavg"), Table, federation(), training)
    scores = simulation.evaluate().stages["served"]
    assert scores.samples.tolist() == [5, 60]
    words = (torch.arange(1, 61) % 3 + 1).tolist()
    costs = [-math.log(SAID[a][b - 1]) for a, b in pairwise(words)] + [-math.log(SAID[1][1])]
    means = np.array([MEAN, sum(costs) / 60])
    np.testing.assert_allclose(scores.test["loss"], means, atol=1e-7)
    np.testing.assert_allclose(scores.test["perplexity"], np.exp(means), rtol=1e-7)
    np.testing.assert_allclose(scores.test["bits"], means / math.log(2), rtol=1e-6)
    assert scores.test["accuracy"][0] == pytest.approx(2 / 5)


def test_fedavg_weighs_clients_by_their_tokens():
    """One full-batch step from the common model: the merged model is one step on the pooled mean over all 65 tokens."""
    training = Training(rounds=1, batch=0, epochs=1, lr=0.5, device="cpu", precision="float64")
    data = federation()
    simulation = Simulation(registry.method("fedavg"), Table, data, training)
    start = simulation.server.state.row.clone()
    simulation.round()
    module = Table().double()
    layout = Layout.of(module)
    layout.load(module, start)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(2):
        x, y = data.client(i)
        said = module(x)
        total = total + torch.nn.functional.cross_entropy(said.flatten(0, 1), y.flatten(), reduction="sum")
    (total / 65).backward()
    expected = start - 0.5 * module.head.weight.grad.flatten()
    torch.testing.assert_close(simulation.server.state.row, expected, rtol=0, atol=1e-12)


def test_what_cannot_be_is_refused_in_a_sentence():
    pair = (X, Y)
    with pytest.raises(CoterieError, match="of classes a token say how many there are, classes="):
        Federation.from_clients([pair, pair])
    with pytest.raises(CoterieError, match="has label 3 but 3 classes means 0 to 2, or -100 for a token without"):
        Federation.from_clients([pair, pair], classes=3)
    with pytest.raises(CoterieError, match="a sample with no token to predict"):
        Federation.from_splits([(X, torch.full_like(Y, IGNORED))], classes=4)
    with pytest.raises(CoterieError, match="class_weights=balanced weighs samples by their class"):
        Simulation(registry.method("fedavg"), Table, federation(), Training(class_weights="balanced", device="cpu"))
    with pytest.raises(CoterieError, match="fedpac looks at the features or the class of a whole sample"):
        Simulation(registry.method("fedpac"), Table, federation(), Training(device="cpu"))

    class One(Table):
        def forward(self, x):
            return super().forward(x)[:, 0]

    with pytest.raises(CoterieError, match=r"4 classes a token, so .* was expected; --model causal"):
        Simulation(registry.method("fedavg"), One, federation(), Training(device="cpu"))


def test_a_net_without_a_counted_token_has_no_gradient():
    net = Net(Table(), Layout.of(Table()), Task.of(4))
    empty = torch.full((1, 3), IGNORED)
    row = torch.linspace(-1, 1, 16)
    batch = Batch(X[:1], empty, counted(empty).float(), torch.tensor(0))
    assert float(net.grad(row, batch, None, Given()).abs().max()) == 0
