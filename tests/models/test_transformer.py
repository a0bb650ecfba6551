"""The causal transformer and the encoder: what a token sees, and that padding is nobody's business."""

import pytest
import torch

from coterie import CoterieError, Federation, models, registry
from coterie.contract.tokens import IGNORED
from coterie.models.lora import adapted
from coterie.running.simulation import Simulation
from coterie.running.training import Training

WORDS, LENGTH = 11, 9
OPTIONS = {"layers": 2, "width": 8, "heads": 2}


def built(name, length=LENGTH, outputs=WORDS, **options):
    torch.manual_seed(3)
    return models.model(name, (length,), outputs, **{**OPTIONS, **options})().double().eval()


def test_a_token_sees_what_stands_up_to_it_and_nothing_behind():
    net = built("causal")
    x = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    other = x.clone()
    other[0, 5:] = torch.tensor([9, 9, 9, 9])
    there, here = net(x), net(other)
    assert there.shape == (1, LENGTH, WORDS)
    torch.testing.assert_close(there[:, :5], here[:, :5], rtol=0, atol=1e-14)
    assert float((there[:, 5:] - here[:, 5:]).abs().amin(-1).amin()) > 0
    before = x.clone()
    before[0, 0] = 9
    assert float((net(before) - there).abs().amax(-1).amin()) > 0  # every later token sees the first


@pytest.mark.parametrize("name", ["causal", "encoder"])
def test_padding_changes_no_output(name):
    net = built(name, vocabulary=WORDS)
    short = torch.tensor([[4, 2, 7]])
    padded = torch.nn.functional.pad(short, (0, LENGTH - 3))
    one, other = net(short), net(padded)
    torch.testing.assert_close(one, other[:, :3] if name == "causal" else other, rtol=0, atol=1e-13)
    assert torch.isfinite(net(torch.zeros(2, LENGTH, dtype=torch.int64))).all()  # padding alone


def test_the_encoder_answers_from_the_mean_over_the_text_alone():
    net = built("encoder", outputs=3, vocabulary=WORDS)
    x = torch.tensor([[4, 2, 7, 0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(net(x), net.head(net.base(x)[:, :3].mean(1)), rtol=0, atol=1e-13)
    each = built("encoder", outputs=3, vocabulary=WORDS, tokens=True)(x)
    assert each.shape == (1, LENGTH, 3)
    masked = built("encoder", outputs=WORDS + 1, vocabulary=WORDS, tokens=True)  # the mask is behind the last word
    assert masked(torch.full((1, LENGTH), WORDS)).shape == (1, LENGTH, WORDS + 1)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(CoterieError, match=r"texts of at most length=4 tokens, and those of the data have 9"):
        models.model("causal", (9,), WORDS, length=4)
    with pytest.raises(CoterieError, match="a multiple of its heads, got width=8, heads=3"):
        models.model("causal", (9,), WORDS, width=8, heads=3)
    with pytest.raises(CoterieError, match="layers must be at least 1"):
        models.model("encoder", (9,), WORDS, layers=0)
    with pytest.raises(CoterieError, match="dropout must be a share"):
        models.model("causal", (9,), WORDS, dropout=1.0)
    longer = models.model("causal", (9,), WORDS, length=20, **OPTIONS)()
    assert longer(torch.ones(1, 9, dtype=torch.int64)).shape == (1, 9, WORDS)


# -- in a federation ---------------------------------------------------------------------------------------------------


def texts(n, seed, lengths):
    """Made-up texts of unlike length, each token's target the next one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, WORDS, (n, LENGTH + 1), generator=generator)
    for k in range(n):
        x[k, lengths[k % len(lengths)] :] = 0
    y = x[:, 1:].clone()
    y[y == 0] = IGNORED
    return x[:, :-1], y


def federation(order=(0, 1, 2, 3)):
    sizes, pairs = (7, 3, 5, 2), []
    for i, n in enumerate(sizes):
        pairs.append([texts(k, 10 * i + s, (2, 10, 5, 7)) for s, k in enumerate((n, 4, 3))])
    splits = [[pairs[i][s] for i in order] for s in range(3)]
    return Federation.from_splits(*splits, classes=WORDS, names=[f"c{i}" for i in order])


def rows(spec="fedavg", order=(0, 1, 2, 3), dropout=0.1, **options):
    """Rows in the order of names, and scores, after two rounds with adapters on q and v."""
    data = federation(order)
    build = models.model("causal", (LENGTH,), WORDS, **OPTIONS, dropout=dropout)
    training = Training(rounds=2, batch=2, lr=0.2, device="cpu", precision="float64", metric="perplexity", **options)
    simulation = Simulation(registry.method(spec), adapted(build, "lora:rank=2,targets=q+v"), data, training)
    for _ in range(2):
        simulation.round()
    back = torch.tensor(order).argsort()
    found = torch.stack([simulation.row(i) for i in range(4)])[back]
    return found, torch.from_numpy(simulation.evaluate().stages["served"].test["perplexity"])[back]


@pytest.mark.parametrize("spec", ["fedavg", "fedper:personal=*.B+head", "ditto"])
def test_stacked_looped_read_plainly_and_in_another_order_it_is_the_same_run(spec):
    expected = rows(spec, engine="reference")
    for other in (rows(spec, engine="stack"), rows(spec, engine="loop"), rows(spec, engine="stack", wave=2),
                  rows(spec, order=(2, 0, 3, 1), engine="stack")):
        for one, two in zip(expected, other):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


def test_texts_of_about_the_same_length_are_scored_together_and_the_scores_are_the_same():
    """In batches of 2, sorted by length, the shortest texts of the four clients are cut; nothing else changes."""
    data = federation()
    training = Training(rounds=1, batch=2, lr=0.2, device="cpu", precision="float64", engine="stack")
    build = models.model("causal", (LENGTH,), WORDS, **OPTIONS)
    found = []
    for cut in (True, False):
        simulation = Simulation(registry.method("fedavg"), build, data, training)
        engine = simulation.engine
        engine.evaluation_batch = 2
        if not cut:
            engine.lengths = None
        widths = []
        module, forward = engine.net.module, engine.net.module.forward
        module.forward = lambda x, forward=forward, widths=widths: widths.append(x.shape[-1]) or forward(x)
        found.append(simulation.evaluate().stages["served"].test["loss"])
        module.forward = forward
        assert (min(widths) < LENGTH) is cut
    torch.testing.assert_close(*map(torch.from_numpy, found), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [name for name in registry.methods() if not registry.methods()[name].adapters])
def test_every_method_trains_on_tokens_or_says_why_not(spec):
    build = models.model("causal", (LENGTH,), WORDS, **OPTIONS)
    training = Training(rounds=1, batch=4, lr=0.1, device="cpu", precision="float64", engine="loop")
    method = registry.method(spec)
    if not method.per_token:
        with pytest.raises(CoterieError, match="looks at the features or the class of a whole sample"):
            Simulation(method, build, federation(), training)
        return
    simulation = Simulation(method, build, federation(), training)
    simulation.round()
    scores = simulation.evaluate().stages["served"]
    assert torch.isfinite(torch.from_numpy(scores.test["loss"])).all()
