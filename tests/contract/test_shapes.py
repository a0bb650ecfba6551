"""Shapes of methods say which model stands for all; nothing is guessed from names of fields or lengths of lists."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from coterie.contract.cohort import Init
from coterie.contract.method import Method
from coterie.contract.records import Model, Models, Record
from coterie.contract.shapes import Clustered, FewModels, Personal
from coterie.errors import CoterieError

ROWS = torch.arange(9.0).reshape(3, 3)


@dataclass(frozen=True)
class Placed(Models):
    """Models and the cluster of each client."""

    cluster: Tensor


@dataclass(frozen=True)
class Rows(Record):
    """Something that is no whole model, though its field is called so."""

    rows: Tensor


@pytest.fixture
def init():
    """Of a model with three columns."""
    return Init(lambda: torch.nn.Linear(2, 1), Method().wrap, 0, None)


def test_of_few_models_the_one_that_the_methods_own_number_names(init):
    """Lists of as many numbers stand before it in the report; only `mass` is said to be by model."""

    class Weighed(FewModels):
        by_model = "mass"

    report = {"clients": [2, 0, 1], "ranks": [5.0, 0.0, 0.0], "mass": [0.1, 0.2, 0.7]}
    assert torch.equal(Weighed().fallback(Models(ROWS), init, report), ROWS[2])
    assert torch.equal(Weighed().fallback(Models(ROWS), init, {"ranks": [0.0, 9.0, 0.0]}), ROWS[0])


def test_of_clusters_the_one_with_most_members(init):
    """Cluster 1 has two of four clients now; the numbers of the last round were taken before it was merged."""
    server, report = Placed(ROWS, torch.tensor([1, 0, 1, 2])), {"clients_per_model": [3, 1, 0]}
    assert torch.equal(Clustered().fallback(server, init, report), ROWS[1])
    assert Clustered().clusters(server).tolist() == [1, 0, 1, 2]


def test_of_models_of_ones_own_the_mean(init):
    """A table of clients' models has the mean (3, 4, 5), one shared model is its own mean, and none is the start."""
    assert torch.equal(Personal().fallback(Models(ROWS), init, {"who": [0, 9, 0]}), torch.tensor([3.0, 4.0, 5.0]))
    assert torch.equal(Personal().fallback(Model(ROWS[2]), init, {}), ROWS[2])
    assert torch.equal(Personal().fallback(Rows(ROWS), init, {}), init.row)


def test_whole_models_are_told_by_the_type_of_the_state_and_their_width(init):
    method = Method()
    assert torch.equal(method.whole(Model(ROWS[0]), init.layout), ROWS[:1])
    assert torch.equal(method.whole(Models(ROWS), init.layout), ROWS)
    assert method.whole(Model(ROWS[0, :2]), init.layout) is None  # a part
    assert method.whole(Rows(ROWS), init.layout) is None


def test_a_method_that_does_not_say_what_a_newcomer_gets_is_asked_to(init):
    """Nothing falls back silently: the initial row would look like an answer."""

    class Odd(Method):
        pass

    assert torch.equal(Odd().fallback(Model(ROWS[1]), init, {}), ROWS[1])
    with pytest.raises(CoterieError, match=r"odd does not say what a newcomer without labels gets.*`fallback`"):
        Odd().fallback(Rows(ROWS), init, {})
