"""Shapes of methods say which model stands for all; nothing is guessed from names of fields or lengths of lists."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from coterie.contract.cohort import Init
from coterie.contract.layout import Layout
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


# -- several models from independent draws ----------------------------------------------------------------------------


def fixed() -> nn.Module:
    """The same model each time, as of a function that loads weights."""
    return nn.Sequential(nn.Linear(4, 5).requires_grad_(False), ones(nn.Linear(5, 3)))


def ones(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


def seeded() -> nn.Module:
    """The same model each time, for it seeds itself."""
    torch.manual_seed(3)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("model", [fixed, seeded])
@pytest.mark.parametrize(("method", "instead"), [
    ("fedfew", ", or set start_from=same+noise."), ("ifca:models=2", "."), ("fedsoft:models=4", "."),
])
def test_methods_of_several_models_refuse_a_function_that_builds_one(tiny, method, instead, model):
    """Equal models have equal losses, so they would stay one; that frozen layers are drawn makes no difference."""
    with pytest.raises(CoterieError, match="models are to be drawn independently, and two of them came out equal") as e:
        tiny.simulation(method, model)
    assert str(e.value).endswith(f"seeds itself{instead}")


@pytest.mark.parametrize("method", ["fedfew:start_from=same", "fedfew:start_from=same+noise", "fedfew:models=1",
                                    "ifca:models=1", "fedsoft:models=1", "fedavg", "ditto", "fedsoft", "ifca"])
def test_one_model_and_what_is_equal_by_design_take_such_a_function(tiny, method):
    """The last two with layers that draw: a part that starts at 0 in all of them does no harm."""
    drawn = method in ("fedsoft", "ifca")
    tiny.simulation(method, (lambda: nn.Sequential(nn.Linear(4, 5), ones(nn.Linear(5, 3)))) if drawn else fixed).round()


def test_models_that_differ_in_nothing_of_their_own_part_are_refused(tiny):
    """IFCA's clusters share what is not `clustered`, so heads that all start at 1 would be one model."""
    with pytest.raises(CoterieError, match="two of them came out equal in head;"):
        tiny.simulation("ifca:clustered=head", lambda: nn.Sequential(nn.Linear(4, 5), ones(nn.Linear(5, 3))))


def test_a_module_is_row_0_and_the_others_are_drawn_anew():
    """Drawn rows that are equal to each other are refused even where the module as given is another."""
    norm = nn.LayerNorm(4)  # whose reset_parameters sets ones and zeros
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    rows = Init(module, Method().wrap, 0).rows(3)
    assert torch.equal(rows[0], Layout.of(module).row(module))
    assert len({tuple(row.tolist()) for row in rows}) == 3
    with torch.no_grad():
        norm.weight.fill_(2)
    assert len(Init(norm, Method().wrap, 0).rows(2)) == 2
    with pytest.raises(CoterieError, match="3 models are to be drawn independently"):
        Init(norm, Method().wrap, 0).rows(3)
