"""Every method with every kind of local optimizer: it trains alike on every engine, or it refuses with a sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie import registry
from coterie.contract.patterns import partly
from coterie.errors import CoterieError

METHODS = sorted(registry.methods())
PLAIN_ALONE = {"apfl", "perfedavg", "pfedme", "scaffold"}
"""Methods whose steps are their own, or whose state is read off the way that plain steps went."""
NEED_THE_BODY = {"fedbabu", "fedpac", "fedper", "fedrep", "feduv", "lgfedavg", "moon"}
"""Methods that share or keep the body, or move its features, so that one which is frozen leaves them nothing."""
OPTIMIZERS = ("sgd", "sgd(momentum=0.9,weight_decay=0.01)", "adamw(eps=0.1)")
"""A large eps, as Adam takes what is 0 but for rounding for a direction, and that differs between engines."""


def relu():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("train", ["everything", "head"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_engines_agree_or_the_method_says_why_not(tiny, method, optimizer, train):
    """Three rounds; and where an optimizer runs, it is not plain SGD under another name."""
    options = {"model": relu if train == "everything" else partly(relu, train=train), "optimizer": optimizer}
    if method in NEED_THE_BODY and train == "head":
        with pytest.raises(CoterieError, match="is frozen; let some of it train"):
            tiny.simulation(method, **options)
        return
    if method in PLAIN_ALONE and optimizer != "sgd":
        with pytest.raises(CoterieError, match=f"{method} trains by plain SGD alone"):
            tiny.simulation(method, **options)
        return
    assert not registry.method(method).only_plain() or optimizer == "sgd"
    found = tiny.after(3, method, engine="stack", **options)
    for engine in ("loop", "auto", "reference"):  # auto differentiates this chain by hand, where a method leaves it one
        tiny.close(tiny.after(3, method, engine=engine, **options), found, 1e-9)
    if optimizer != "sgd":
        plain = tiny.after(3, method, **{**options, "optimizer": "sgd"})
        assert any(not torch.equal(plain[name], t) for name, t in found.items() if t.is_floating_point())
