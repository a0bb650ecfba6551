"""One hostile site of five sends what passes every check: what docs/deploy.md promises of the others' accuracy.

The attacks, and the checks that each spoiled round passes, are those of benchmarks/attacks.py, which measures all pairs
of methods and aggregators; here every method is tried with one robust aggregator, and one method with each.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from coterie import registry
from coterie.running.experiment import Experiment
from coterie.running.simulation import Simulation
from coterie.running.training import Training

ROOT = Path(__file__).parents[2]
BOUND = 10
"""Points that the honest sites' mean accuracy may lie below what they reach without the hostile one."""
NOT_DEFENDED = {"cwfedavg", "fedfew", "fesem", "hilora"}
"""Methods whose figures with `geometricmedian` lie beyond the bound; docs/deploy.md names them."""
AVERAGING = [name for name in registry.methods() if registry.method(name).averages]


@pytest.fixture(scope="module")
def attacks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attacks", ROOT / "benchmarks" / "attacks.py")
    found = sys.modules["attacks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def lost(attacks: ModuleType, method: str, aggregator: str, rounds: int = 30) -> float:
    """Points under the worst attack of one site of five."""
    experiment = Experiment(partition="dirichlet:alpha=1", model="mlp:hidden=32")
    training = Training(rounds=rounds, batch=20, lr=0.2, device="cpu")
    found = attacks.measure(experiment, training, method, [aggregator], companies=((1, 5),))
    return attacks.worst(found[aggregator], 1)


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in AVERAGING if name not in NOT_DEFENDED])
def test_one_hostile_site_of_five_costs_the_others_little(attacks, method):
    assert lost(attacks, method, "geometricmedian") <= BOUND


@pytest.mark.long
@pytest.mark.parametrize("aggregator", [name for name, one in registry.aggregators().items() if one.robust])
def test_each_robust_aggregator_holds_under_fedavg(attacks, aggregator):
    assert lost(attacks, "fedavg", aggregator) <= BOUND


@pytest.mark.parametrize("aggregator", ["geometricmedian", "krum"])
def test_a_head_that_says_it_is_everybodys_best_costs_the_others_little(attacks, aggregator):
    """FedPAC's own weak spot: V = 0 and the others' mean H make one site's head the cheapest for all, and it lies just
    inside what the aggregator keeps, opposite to the mean head. Before V and heads were bounded it cost 35 points."""

    class Combined(attacks.Attack):
        def spoil(self, method, up, classes):
            tensors = {name: t.clone() for name, t in up.tensors.items()}
            others = tensors["head"][:-1]
            centre = others.median(0).values
            usual = torch.linalg.vector_norm(others - centre, dim=1).median()
            mean = others.mean(0)
            tensors["V"][-1], tensors["H"][-1] = 0, tensors["H"][:-1].mean(0)
            tensors["head"][-1] = centre - 4.5 * usual * mean / torch.linalg.vector_norm(mean)
            return replace(up, tensors=tensors)

    experiment = Experiment(partition="dirichlet:alpha=1", model="mlp:hidden=32")
    training = Training(rounds=20, batch=20, lr=0.2, device="cpu")
    whole = replace(experiment, clients=5).federation()

    def reached(method, federation):
        return Simulation(registry.method(method), experiment.factory(whole), federation, training)

    attacked = attacks.spoiled(reached(f"fedpac+{aggregator}", whole), Combined("the best head"))
    alone = attacks.accuracy(reached("fedpac", attacks.only(whole, 4)), 4)
    assert 100 * (alone - attacks.accuracy(attacked, 4)) <= BOUND


def test_the_attacks_are_attacks(attacks):
    """Without an aggregator the same messages, which pass the same checks, cost more than half of the accuracy."""
    assert lost(attacks, "fedavg", "mean", rounds=10) > 50


def test_the_page_has_every_method_and_names_those_beyond_the_bound(attacks):
    """A pair whose cell is above the bound although nobody promised less would be a promise that is not kept."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    section = page.partition("### Hostile sites and robust aggregators\n")[2].partition("\n## ")[0]
    head = re.search(r"^\| method \|.*$", section, re.MULTILINE)[0]
    place = [name.strip(" `") for name in head.split("|")[1:-1]].index("geometricmedian")
    rows = {line.split("`")[1]: [text.strip() for text in line.split("|")[1:-1]]
            for line in section.splitlines() if re.match(r"\| `\w+` \|", line)}
    assert list(rows) == list(registry.methods())
    cells = {name: row[place].partition(" /")[0] for name, row in rows.items()}
    assert {name for name, cell in cells.items() if cell and int(cell) > BOUND} == NOT_DEFENDED
    assert {name for name, cell in cells.items() if not cell} == set(registry.methods()) - set(AVERAGING)
    for name in NOT_DEFENDED:
        assert registry.method(name).unprotected, name  # said on its page and when a run begins
        assert f"`{name}`" in section.partition("| method |")[0], name
