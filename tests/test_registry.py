"""Spellings of methods."""

import pytest
from commands import FILES, OF_ANY_MODEL

from coterie import registry
from coterie.aggregators.normclip import NormClip
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg


def test_expand_puts_every_method_in_place_of_all_and_repeats_none():
    assert registry.expand(["all"]) == tuple(OF_ANY_MODEL)
    rest = tuple(name for name in OF_ANY_MODEL if name != "fedper")
    assert registry.expand(["fedper", "all"]) == ("fedper", *rest)  # what is named first stays first
    assert registry.expand(["all", "fedper", "fedper:personal=none"]) == (*OF_ANY_MODEL, "fedper:personal=none")
    assert registry.expand(["all", "All"]) == tuple(OF_ANY_MODEL)
    assert registry.expand(["all"], adapters=True) == tuple(FILES)
    beside = tuple(name for name in FILES if name not in ("fedexlora", "flora"))  # which add to a frozen backbone
    assert registry.expand(["all"], adapters=True, frozen=False) == beside


def test_expand_leaves_spellings_alone():
    assert registry.expand(["mine.py:All", "fedavg+confree", "fedavg"]) == ("mine.py:All", "fedavg+confree", "fedavg")
    assert registry.expand(["ifca", "ifca"]) == ("ifca",)
    assert registry.expand([]) == ()


@pytest.mark.parametrize(("spelling", "said"), [
    ("fedsoft:sigma=0", "fedsoft's sigma must be above 0 and at most 1, not 0.0."),
    ("fedsoft:every=0", "fedsoft's every must be at least 1, not 0."),
    ("cfl:smallest=0", "cfl's smallest must be at least 1, not 0."),
    ("moon:tau=0", "moon's tau must be above 0, not 0.0."),
    ("fedfomo:received=0", "fedfomo's received must be at least 1, not 0."),
    ("apfl:alpha=1.5", "apfl's alpha must be from 0 to 1, not 1.5."),
    ("fedamp:alpha=0", "fedamp's alpha must be above 0 or none, not 0.0."),
    ("fedamp:sigma=-1", "fedamp's sigma must be above 0 or none, not -1.0."),
    ("fedamp:own=1.5", "fedamp's own must be from 0 to 1, not 1.5."),
    ("fedprox:mu=nan", "fedprox's mu must be at least 0, not nan."),
    ("fedprox:mu=inf", "fedprox's mu must be at least 0, and of a size from 1e-30 to 1e+30, with which float32 can "
                       "reckon, not inf."),
    ("fedavg+normclip:bound=0", "normclip's bound must be above 0 or none, not 0.0."),
    ("fedavg:lr=0", "fedavg: lr must be above 0, not 0.0."),
])
def test_a_number_outside_its_range_is_a_sentence(spelling, said):
    """When the method is made, so before anything is trained; conformance/test_options.py draws from all ranges."""
    with pytest.raises(CoterieError) as refused:
        registry.method(spelling)
    assert str(refused.value) == said


@pytest.mark.parametrize("spelling", [
    "fedprox:mu=0", "ditto:lam=0", "fedamp:lam=0", "apfl:alpha=0", "apfl:alpha=1", "fedala:eta=0,initial=0",
    "pacfl:beta=90", "pacfl:beta=-1", "pacfl:beta=inf", "cfl:eps2=inf", "perfedavg:alpha=0", "pfedme:beta=0",
    "pfedme:lam=0", "fedavgft:finetune_epochs=0", "fedavg+confree:c=0", "fedavg+fedmgdaplus:epsilon=0", "ifca:models=1",
    "fedrep:head_epochs=0", "fedrep:body_epochs=0", "fednh:rho=1", "pfedhn:embedding=0", "fedbabu:finetune_epochs=0",
])
def test_extreme_values_that_are_another_method_are_inside(spelling):
    """mu=0 is FedAvg, eps2=inf never splits, beta=-1 leaves every client alone, ...: reductions that tests use."""
    made = registry.method(spelling)
    assert registry.method(registry.spelling(made)) == made


def test_a_plus_in_a_number_is_no_aggregator():
    """Python writes large numbers so, and run folders hold what it writes."""
    method = FedAvg(aggregator=NormClip(bound=1e20))
    assert registry.spelling(method) == "fedavg+normclip:bound=1e+20"
    assert registry.method("fedavg+normclip:bound=1e+20") == method
    assert registry.method("fedprox:mu=1e+20+median").mu == 1e20
