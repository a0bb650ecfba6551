"""Captured CUDA graphs give what the plain CPU path gives. Skipped where there is no CUDA device."""

import numpy as np
import pytest
import torch
from torch import nn

from coterie import models, registry
from coterie.contract.patterns import partly
from coterie.contract.records import Model
from coterie.data import Federation
from coterie.engine import waves
from coterie.running.simulation import Simulation
from coterie.running.together import Stack, alone
from coterie.running.training import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def federation() -> Federation:
    rng = np.random.default_rng(0)
    sizes = (7, 61, 23, 40, 12)
    clients = [(rng.standard_normal((n, 6)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]
    return Federation.from_clients(clients, unseen=1, classes=3)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def after(spec: str, build, device: str, **options) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    training = Training(device=device, precision="float64", batch=8, epochs=2, **options)
    simulation = Simulation(registry.method(spec), build, federation(), training)
    for _ in range(4):
        simulation.round()
    scores = {name: s.test["loss"] for name, s in simulation.evaluate().stages.items()}
    return {name: t.cpu() for name, t in simulation.snapshot()[0].items()}, scores


@pytest.mark.parametrize("build", [plain, dropping, normalising])
@pytest.mark.parametrize("spec", [*sorted(registry.methods()), "fedfew:official"])
def test_cuda_graphs_equal_the_cpu_in_float64(spec, build):
    """Same streams of randomness, same arithmetic; float64 leaves only the order of summation, far below 1e-9."""
    rows, scores = after(spec, build, "cuda", participation=0.8)
    expected, expected_scores = after(spec, build, "cpu", participation=0.8)
    for name in expected:
        torch.testing.assert_close(rows[name], expected[name], rtol=1e-9, atol=1e-9)
    for name in expected_scores:
        np.testing.assert_allclose(scores[name], expected_scores[name], rtol=1e-8)


@pytest.mark.parametrize("build", [plain, dropping, normalising])
@pytest.mark.parametrize("spec", ["fedavg", "ditto", "fedfew", "fedrep"])
@pytest.mark.parametrize("optimizer", [
    "sgd(momentum=0.9)", "sgd(momentum=0.9,nesterov=true,weight_decay=0.01,keep=true)", "adam(eps=0.1,keep=true)",
    "adamw(eps=0.1)",
])
def test_optimizers_in_graphs_equal_the_cpu_in_float64(spec, build, optimizer):
    """Finished slots of a larger bucket go on with a rate of 0: neither they nor what is kept of them may move.

    Where a gradient is 0 but for rounding, as of a bias before BatchNorm, Adam steps by lr / eps times the rounding;
    at eps = 0.1 that does not grow.
    """
    rows, _ = after(spec, build, "cuda", participation=0.8, optimizer=optimizer, lr=0.02, clip=2.0)
    expected, _ = after(spec, build, "cpu", participation=0.8, optimizer=optimizer, lr=0.02, clip=2.0)
    assert rows.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(rows[name], expected[name], rtol=1e-9, atol=1e-9)
    free, _ = after(spec, build, "cuda", participation=0.8, optimizer=optimizer, lr=0.02)
    wanted, _ = after(spec, build, "cpu", participation=0.8, optimizer=optimizer, lr=0.02)
    for name in wanted:
        torch.testing.assert_close(free[name], wanted[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prefix", ["auto", "off"])
@pytest.mark.parametrize("build", [plain, dropping, normalising])
@pytest.mark.parametrize("spec", ["fedavg", "ditto", "fedfew", "apfl", "scaffold"])
def test_frozen_bodies_in_graphs_equal_the_cpu_in_float64(spec, build, prefix):
    """The body is one tensor for the whole stack, or gone from the steps where its outputs are kept."""
    model = partly(build, train="head")
    rows, scores = after(spec, model, "cuda", participation=0.8, prefix=prefix)
    expected, expected_scores = after(spec, model, "cpu", participation=0.8, prefix=prefix)
    for name in expected:
        torch.testing.assert_close(rows[name], expected[name], rtol=1e-9, atol=1e-9)
    for name in expected_scores:
        np.testing.assert_allclose(scores[name], expected_scores[name], rtol=1e-8)


@pytest.mark.parametrize("build", [plain, dropping, normalising])
@pytest.mark.parametrize("specs", [("fedavg",), ("fedfew",), ("fedper",), ("fedprox:mu=0.1", "fedprox:mu=1"),
                                   ("ditto:personal_lr=0.1", "ditto:personal_lr=0.02"), ("pfedme", "pfedme:lam=3")])
def test_runs_in_one_stack_of_graphs_equal_runs_alone(specs, build):
    """Seeds, and numbers and learning rates of each client's own, in graphs captured for the whole stack."""

    def working(simulation):
        for _ in range(4):
            yield from simulation.rounding()
        yield from simulation.evaluating()

    ends = []
    for shared in (False, True):
        made: list[Simulation] = []
        for spec in specs:
            for seed in (0, 1, 2):
                training = Training(device="cuda", precision="float64", batch=8, participation=0.8, seed=seed)
                twin = made[0] if made and shared else None
                made.append(Simulation(registry.method(spec), build, federation(), training, twin=twin))
        stack = Stack(1000)
        if shared:
            stack.run([working(simulation) for simulation in made])
            assert not stack.apart
            assert stack.joined == 3 * len(specs) * 7  # four rounds, two scores and the newcomers' introduction
        else:
            for simulation in made:
                alone(working(simulation))
        ends.append([simulation.snapshot()[0] for simulation in made])
    for one, other in zip(*ends, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", ["fedavg", "ditto", "scaffold", "apfl"])
def test_steps_that_are_not_captured_equal_the_captured_ones(spec):
    """capture=false launches the same operations one by one; in float64 only the order of sums could differ."""
    rows, scores = after(spec, plain, "cuda", capture=False)
    expected, expected_scores = after(spec, plain, "cuda")
    for name in expected:
        torch.testing.assert_close(rows[name], expected[name], rtol=1e-9, atol=1e-9)
    for name in expected_scores:
        np.testing.assert_allclose(scores[name], expected_scores[name], rtol=1e-8)


# -- class weights, smoothed labels, augmented images ------------------------------------------------------------------


def pictures() -> Federation:
    rng = np.random.default_rng(0)
    sizes = (7, 61, 23, 40, 12)
    clients = [(rng.standard_normal((n, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]
    return Federation.from_clients(clients, unseen=1, classes=3)


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def convolved() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("build", [flat, convolved])
@pytest.mark.parametrize("spec", ["fedavg", "ditto", "apfl", "fedrod", "fedfew"])
def test_graphs_are_fed_as_the_cpu_is(spec, build):
    """Draws are tensor code inside the captured step: the same images, weights and labels as on a host."""
    options = {"augment": "flip+crop(pad=2)", "class_weights": "balanced", "label_smoothing": 0.1, "warmup": 2}
    ends = []
    for device in ("cuda", "cpu"):
        training = Training(device=device, precision="float64", batch=8, epochs=2, participation=0.8, **options)
        simulation = Simulation(registry.method(spec), build, pictures(), training)
        for _ in range(4):
            simulation.round()
        ends.append({name: t.cpu() for name, t in simulation.snapshot()[0].items()})
    for name in ends[1]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_images_of_the_kernels_are_augmented(precision):
    """Where convolutions are coterie's own the chain arranges the changed images; rows are those of the general way."""
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((24, 1, 16, 16)).astype(np.float32), rng.integers(0, 3, 24)) for _ in range(3)]
    data, cnn = Federation.from_clients(clients, classes=3), models.model("cnn", (1, 16, 16), 3)
    rows = {}
    for engine in ("direct", "stack"):
        for augment in ("none", "flip+crop(pad=2)"):
            training = Training(device="cuda", precision=precision, batch=8, engine=engine, augment=augment)
            simulation = Simulation(registry.method("fedavg"), cnn, data, training)
            for _ in range(2):
                simulation.round()
            rows[engine, augment] = simulation.server.state.tensors()["row"] - simulation.init.row
    changed = rows["stack", "flip+crop(pad=2)"]
    apart = (rows["direct", "flip+crop(pad=2)"] - changed).norm()
    assert apart < 0.2 * (rows["stack", "none"] - changed).norm()  # rounding is far below what augmentation does


# -- precision and kernels belong to an engine ------------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))


def away(simulation: Simulation, wanted: torch.Tensor) -> float:
    """The relative distance of a server's row."""
    row = simulation.server.state.tensors()["row"].double().cpu()
    return float((row - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("engine", ["auto", "stack", "reference"])
def test_float32_stays_float32_beside_tf32(engine):
    """TF32 keeps 10 bits of a factor, float32 23, so against float64 the one is off by much more than the other; ten
    times leaves room for sums, which are float32 in both. Built in this order, the switch of the last one used to count
    for all: the float32 run was computed in TF32, and both were off alike."""
    wanted = after("fedavg", wide, "cuda")[0]["server.row"]
    made = [
        Simulation(registry.method("fedavg"), wide, federation(),
                   Training(device="cuda", precision=precision, batch=8, epochs=2, engine=engine))
        for precision in ("float32", "tf32")
    ]
    for _ in range(4):
        for simulation in made:
            simulation.round()
    assert 10 * away(made[0], wanted) < away(made[1], wanted)


@pytest.mark.parametrize("spec", ["fedavg", "ditto", "fedfew", "apfl"])
def test_the_reference_engine_equals_the_captured_steps(spec):
    rows, scores = after(spec, normalising, "cuda", engine="reference")
    expected, expected_scores = after(spec, normalising, "cuda")
    for name in expected:
        torch.testing.assert_close(rows[name], expected[name], rtol=1e-9, atol=1e-9)
    for name in expected_scores:
        np.testing.assert_allclose(scores[name], expected_scores[name], rtol=1e-8)


def test_kernels_turned_off_in_one_simulation_are_on_in_another(monkeypatch):
    """The steps of the first are captured after the second was built, which used to take its kernels away."""
    kernels = pytest.importorskip("coterie.engine.kernels")
    calls, counted = [], kernels.convolve
    monkeypatch.setattr(kernels, "convolve", lambda *given: (calls.append(1), counted(*given))[1])
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((16, 1, 16, 16)).astype(np.float32), rng.integers(0, 3, 16)) for _ in range(2)]
    data, cnn = Federation.from_clients(clients, classes=3), models.model("cnn", (1, 16, 16), 3)
    first, second = (
        Simulation(registry.method("fedavg"), cnn, data,
                   Training(device="cuda", precision="tf32", batch=8, engine="stack", kernels=on))
        for on in (True, False)
    )
    for simulation, called in ((first, True), (second, False)):
        calls.clear()
        simulation.round()
        assert bool(calls) == called


def step(net, state, batch, given):
    return {"row": state.row - given.lr * net.grad(state.row, batch)}


@pytest.mark.parametrize("build", [plain, dropping, normalising])
def test_a_captured_inner_loop_equals_plain_training(build):
    """A custom step that is SGD must give the rows of `train`; both run as graphs here."""
    training = Training(device="cuda", precision="float64", batch=8, epochs=2)
    simulation = Simulation(registry.method("fedavg"), build, federation(), training)
    cohort = simulation.cohort(simulation.federation.seen)
    rows = simulation.init.row.expand(cohort.size, -1).contiguous()
    for _ in range(2):  # the second time replays
        torch.testing.assert_close(cohort.loop(step, Model(rows)).row, cohort.train(rows), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize(("spec", "build", "buffers"), [("ditto", dropping, "average"), ("apfl", plain, "average"),
                                                        ("fedavg", normalising, "local")])
def test_states_away_from_the_device_are_the_same_bits(spec, build, buffers, place):
    """Copies change nothing: states fetched ahead, also across rounds in which some of the same clients train."""
    options = {"participation": 0.8, "wave": 2, "buffers": buffers, "rounds": 9}
    expected, expected_scores = after(spec, build, "cuda", state="device", **options)
    rows, scores = after(spec, build, "cuda", state=place, **options)
    for name in expected:
        assert torch.equal(rows[name], expected[name]), name
    for name in expected_scores:
        np.testing.assert_array_equal(scores[name], expected_scores[name])


def test_a_wave_needs_no_more_than_was_estimated():
    """Peak memory of rounds and an evaluation of 64 clients, the data not counted, is at most what the wave was
    chosen by, and the estimate is not beyond ten times of it."""
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((30, 784)).astype(np.float32), rng.integers(0, 3, 30)) for _ in range(64)]
    data = Federation.from_clients(clients, classes=3)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 3))

    warm = Simulation(registry.method("ditto"), wide, data, Training(device="cuda"))
    warm.round()  # libraries take their workspaces
    columns = warm.layout.size
    del warm
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    simulation = Simulation(registry.method("ditto"), wide, data, Training(device="cuda", state="host"))
    for _ in range(2):
        simulation.round()
    simulation.evaluate()
    used = torch.cuda.max_memory_allocated() - before - simulation.engine.x.nbytes - simulation.engine.y.nbytes
    estimate = 64 * waves.slot_bytes(columns, 784, (2 * 512 + 3, 512), 10, 20, 4)
    assert estimate / 10 < used < estimate


@pytest.mark.parametrize("build", [plain, dropping])
def test_metrics_and_confusion_counts_are_those_of_the_cpu(build):
    """Counts are added up in any order on a GPU, and are whole numbers, so the sums are exact."""
    watch = ("f1", "recall", "auroc", "average_precision", "nll", "ece", "top_k(k=2)")
    found = {}
    for device in ("cuda", "cpu"):
        options = Training(device=device, precision="float64", batch=8, metric="balanced_accuracy", watch=watch)
        simulation = Simulation(registry.method("fedper"), build, federation(), options)
        simulation.round()
        found[device] = simulation.evaluate().stages
    for stage, expected in found["cpu"].items():
        np.testing.assert_array_equal(found["cuda"][stage].confusion, expected.confusion)
        for name, values in expected.test.items():
            np.testing.assert_allclose(found["cuda"][stage].test[name], values, rtol=1e-8, err_msg=name)
