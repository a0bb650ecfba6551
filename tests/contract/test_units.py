"""Models train on standardised targets; whatever people read is in the unit of the targets themselves."""

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.contract.units import Unit, answering
from coterie.data import Federation

UNIT = Unit(mean=250.0, deviation=40.0)


def huber(outputs, y):
    return nn.functional.huber_loss(outputs[:, 0], y, reduction="none", delta=10.0)


def federation(unit):
    """Three clients with targets of about 250, one of them without test samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = 250 + 40 * (x[:, 0] - 0.5 * x[:, 1]) + torch.randn(60, generator=generator, dtype=torch.float64)
    train = [(x[20 * k : 20 * k + 14], y[20 * k : 20 * k + 14]) for k in range(3)]
    held = [slice(14, 20), slice(34, 40), slice(54, 54)]
    test = [(x[rows], y[rows]) for rows in held]
    return Federation.from_splits(train, test, unit=unit)


def run(unit, **options):
    asked = {"rounds": 4, "lr": 0.05, "device": "cpu", "precision": "float64", "watch": "mae,r2", **options}
    return coterie.run("fedavg", lambda: nn.Linear(4, 1), federation(unit), **asked)


def test_back_is_the_inverse_of_standardised():
    y = torch.tensor([1e9, 1e9 + 40, 1e9 - 40], dtype=torch.float64)
    unit = Unit(1e9, 40.0)
    assert unit.standardised(y).tolist() == [0.0, 1.0, -1.0]
    assert torch.equal(unit.back(unit.standardised(y)), y)
    assert Unit.of(unit.facts()) == unit


@pytest.mark.parametrize("engine", ["stack", "reference", "direct"])
@pytest.mark.parametrize("loss", [None, huber])
def test_scores_are_those_of_what_the_model_answers(engine, loss):
    """The loss too, also one of a user's own, which no factor brings into the unit: it is not homogeneous."""
    if engine == "direct" and loss is not None:
        pytest.skip("engine=direct is for the usual losses")
    result = run(UNIT, engine=engine, **({} if loss is None else {"loss": loss}))
    data, scores = result.simulation.federation, result.at("served", "last")
    for client in range(2):
        x, y = data.client(client, "test")
        with torch.no_grad():
            found = result.simulation.layout.load(nn.Linear(4, 1).double(), result.simulation.row(client).cpu())(x)
        found = 250.0 + 40.0 * found
        expected = {"loss": (loss or (lambda o, t: (o[:, 0] - t) ** 2))(found, y).mean(),
                    "mae": (found[:, 0] - y).abs().mean(),
                    "r2": 1 - (found[:, 0] - y).square().sum() / (y - y.mean()).square().sum()}
        assert {name: scores.test[name][client] for name in expected} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, rel=1e-6)
    assert np.isnan(scores.test["loss"][2])  # it has no test samples


def test_methods_compare_models_on_what_is_trained():
    """`cohort.loss` is of standardised targets, so that a method's constants mean the same whatever the unit."""
    simulation = run(UNIT).simulation
    cohort = simulation.cohort(np.arange(2))
    row = simulation.row(0).expand(2, -1)
    assert torch.allclose(cohort.loss(row, "test") * 40.0**2, cohort.score(row, "test", ())["loss"])


def test_an_unscaled_federation_is_as_before():
    result = run(None)
    assert result.simulation.engine.net.task.unit is None
    assert isinstance(result.model_for(0), nn.Linear)


def test_a_module_ends_with_the_map_back():
    module = nn.Linear(3, 1).eval()
    x = torch.randn(5, 3)
    made = answering(module, UNIT)
    assert not made.training
    assert torch.allclose(made(x), 250.0 + 40.0 * module(x))
    assert answering(module, None) is module
