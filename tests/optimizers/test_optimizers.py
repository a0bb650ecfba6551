"""Local optimizers: the rows are those that torch.optim reaches on one module and one client."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import coterie
from coterie import optimizers, registry
from coterie.errors import CoterieError
from coterie.methods import FedProx, FedRep
from coterie.metrics.confusion import BalancedAccuracy
from coterie.running.training import Training

SGD, ADAM, ADAMW, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad
THEIRS = {
    "sgd(weight_decay=0.01)": partial(SGD, weight_decay=0.01),
    "sgd(momentum=0.9)": partial(SGD, momentum=0.9),
    "sgd(momentum=0.8,nesterov=true)": partial(SGD, momentum=0.8, nesterov=True),
    "sgd(momentum=0.9,nesterov=true,weight_decay=0.01)": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": ADAM,
    "adam(beta1=0.8,beta2=0.99,eps=1e-4,weight_decay=0.1)": partial(
        ADAM, betas=(0.8, 0.99), eps=1e-4, weight_decay=0.1),
    "adamw": partial(ADAMW, weight_decay=0.01),
    "adamw(weight_decay=0.2)": partial(ADAMW, weight_decay=0.2),
    "adagrad": partial(ADAGRAD, eps=1e-10),
}
"""Our spelling -> the same in torch.optim."""


def relu():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def expected(tiny, sim, start, steps, **options):
    """`[C, D]`: every client by torch.optim, with the same batches."""
    return torch.stack([tiny.sgd(sim, i, row, steps, **options)[0] for i, row in enumerate(start)])


@pytest.mark.parametrize("engine", ["stack", "loop", "direct", "reference"])
@pytest.mark.parametrize("spec", THEIRS)
def test_rows_after_50_steps_are_those_of_torch_optim(tiny, spec, engine):
    """Clients of 7, 12, 1 and 5 samples in batches of 3; a learning rate that moves the rows far, float64."""
    sim = tiny.simulation(model=relu, engine=engine, optimizer=spec, lr=0.03)
    start = tiny.rows(sim)
    found = tiny.cohort(sim).train(start, steps=50)
    torch.testing.assert_close(found, expected(tiny, sim, start, 50, optimizer=THEIRS[spec]), rtol=1e-10, atol=1e-10)
    assert (found - start).abs().max() > 0.1


@pytest.mark.parametrize("engine", ["stack", "loop", "direct", "reference"])
@pytest.mark.parametrize("spec", ["sgd", "sgd(momentum=0.9)", "adam"])
def test_clipping_is_that_of_torch(tiny, spec, engine):
    """clip_grad_norm_ over all tensors before each step; at 0.3 some steps are clipped and some are not."""
    sim = tiny.simulation(model=relu, engine=engine, optimizer=spec, lr=0.03, clip=0.3)
    start = tiny.rows(sim)
    theirs = expected(tiny, sim, start, 50, optimizer=THEIRS.get(spec, SGD), clip=0.3)
    torch.testing.assert_close(tiny.cohort(sim).train(start, steps=50), theirs, rtol=1e-10, atol=1e-10)
    free = expected(tiny, sim, start, 50, optimizer=THEIRS.get(spec, SGD))
    assert (theirs - free).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["stack", "loop", "reference"])
@pytest.mark.parametrize("spec", ["sgd(momentum=0.9)", "adam(beta1=0.8,beta2=0.99,eps=1e-4,weight_decay=0.1)"])
@pytest.mark.parametrize("model", ["bn", "dropout", "words", "regression"])
def test_every_kind_of_model(tiny, model, spec, engine):
    """Batch statistics (incomplete batches come at their true size), noise, tokens and targets.

    Before a BatchNorm the gradient of a bias is 0 up to rounding, which Adam with a small eps would take for a
    direction.
    """
    sim = tiny.simulation(model=model, engine=engine, optimizer=spec, lr=0.02)
    start = tiny.rows(sim)
    theirs = expected(tiny, sim, start, 20, optimizer=THEIRS[spec])
    torch.testing.assert_close(tiny.cohort(sim).train(start, steps=20), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["stack", "loop", "direct", "reference"])
@pytest.mark.parametrize("spec", ["sgd(momentum=0.9)", "adam"])
def test_a_part_a_hook_and_several_models(tiny, spec, engine):
    """Each model of a client and each part that trains has a memory of its own; hooks come before the optimizer."""
    sim = tiny.simulation(model=relu, engine=engine, optimizer=spec, lr=0.03)
    rows = tiny.rows(sim, models=2)  # [C, 2, D]
    cohort = tiny.cohort(sim)
    pulled = cohort.train(rows[:, 0], {"anchor": rows[:, 1]}, steps=10, correct=FedProx(mu=0.5).pull, part="head")
    views = sim.layout.views(rows[:, 1])

    def pull(name, gradient, value):
        return gradient + 0.5 * (value - views[name][client])

    for client in range(len(rows)):
        row, _ = tiny.sgd(sim, client, rows[client, 0], 10, optimizer=THEIRS[spec], part="head", correct=pull)
        torch.testing.assert_close(pulled[client], row, rtol=1e-10, atol=1e-10)
    both = cohort.train(rows, steps=10)
    for k in range(2):
        theirs = expected(tiny, sim, rows[:, k], 10, optimizer=THEIRS[spec])
        torch.testing.assert_close(both[:, k], theirs, rtol=1e-10, atol=1e-10)


def test_clients_with_rates_of_their_own(tiny):
    """As when runs of different learning rates are computed as one stack."""
    for engine in ("stack", "direct"):
        sim = tiny.simulation(model=relu, engine=engine, optimizer="adam")
        start, rates = tiny.rows(sim), torch.tensor([0.01, 0.02, 0.03, 0.04], dtype=torch.float64)
        effort = tiny.cohort(sim).effort(None, 10, "train")
        found, _, memory = sim.engine.train(
            torch.arange(4).numpy(), start, {}, effort, rates, optimizer=registry.optimizer("adam"), memory={})
        for i, row in enumerate(start):
            theirs = tiny.sgd(sim, i, row, 10, lr=float(rates[i]), optimizer=ADAM)[0]
            torch.testing.assert_close(found[i], theirs, rtol=1e-10, atol=1e-10)
        assert memory["count"].tolist() == [10.0] * 4


@pytest.mark.parametrize("spec", sorted(registry.optimizers()))
def test_a_learning_rate_of_0_moves_nothing(spec):
    """On a GPU slots that have finished go on with a rate of 0 until the longest is done; their rows must stay."""
    chosen, torch_rows = registry.optimizer(spec), torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    for lr in (0.0, torch.zeros(()), torch.zeros(3, 1)):
        row, state = torch_rows.clone(), {name: torch.rand(3, 5) for name in chosen.slots}
        chosen.step(row, torch.ones(3, 5), state, lr, 1.0 if isinstance(lr, float) else torch.ones(()))
        assert torch.equal(row, torch_rows)


# -- what is remembered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["stack", "loop", "direct", "reference"])
@pytest.mark.parametrize("spec", ["sgd(momentum=0.9)", "adam"])
def test_a_kept_memory_makes_of_two_rounds_one_long_one(tiny, spec, engine):
    """Full batches and `local`, whose clients train alone: two rounds of 10 steps are 20 steps of torch.optim where the
    memory is kept, and two times 10 steps from a fresh optimizer where it is not."""
    inner = spec.rstrip(")") + "," if "(" in spec else spec + "("
    for kept in (True, False):
        sim = tiny.simulation("local", model=relu, engine=engine, batch=0, steps=10, lr=0.02,
                              optimizer=f"{inner}keep=true)" if kept else spec)
        start = sim.own.row.clone()
        sim.round()
        sim.round()
        theirs = expected(tiny, sim, start, 20 if kept else 10, optimizer=THEIRS[spec])
        if not kept:
            theirs = expected(tiny, sim, theirs, 10, optimizer=THEIRS[spec])
        torch.testing.assert_close(sim.own.row, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spec", ["sgd(momentum=0.9,keep=true)", "adamw(keep=true)"])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep", "fedfew", "fedper:personal=head"])
def test_a_resumed_run_has_the_same_bits(tiny, method, spec):
    """Killed after 2 of 4 rounds, with half of the clients in each; what optimizers remember is in the checkpoint."""
    options = {"optimizer": spec, "participation": 0.5, "lr": 0.02}
    whole = tiny.after(4, method, **options)
    first, again = tiny.simulation(method, **options), tiny.simulation(method, **options)
    first.round()
    first.round()
    again.restore(*first.snapshot())
    again.round()
    again.round()
    tiny.same(tiny.state(again), whole)
    assert any(name.startswith("memory.") for name in whole)


@pytest.mark.parametrize("spec", ["sgd(momentum=0.9,keep=true)", "adam(keep=true)", "adamw"])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedfew", FedRep(head_epochs=2)])
def test_waves_and_joined_runs_remember_alike(tiny, method, spec):
    """However clients are grouped: in waves of one, or in a stack with another seed's."""
    options = {"optimizer": spec, "lr": 0.02}
    tiny.close(tiny.after(3, method, **options), tiny.after(3, method, wave=1, **options))
    apart, joined, stack = tiny.side_by_side([method], rounds=3, **options)
    tiny.agree(apart, joined)
    assert stack.joined


# -- who takes which ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["apfl", "perfedavg", "pfedme", "scaffold"])
@pytest.mark.parametrize("option", [{"optimizer": "adam"}, {"optimizer": "sgd(momentum=0.5)"}, {"clip": 1.0}])
def test_methods_that_are_plain_sgd_say_so(tiny, method, option):
    with pytest.raises(CoterieError, match=f"{method} trains by plain SGD alone: .*; leave out (clip|optimizer)="):
        tiny.simulation(method, **option)


def test_scaffold_with_full_gradients_takes_any(tiny):
    """Its variate is then no function of the way the model went."""
    tiny.simulation("scaffold:variate=gradient", optimizer="adam").round()


def test_an_inner_step_that_forgot_to_say_so_is_refused(tiny):
    """A method from a file that does not write `only_plain`: the cohort itself refuses, in the first round."""
    sim = tiny.simulation(optimizer="adam")
    with pytest.raises(CoterieError, match="inner steps of a method's own are plain ones"):
        tiny.cohort(sim).loop(lambda net, s, batch, given: {"row": s.row}, {"row": tiny.rows(sim)})


@pytest.mark.parametrize(("options", "said"), [
    ({"optimizer": "sgd(momentum=1.5)"}, "sgd's momentum must be at least 0 and below 1, not 1.5"),
    ({"optimizer": "adam(beta2=1)"}, "adam's beta2 must be at least 0 and below 1, not 1.0"),
    ({"optimizer": "adam(eps=0)"}, "adam's eps must be above 0, not 0.0"),
    ({"optimizer": "adam(lr=0.1)"}, "clients step by the run's learning rate; write lr=0.1 beside optimizer=adam"),
    ({"optimizer": "admw"}, "unknown optimizer 'admw'; did you mean 'adamw'?"),
    ({"optimizer": "sgd(momentum=0.9"}, "opens a parenthesis that nothing closes"),
    ({"optimizer": "sgd(momentun=0.9)"}, "unknown option of sgd 'momentun'; did you mean 'momentum'?"),
    ({"optimizer": "sgd(nesterov=true)"}, "looks ahead along the momentum; give it one"),
    ({"clip": 0.0}, "clip must be above 0 or none, not 0.0"),
])
def test_bad_input_gets_a_sentence(options, said):
    with pytest.raises(CoterieError) as caught:
        Training(**options)
    assert said in str(caught.value)


def test_spellings_are_written_in_one_way():
    """Defaults go, so that two spellings of one optimizer are one."""
    assert Training(optimizer="sgd(momentum=0.9,weight_decay=0,nesterov=False)").optimizer == "sgd(momentum=0.9)"
    assert Training(optimizer="SGD()").optimizer == "sgd"


def test_python_takes_optimizers_and_metrics_as_values(tiny):
    """A value says all of itself: at the server, where defaults differ, Adam's own are spelled out."""
    data, options = tiny.federation(), {"rounds": 2, "device": "cpu", "precision": "float64"}
    values = {"optimizer": optimizers.sgd.SGD(momentum=0.9), "server": optimizers.adam.Adam(lr=0.1)}
    by_value = coterie.run("fedavg", relu, data, metric=BalancedAccuracy(), **values, **options)
    by_text = coterie.run(
        "fedavg", relu, data, optimizer="sgd(momentum=0.9)", metric="balanced_accuracy",
        server="adam(lr=0.1,beta2=0.999,eps=1e-8,corrected=true)", **options,
    )
    assert by_value.at("served").metric == "balanced_accuracy"
    assert by_value.at("served").test["loss"].tolist() == by_text.at("served").test["loss"].tolist()
