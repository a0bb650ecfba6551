"""The identity of a function: what it computes, and never a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.engine.capture import Steps, identity
from coterie.errors import CoterieError
from coterie.methods.fedprox import FedProx

T = torch.ones(3)


def closing(value):
    """A function that closes over a value."""
    return lambda x: (x, value)


def with_default(value):
    def function(x, y=value):
        return x, y

    return function


def with_keyword(value):
    def function(x, *, y=value):
        return x, y

    return function


@dataclass(frozen=True)
class Scaled:
    factor: float
    table: Tensor | None = None

    def step(self, x):
        return self.factor * x


def recursive(value):
    def function(n):
        return value if n == 0 else function(n - 1)

    return function


CAUGHT = {
    "direct": closing(T),
    "in a tuple": closing((1, (2, T))),
    "in a list": closing([T]),
    "in a nested function": closing(closing(T)),
    "as a default": with_default(T),
    "as a keyword default": with_keyword(T),
    "in a field of its object": Scaled(1.0, T).step,
    "in a captured object": closing(Scaled(1.0, T)),
    "in a partial": partial(closing(1), T),
    "in a captured partial": closing(partial(closing(1), y=T)),
    "behind a call to itself": recursive(T),
    "as parameters of a module": closing(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("function", CAUGHT.values(), ids=CAUGHT.keys())
def test_tensors_are_refused_with_a_sentence(function):
    with pytest.raises(CoterieError, match=r"closes over a (tensor|module with tensors); hand it in through `given`"):
        identity(function)


@pytest.mark.parametrize("value", [{"a": 1}, {1, 2}, np.ones(2)], ids=["dict", "set", "array"])
def test_what_may_change_is_refused_too(value):
    with pytest.raises(CoterieError, match="may change between rounds"):
        identity(closing(value))


def test_plain_values_and_modules_without_tensors_are_fine():
    for value in (1, 2.5, "text", None, (1, [2, 3]), nn.CrossEntropyLoss(), Scaled(2.0), torch.nn.functional.relu):
        hash(identity(closing(value)))
    assert identity(None) is None
    hash(identity(recursive(1)))


def test_equal_methods_have_equal_identities():
    """Bound methods of equal frozen dataclasses: a method rebuilt from its options reuses the captured graphs."""
    assert identity(FedProx(mu=0.1).pull) == identity(FedProx(mu=0.1).pull)
    assert identity(Scaled(2.0).step) == identity(Scaled(2.0).step)
    assert hash(identity(FedProx(mu=0.1).pull)) == hash(identity(FedProx(mu=0.1).pull))
    assert identity(closing(1.5)) == identity(closing(1.5))
    assert identity(partial(closing(1), y=2)) == identity(partial(closing(1), y=2))


def test_other_hyperparameters_have_other_identities():
    different = [
        FedProx(mu=0.1).pull, FedProx(mu=0.2).pull, Scaled(1.0).step, Scaled(2.0).step, closing(1), closing(2),
        closing(closing(1)), closing(closing(2)), with_default(1), with_default(2), with_keyword(1), with_keyword(2),
        recursive(1), recursive(2), partial(closing(1), 1), partial(closing(1), 2), partial(closing(1), y=1),
    ]
    assert len({identity(function) for function in different}) == len(different)


def test_steps_run_in_order_on_the_host():
    """Without CUDA nothing is captured: each prefix is one call, and the counter starts at 0."""
    counter, calls = torch.full((1,), 7), []

    def step(prefix):
        calls.append((int(counter), prefix))
        counter.add_(1)

    steps = Steps(step, 5, counter, captured=False)
    steps.prepare([5, 3, 1], None)
    steps.run([5, 3, 1])
    assert calls == [(0, 5), (1, 3), (2, 1)]
    assert [steps.bucket(p) for p in (5, 3, 1)] == [5, 3, 1]
