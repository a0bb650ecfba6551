"""Precision and kernels belong to an engine: others in the same process compute as they did."""

import pytest
import torch
from torch import nn

from coterie.contract.layout import Layout
from coterie.contract.net import Batch, Net, Task
from coterie.engine import convolution
from coterie.engine.arithmetic import Arithmetic
from coterie.engine.convolution import StackedConvolutions

PRECISIONS = ["float32", "float64", "tf32", "bf16"]


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture
def restored():
    before = switches()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("first", [(False, False), (False, True), (True, True)])
def test_building_and_running_a_simulation_leaves_pytorchs_switches_alone(tiny, restored, first):
    """They belong to whoever set them. A constructor used to set both, for every other simulation of the process."""
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = first
    for precision in PRECISIONS:
        sim = tiny.simulation(precision=precision, data=tiny.federation(dtype=torch.float32))
        assert switches() == first
        sim.round()
        sim.evaluate()
        assert switches() == first


def test_a_simulation_of_another_precision_changes_nothing_for_the_first(tiny):
    """Two rounds with a round of another simulation before each are the two rounds alone, bit for bit."""
    data = tiny.federation(dtype=torch.float32)
    expected = tiny.after(2, data=data, precision="float32")
    sim = tiny.simulation(data=data, precision="float32")
    for _ in range(2):
        tiny.simulation(data=data, precision="tf32").round()
        sim.round()
    tiny.same(tiny.state(sim), expected)


SEEN = []


def noting(net, row, batch, given):
    SEEN.append(switches())
    return net.loss(row, batch)


def noting_step(net, state, batch, given):
    SEEN.append(switches())
    return {"row": state.row - given.lr * net.grad(state.row, batch)}


@pytest.mark.parametrize("engine", ["stack", "loop", "reference"])
def test_every_primitive_computes_with_the_switches_of_its_own_engine(tiny, engine):
    """A probe inside `train`, `loop` and `total` of a tf32 and of a float32 engine, in turn, sees them on and off."""
    data = tiny.federation(dtype=torch.float32)
    sims = {on: tiny.simulation(data=data, precision="tf32" if on else "float32", engine=engine)
            for on in (True, False)}
    for on in (True, False, True):
        cohort, start = tiny.cohort(sims[on]), tiny.rows(sims[on])
        for compute in (lambda: cohort.train(start, objective=noting), lambda: cohort.grad(start, None, noting),  # noqa: B023
                        lambda: cohort.loop(noting_step, {"row": start}), lambda: cohort.total(noting, start)):  # noqa: B023
            SEEN.clear()
            compute()
            assert set(SEEN) == {(on, on)}


def test_switches_come_back_after_an_error():
    before, during = switches(), []

    def fail():
        with Arithmetic("tf32").set():
            during.append(switches())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert during == [(True, True)]
    assert switches() == before


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_of_one_simulation_do_not_reach_another(tiny, monkeypatch):
    """kernels=false was a switch of the whole process: the second simulation took the first one's kernels away."""
    monkeypatch.setattr(convolution, "INTERPRETED", True)
    monkeypatch.setattr(convolution, "available", lambda: True)

    def built(kernels):
        return tiny.simulation(precision="tf32", data=tiny.federation(dtype=torch.float32), kernels=kernels)

    first = built(True)
    assert not built(False).engine.net.kernels
    assert set(first.engine.net.kernels) == {torch.conv1d, torch.conv2d, nn.functional.max_pool2d}


def test_which_formats_the_kernels_serve_follows_from_their_engine(restored):
    """bfloat16 always; float32 where it is rounded to TF32, whatever PyTorch's switches say."""
    torch.backends.cudnn.allow_tf32 = True
    exact, rounded = StackedConvolutions(tf32=False), StackedConvolutions(tf32=True)
    assert [k.serves(torch.float32) for k in (exact, rounded)] == [False, True]
    assert [k.serves(torch.bfloat16) for k in (exact, rounded)] == [True, True]
    assert not rounded.serves(torch.float64)
    assert StackedConvolutions.on(torch.device("cpu"), tf32=True) is None or convolution.INTERPRETED


def test_a_net_calls_the_kernels_it_was_given_and_only_while_stacked():
    """The stand-in for conv1d answers with zeros, so that the outputs tell whether it was called."""
    module = nn.Sequential(nn.Conv1d(1, 2, 2, bias=False), nn.Flatten(), nn.Linear(4, 3))
    net = Net(module, Layout.of(module), Task.of(3), kernels={torch.conv1d: lambda x, *rest: x.new_zeros(len(x), 2, 2)})
    row, x = net.layout.row(module), torch.randn(5, 1, 3)
    assert torch.equal(net(row, x), module[2].bias.expand(5, 3))
    net.stacked = False
    assert torch.equal(net(row, x), module(x))
    assert net.loss(row, Batch(x, torch.zeros(5, dtype=torch.int64), torch.ones(5), torch.zeros(()))) > 0
