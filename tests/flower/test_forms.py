"""What a task carries is known before it comes, for every method, from a rehearsal with a few clients."""

from __future__ import annotations

import pytest
import sites as toy
import torch

from coterie import registry
from coterie.contract.records import Model
from coterie.flower.forms import Form, rehearsed
from coterie.flower.task import Refusal
from coterie.running.clients import Clients


def forms(method, population=4):
    data = toy.federation()
    one = toy.job(data, method)
    return rehearsed(one, Clients(one.chosen(), one.factory(), toy.alone(data, 1), one.training), population)


@pytest.mark.parametrize(("method", "kind", "expected"), [
    ("fedavg", "introduce", ("Nothing", {})),
    ("fedavg", "round", ("Model", {"row": ("float64", (1, 43))})),
    ("fedper", "round", ("Model", {"row": ("float64", (1, 25))})),  # without the head's 5 * 3 + 3
    ("ifca:models=2", "round", ("Models", {"rows": ("float64", (1, 2, 43))})),
    # The model of 43 with an adapter of rank 2 beside 4 x 5 weights; when the root is done, its pair comes as well.
    ("hilora", "round", ("Branch", {"row": ("float64", (1, 43 + 18)), "root": ("float64", (1, None, 18))})),
    # Of 4 clients everybody is offered 3 others, of 8 five: as many as there are, at most five.
    ("fedfomo:received=5", "round", ("Offer", {"rows": ("float64", (1, None, 43)), "who": ("int64", (1, None))})),
])
def test_forms_are_those_of_the_methods_equations(method, kind, expected):
    found = forms(method)[kind]
    assert (found.record, dict(found.tensors)) == expected


@pytest.mark.parametrize("method", sorted(registry.methods()))
@pytest.mark.parametrize("population", [4, 40])
def test_every_method_can_be_rehearsed_and_its_forms_written_down(method, population):
    for form in forms(method, population).values():
        assert Form.of(form.values()) == form
        assert all(shape[0] == 1 for _, shape in form.tensors.values())


def test_numbers_that_are_not_finite_are_refused_by_name():
    form = Form.between(Model(torch.zeros(1, 3)), Model(torch.zeros(1, 3)), False)
    form.require("Model", {"row": torch.ones(1, 3)})
    for value in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(Refusal, match="tensor row holds numbers that are not finite"):
            form.require("Model", {"row": torch.tensor([[0.0, value, 0.0]])})
