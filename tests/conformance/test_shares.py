"""Methods whose clients count in several models by shares, under every aggregator: opposite groups stay apart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie import registry
from coterie.contract import method as contract
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.report.contents import gather
from coterie.running.folder import Folder

METHODS = [
    "fedfew:models=2", "fedfew:models=2,normalise=true", "fedfew:models=2,scale=false,mu=0.1",
    "fedfew:models=2,weigh=client,scale=false", "fedsoft:models=2", "fedsoft:models=2,selected=4",
    "cwfedavg:distribution=true", "cwfedavg:distribution=approx",
]
PLUGS = [
    "mean", "median", "median:weighted=false", "trimmedmean", "trimmedmean:weighted=false", "geometricmedian",
    "geometricmedian:weighted=false", "normclip", "krum", "krum:faulty=0", "multikrum", "multikrum:chosen=2", "mgda",
    "fedmgdaplus", "fedmgdaplus:epsilon=0", "fedmgdaplus:epsilon=1", "fedmgdaplus:weighted=false,epsilon=0",
    "confree", "confree:official", "confree:weighted=true", "private:clip=1000,sigma=0.001",
]
CLIENTS, ROUNDS = 14, 40


@pytest.fixture(scope="module")
def opposites() -> Federation:
    """Clients of two groups, one after the other: both draw the same inputs and give them different labels.

    Even clients have the label 1 where a sum is positive and 0 elsewhere, odd ones 2 and 3. On any input a model is
    right for one of the groups at most, so the groups' accuracies under one model add up to no more than 1.
    """
    rng = np.random.default_rng(0)
    splits = []
    for n in (40, 40, 20):
        pairs = []
        for i in range(CLIENTS):
            x = rng.standard_normal((n, 4))
            side = (x[:, 0] + 0.5 * x[:, 1] > 0).astype(np.int64)
            pairs.append((torch.from_numpy(x), torch.from_numpy(side if i % 2 == 0 else 3 - side)))
        splits.append(pairs)
    return Federation.from_splits(*splits, classes=4)


def served(tiny, spec: str, data: Federation) -> tuple[float, float, torch.Tensor]:
    """The groups' accuracies by the served stage after training, and the server's models."""
    sim = tiny.simulation(spec, lambda: nn.Linear(4, 4), data=data, lr=0.3, batch=10)
    for _ in range(ROUNDS):
        sim.round()
    found = sim.evaluate().stages["served"].test["accuracy"]
    tensors = sim.server.state.tensors()
    return float(found[::2].mean()), float(found[1::2].mean()), tensors.get("rows", tensors.get("row"))


def refusal(tiny, spec: str, data: Federation) -> str:
    """The sentence that refuses a run before its first round, or none."""
    try:
        tiny.simulation(spec, lambda: nn.Linear(4, 4), data=data)
    except CoterieError as sentence:
        return str(sentence)
    return ""


def test_one_model_serves_at_most_one_of_the_groups(tiny, opposites):
    """The federation is what it is said to be: FedAvg's two accuracies add up to less than 1, up to 280 samples."""
    one, other, _ = served(tiny, "fedavg", opposites)
    assert one + other < 1.1


@pytest.mark.parametrize("plug", PLUGS)
@pytest.mark.parametrize("method", METHODS)
def test_opposite_groups_stay_apart_or_the_pair_is_refused(tiny, opposites, method, plug):
    """Both groups are served well, which no one model can, and the models differ; or a sentence, before round 1."""
    sentence = refusal(tiny, f"{method}+{plug}", opposites)
    if sentence:
        assert plug != "mean"
        assert re.search(r"take an aggregator that does|set weigh=server|set normalise=false|; use ", sentence)
        return
    one, other, rows = served(tiny, f"{method}+{plug}", opposites)
    assert min(one, other) > 0.85, (one, other)
    assert torch.cdist(rows, rows).max() > 0.5


def test_what_keeps_to_weights_is_allowed():
    """The refusals above are not of everything."""
    allowed = {f"{m}+{plug}" for m in ("fedfew", "fedsoft", "cwfedavg") for plug in registry.keeping()}
    assert {"fedfew+median", "fedsoft+trimmedmean", "cwfedavg+geometricmedian", "fedfew+normclip"} < allowed
    assert not {"fedfew+krum", "fedsoft+mgda", "cwfedavg+confree", "fedfew+multikrum", "fedfew+fedmgdaplus"} & allowed


@pytest.mark.parametrize("method", sorted(name for name, cls in registry.methods().items() if cls().averages))
def test_methods_of_soft_shares_say_so(tiny, monkeypatch, method):
    """Found by watching the server average: some client has weight in two models that are averaged alike."""
    seen: list[tuple[int, torch.Tensor]] = []
    real = contract.aggregate

    def watched(aggregator, updates, weights, layout):
        seen.append((layout.size, weights > 0))
        return real(aggregator, updates, weights, layout)

    monkeypatch.setattr(contract, "aggregate", watched)
    data = tiny.federation(sizes=(6, 6, 6, 6, 6))
    # Modules of one model, each averaged over those who trained it, are no several models: one is trained by everybody.
    sim = tiny.simulation("fedplora:ranks=all" if method == "fedplora" else method, data=data)
    soft = False
    for _ in range(2):
        seen.clear()
        sim.round()
        for size in {size for size, _ in seen}:
            counted = torch.stack([there for width, there in seen if width == size]).sum(0)
            soft = soft or bool((counted > 1).any())
    assert soft == registry.methods()[method].soft


def test_the_table_of_pairs_is_what_the_server_does(tiny):
    """Every line of docs/methods.md's table, tried."""
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    head, *lines = re.search(r"(\| aggregator \| `cwfedavg`.*?)\n\n", text, re.DOTALL)[1].splitlines()
    names = re.findall(r"`(\w+)`", head)
    assert names == sorted(name for name, cls in registry.methods().items() if cls.soft)
    data = tiny.federation(sizes=(6,) * 5)
    said, done = {}, {}
    for line in lines[1:]:
        plug, *cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        for name, cell in zip(names, cells, strict=True):
            said[f"{name}+{plug}"] = cell
            try:
                tiny.simulation(f"{name}+{plug}", data=data)
                done[f"{name}+{plug}"] = "allowed"
            except CoterieError:
                done[f"{name}+{plug}"] = "refused"
    assert len(said) == 3 * 16
    assert said == done


def test_a_method_that_averages_nothing_refuses_an_aggregator_however_it_is_built(tiny):
    """Spelled with a plus, plugged into the value, or by an option that leaves nothing to average."""
    krum = registry.aggregators()["krum"]()
    for method in (registry.methods()["fedamp"](aggregator=krum), "fedmtl:detached=true+krum", "fedmtl:pfllib+median"):
        with pytest.raises(CoterieError, match=r"averages nothing, so '\+(krum|median)' has no effect"):
            tiny.simulation(method, data=tiny.federation(sizes=(3,) * 5))


def test_what_no_aggregator_protects_is_said_before_the_run_in_it_and_on_the_page(tmp_path, tiny):
    """FedFew's weights follow the losses that clients report; with the mean there is nothing to say."""
    clients = [(torch.randn(12, 4), torch.arange(12) % 3) for _ in range(5)]
    data = coterie.Federation.from_clients(clients)
    model = nn.Linear(4, 3)
    sentence = "fedfew+median: the aggregator does not protect the losses that clients report"
    for spec, expected in (("fedfew:models=2+median", True), ("fedfew:models=2", False)):
        folder = tmp_path / spec.replace(":", "-").replace("+", "-")
        coterie.run(spec, model, data, rounds=1, device="cpu", folder=folder)
        config = Folder(folder).config()
        assert any(note.startswith(sentence) for note in config["choices"].get("aggregator", [])) is expected
        assert any("does not protect the losses" in note for note in gather([folder])["notes"]) is expected
