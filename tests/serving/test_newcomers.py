"""`coterie personalize`: what it chooses, what it says about it, and whether its numbers can be believed."""

import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import as_before
from torch import nn

import coterie
from coterie import cli, memory, registry
from coterie.contract.method import Method
from coterie.contract.records import Models, Nothing, Record
from coterie.data import Federation, digits, load, partition
from coterie.errors import CoterieError
from coterie.evaluation.score import loss_scale
from coterie.models import model
from coterie.models.lora import adapted
from coterie.running import checkpoint
from coterie.running.saved import Saved
from coterie.running.simulation import Simulation
from coterie.running.training import Training
from coterie.serving import newcomers
from coterie.serving.estimate import FOLDS, INNER, REPLICAS, Decision, Held
from coterie.serving.newcomer_data import other_units, read
from coterie.serving.newcomers import Desk, as_drawn, personalize
from coterie.serving.personalize import _stated
from coterie.trust import code

NET = "mlp:hidden=8"


def with_training(saved, **options):
    """The run as if it had been asked for with these options."""
    training = dataclasses.replace(saved.spec.training, **options)
    return dataclasses.replace(saved, spec=dataclasses.replace(saved.spec, training=training))


def command(capsys, monkeypatch, *words):
    """The command line in this process: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    return (code,) if capsys is None else (code, *capsys.readouterr())


# -- the estimate is honest --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """FedAvg + fine-tune on digits, as a folder; and digits that were not in it."""
    x, y = digits()
    dealt = partition("iid", y[:600].numpy(), 6, seed=0)
    folder = tmp_path_factory.mktemp("run") / "fedavgft"
    coterie.run(
        "fedavgft", model("mlp", (1, 8, 8), 10, hidden=8), coterie.Federation.from_assignment(x[:600], y[:600], dealt),
        folder=folder, rounds=3, lr=0.3, epochs=3, device="cpu",
    )
    return folder, x[600:], y[600:]


def test_labels_of_pure_chance_are_estimated_at_chance(run):
    """The model learns most of its 60 random labels by heart, but the next ones can only be guessed, 1 in 10."""
    folder, x, _ = run
    y = torch.randint(0, 10, (60,), generator=torch.Generator().manual_seed(0))
    saved = Saved.open(folder, NET)
    saved = with_training(saved, epochs=150, lr=0.1)
    found = personalize(saved, (x[:60], y), adapt="yes")
    module = found.clients.layout.load(found.clients.init.module, found.row)
    assert (module(x[:60]).argmax(1) == y).float().mean() > 0.5
    assert found.estimate.confidence[0] < 0.1 < found.estimate.confidence[1]
    assert found.estimate.value < 0.25


def test_the_adaptation_takes_five_times_the_steps_at_a_fifth_of_the_learning_rate(run):
    """With whole batches that is gradient descent, written out here: 5 * 3 steps at 0.3 / 5."""
    folder, x, y = run
    saved = Saved.open(folder, NET)
    saved = dataclasses.replace(with_training(saved, batch=0), val=0.0)
    served, found = (personalize(saved, (x[:20], y[:20]), adapt=how) for how in ("no", "yes"))
    by_hand = served.module()
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(by_hand(x[:20]), y[:20])
        grads = torch.autograd.grad(loss, list(by_hand.parameters()))
        with torch.no_grad():
            for p, g in zip(by_hand.parameters(), grads):
                p -= 0.06 * g
    torch.testing.assert_close(found.module()(x[:50]), by_hand(x[:50]), rtol=1e-4, atol=1e-5)
    assert "adapted by 15 local steps" in " ".join(found.why)


def test_folds_never_see_what_they_are_scored_on(run, monkeypatch):
    """Every sample is held out once; each fold chooses anew whether to adapt, without its held-out samples."""
    folder, x, y = run
    parts = []
    score = Desk.score

    def watched(self, x, y, all_parts, name):
        parts.extend(all_parts)
        return score(self, x, y, all_parts, name)

    monkeypatch.setattr(Desk, "score", watched)
    personalize(Saved.open(folder, NET), (x[:23], y[:23]))
    first = FOLDS * REPLICAS
    outer, whole = parts[:FOLDS], parts[first : first + INNER]
    for k, (kept, held) in enumerate(parts[:first]):  # a fold's replicas are made of the same samples
        assert np.array_equal(kept, outer[k % FOLDS][0])
        assert np.array_equal(held, outer[k % FOLDS][1])
    for some, samples in ((outer, range(23)), (whole, range(23))):
        assert sorted(i for _, held in some for i in held) == list(samples)
    for fold in range(FOLDS):
        mine = parts[first + INNER * (1 + fold) : first + INNER * (2 + fold)]
        assert sorted(i for _, held in mine for i in held) == sorted(outer[fold][0])
        for kept, held in [*mine, outer[fold]]:
            assert not set(kept) & set(held)
            assert not set(kept) & set(outer[fold][1])


def test_chunks_of_folds_give_the_same_estimate(run, monkeypatch, request):
    """Folds are computed together as far as memory allows; how many is no part of the result, and an engine with its
    stack is gone before the next but one is made."""
    folder, x, y = run
    found, waves, engines = [], [], []
    clients = Desk.clients

    def watched(self, data):
        waves[-1].append(data.clients)
        engines[-1].append(sum(one() is not None for one in made))
        new = clients(self, data)
        made.append(weakref.ref(new.engine))
        return new

    monkeypatch.setattr(Desk, "clients", watched)
    gc.disable()  # when it comes by itself is chance
    request.addfinalizer(gc.enable)
    for held, fit in ((newcomers.HELD, None), (8 * x[:12].nbytes, None), (newcomers.HELD, 8)):
        made = []
        waves.append([])
        engines.append([])
        monkeypatch.setattr(newcomers, "HELD", held)
        if fit is not None:
            each = found[0].clients.client_bytes(1)
            monkeypatch.setattr(memory, "free", lambda device, bytes=2 * fit * each: bytes)
        found.append(personalize(Saved.open(folder, NET), (x[:12], y[:12]), adapt="yes"))
    assert FOLDS * REPLICAS == 30
    assert waves == [[1, 30, 1], [1, 8, 8, 8, 6, 1], [1, 8, 8, 8, 6, 1]]  # how many fit, the folds, the model itself
    assert max(engines[1] + engines[2]) <= 1
    for other in found[1:]:
        assert other.estimate == found[0].estimate
        assert torch.equal(other.row, found[0].row)


LIMITED = """
import resource, sys
import torch
from coterie.data import digits
from coterie.running.saved import Saved
from coterie.running.simulation import Simulation
from coterie.running.training import Training
from coterie.serving.newcomers import personalize

torch.set_num_threads(1)
saved, (x, y) = Saved.open(sys.argv[1], "mlp:hidden=1000,1000"), digits()
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (450 << 20), used + (450 << 20)))
print(personalize(saved, (x[90:102], y[90:102]), adapt="yes").estimate)
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not keep RLIMIT_DATA")
def test_folds_are_computed_as_many_at_once_as_memory_holds(tmp_path):
    """30 folds of a million parameters are 130 MB each time they are copied, and training copies them several times:
    more than the 450 MB that the other process may take. It says what this one does, which takes them at once."""
    x, y = digits()
    dealt = partition("iid", y[:90].numpy(), 3, seed=0)
    coterie.run("fedavg", model("mlp", (1, 8, 8), 10, hidden="1000,1000"),
                coterie.Federation.from_assignment(x[:90], y[:90], dealt), folder=tmp_path / "run", rounds=1,
                device="cpu")
    found = personalize(Saved.open(tmp_path / "run", "mlp:hidden=1000,1000"), (x[90:102], y[90:102]), adapt="yes")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "run"], env=environment, capture_output=True,
                          text=True, check=False)
    assert done.stdout.strip() == str(found.estimate), done.stderr


def test_regression_gets_a_mean_squared_error(tmp_path):
    x = torch.randn(5, 40, 3, generator=torch.Generator().manual_seed(0))
    y = x[:, :, 0] * 2
    data = coterie.Federation.from_clients(list(zip(x[:4], y[:4], strict=True)))
    coterie.run("fedavg", model("linear", (3,), 1), data, folder=tmp_path / "r", rounds=20, device="cpu")
    found = personalize(Saved.open(tmp_path / "r", "linear"), (x[4], y[4]))
    assert (found.estimate.metric, found.estimate.scale.title) == ("loss", "MSE")
    assert _stated(found.estimate)[0].startswith("Estimate: MSE 0.")
    named = dataclasses.replace(found.estimate, scale=loss_scale(0, "huber"))
    assert _stated(named)[0].startswith("Estimate: huber 0.")
    assert 0 <= found.estimate.interval[0] <= found.estimate.value <= found.estimate.interval[1] < 1


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory, run):
    """A run of the command line with two models, and files of newcomers."""
    folder = tmp_path_factory.mktemp("place")
    _, x, y = run
    x, y = x.numpy(), y.numpy()
    np.savez(folder / "new.npz", x=x[:40], y=y[:40])
    np.savez(folder / "few.npz", x=x[:4], y=y[:4])
    np.savez(folder / "none.npz", x=x[:40])
    np.savez(folder / "masked.npz", x=x[:40], y=np.full(40, -1))
    np.savez(folder / "partly.npz", x=x[:40], y=np.where(np.arange(40) < 10, y[:40], -1))
    np.savez(folder / "named.npz", x=x[:40], y=np.array(["zero", "one"])[np.arange(40) % 2])
    (folder / "table.csv").write_text("a,species\n1,2\n3,4\n")
    np.savez(folder / "two.npz", x=x[:40], y=y[:40], client=np.arange(40) % 2)
    np.savez(folder / "flat.npz", x=x[:40].reshape(40, 64), y=y[:40])
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    words = ["--clients", 4, "--model", NET, "--rounds", 3, "--set", "device=cpu", "--out", "run"]
    assert command(None, patch, "run", "ifca:models=2", *words) == (0,)
    patch.undo()
    return folder


@pytest.fixture
def go(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    return lambda *words: command(capsys, monkeypatch, *words)


def test_personalize_says_what_it_chose_and_why(go, place):
    code, text, _ = go("personalize", "run", "--data", "new.npz", "-o", "new.safetensors")
    assert code == 0
    assert "the model of least loss on its training data" in text
    assert "of the 2 it was sent; their losses are" in text
    assert "cross-validation" in text
    assert "On 13 further samples of this client" in text  # 40 / 3
    tensors, facts = checkpoint.load(place / "new.safetensors")
    beside = json.loads((place / "new.json").read_text())
    assert {**beside, "format": 1} == facts
    assert sorted(tensors) == sorted(beside["layout"]["tensors"])
    losses = beside["facts"]["models"]["loss"]["train"]
    assert beside["facts"]["models"]["chosen"] == int(np.argmin(losses))
    assert beside["method"] == "ifca:models=2"


def test_personalize_for_machines(go):
    """The json holds what the text says, and nothing else is printed."""
    code, text, _ = go("personalize", "run", "--data", "two.npz", "--client", "1", "-o", "two.safetensors", "--report",
                       "json", "--adapt", "no", "--future", "8")
    facts = json.loads(text)
    assert code == 0
    assert (facts["client"], facts["adapted"]) == ("1", False)
    assert [facts["estimate"][key] for key in ("future", "n", "level")] == [8, 20, 0.95]


def test_samples_without_a_label_are_left_out(go):
    """10 of the 40 have one; -1 stands for none."""
    code, text, _ = go("personalize", "run", "--data", "partly.npz", "-o", "partly.safetensors", "--report", "json")
    assert code == 0
    assert json.loads(text)["estimate"]["n"] == 10


def test_the_fallback_is_the_model_used_most_however_many_clients_there_are():
    """`alpha` counts participants. With as many of them as models it looks like a number a model."""
    rows = torch.arange(6.0).reshape(3, 2)
    report = {"alpha": [0.8, 0.1, 0.1], "clients": [9, 1, 2], "mass": [0.2, 0.3, 0.5]}
    assert torch.equal(registry.method("fedfew:models=3").fallback(Models(rows), None, report), rows[2])


class Grouped(Method):
    """Says who is in which cluster, whatever its state calls that."""

    newcomer = "the model of its group"

    def clusters(self, server):
        return server.group

    def few(self, server):
        return server.centres


@dataclasses.dataclass(frozen=True)
class Groups(Record):
    group: torch.Tensor
    centres: torch.Tensor


def test_a_newcomers_cluster_is_what_the_method_says():
    """The fifth client is in group 1 with two of the four before it. Fields called cluster and rows were looked for."""
    state = Groups(torch.tensor([0, 1, 0, 1, 1]), torch.zeros(2, 3))
    nothing = Nothing()
    came = SimpleNamespace(server=SimpleNamespace(method=Grouped(), state=state), rows=torch.zeros(1, 3),
                           payload=nothing, told=nothing, mine=nothing)
    facts, why = newcomers._explained(came, SimpleNamespace(n=[7]), 4)
    assert facts["cluster"] == {"chosen": 1, "clusters": 2, "members": 2}
    assert why[1].startswith("It went to cluster 1 of 2")


def test_a_newcomers_table_is_encoded_as_the_runs_was(tmp_path, monkeypatch, capsys):
    """Columns in another order, a category missing, one class only and no options: the features are the run's, by its
    own scale. Without the label's column there is the fallback."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["weight,ward,hospital,outcome"]
    for k in range(90):
        lines.append(f"{100 + k},{'east' if k % 2 else 'west'},h{k % 3},{('ill', 'well')[int(rng.random() < 0.5)]}")
    (tmp_path / "all.csv").write_text("\n".join(lines))
    words = ["--data", "all.csv:label=outcome,client=hospital,scale=true", "--model", "linear", "--rounds", 1]
    assert command(capsys, monkeypatch, "run", "fedavg", *words, "--set", "device=cpu", "--out", "run")[0] == 0
    (tmp_path / "new.csv").write_text("outcome,hospital,ward,weight\n" + "well,h9,west,100\n" * 6)
    (x, y), name, *_ = read("new.csv", None, Saved.open("run"))
    weights = np.arange(100, 190)
    assert x[0].tolist() == pytest.approx([(100 - weights.mean()) / weights.std(), 0, 1])
    assert (y.tolist(), name) == ([1] * 6, "h9")
    code, text, errors = command(capsys, monkeypatch, "personalize", "run", "--data", "new.csv", "-o", "n.safetensors")
    assert code == 0, errors
    job = json.loads((tmp_path / "n.json").read_text())["job"]
    assert (job["class_names"], list(job["encoding"]["columns"])) == (["ill", "well"], ["weight", "ward"])
    (tmp_path / "nolabel.csv").write_text("hospital,ward,weight\n" + "h9,west,100\n" * 6)
    code, text, _ = command(capsys, monkeypatch, "personalize", "run", "--data", "nolabel.csv", "-o", "f.safetensors")
    assert code == 0
    assert "nolabel has no column 'outcome', which would hold the labels" in text
    (tmp_path / "less.csv").write_text("outcome,ward\n" + "well,west\n" * 6)
    code, _, errors = command(capsys, monkeypatch, "personalize", "run", "--data", "less.csv", "-o", "f.safetensors")
    assert code == 2
    assert ("has no column 'weight', which the run's data have: add it, with empty cells where nothing is known, which "
            "fill=mean fills in.") in errors  # the run is scaled, so it knows the mean


def test_a_newcomers_points_are_thousands_where_the_runs_decimals_are_commas(tmp_path, monkeypatch, capsys):
    """3.501 is 3501 beside 1.234,56; alone in a file it could be either, and was read as 3.501 without a word."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["income;client;label"]
    lines += [f'"1.{100 + k},50";h{k % 3};{("no", "yes")[int(rng.random() < 0.5)]}' for k in range(60)]
    (tmp_path / "all.csv").write_text("\n".join(lines))
    words = ["--data", "all.csv:decimal=comma", "--model", "linear", "--rounds", 1, "--set", "lr=1e-6"]
    assert command(capsys, monkeypatch, "run", "fedavg", *words, "--out", "run")[0] == 0
    (tmp_path / "whole.csv").write_text("income;label\n" + "3.501;yes\n2.750;no\n" * 5)
    with pytest.raises(CoterieError, match=r"decimal=comma cannot read .* decimal=auto reads a file whose points"):
        read("whole.csv", None, Saved.open("run"))
    (tmp_path / "cents.csv").write_text("income;label\n" + '"3.501,00";yes\n"2.750,25";no\n' * 5)
    (x, _), *_ = read("cents.csv", None, Saved.open("run"))
    assert x[:2, 0].tolist() == [3501, 2750.25]
    (x, _), *_ = read("whole.csv:decimal=auto", None, Saved.open("run"))
    assert x[:2, 0].tolist() == pytest.approx([3.501, 2.75])


@pytest.mark.parametrize("method", ["fedamp", "cfl"])
def test_a_newcomer_to_a_run_with_churn_comes_after_those_that_arrived(tmp_path, monkeypatch, capsys, run, method):
    """The run is over before its last client arrives, so its server knows 3 of 4: it would have no place 4."""
    _, x, y = run
    monkeypatch.chdir(tmp_path)
    np.savez("new.npz", x=x[:10].numpy(), y=y[:10].numpy())
    (tmp_path / "churn.csv").write_text("client,arrives,leaves\n3,9,\n")
    words = ["--clients", 4, "--model", NET, "--rounds", 2, "--set", "device=cpu", "--churn", "churn.csv"]
    assert command(capsys, monkeypatch, "run", method, *words, "--out", "run")[0] == 0
    code, text, errors = command(capsys, monkeypatch, "personalize", "run", "--data", "new.npz", "-o", "n.safetensors")
    assert code == 0, errors
    assert "labelled samples" in text


@pytest.mark.parametrize(("data", "sentence"), [
    ("few.npz", "few has 4 labelled samples, and at least 5 are needed"), ("none.npz", "none has no labels"),
    ("masked.npz", "masked has no labels"), ("table.csv", "table has no column 'label'; say which it is"),
])
def test_with_nothing_to_adapt_with_there_is_the_fallback(go, place, data, sentence):
    """Exit 0: a model was asked for and is there. It is that of the cluster with most clients in its round."""
    code, text, _ = go("personalize", "run", "--data", data, "-o", "fallback.safetensors")
    assert code == 0
    assert sentence in text
    assert "nothing can be said about how good the model is" in text
    facts = json.loads((place / "fallback.json").read_text())
    assert (facts["fallback"], facts["estimate"]) == (True, None)
    saved = Saved.open(place / "run")
    most = int(np.argmax(saved.report(facts["round"])["clients_per_model"])) if facts["round"] else 0
    tensors, _ = checkpoint.load(place / "fallback.safetensors")
    row = saved.server(saved.init(), *saved.checkpoint()).state.rows[most]
    assert np.isclose(sum(float(t.sum()) for t in tensors.values()), float(row.sum()), atol=1e-4)


@pytest.mark.parametrize(("method", "said"), [
    ("fedper", "Of this model 3 never trained, as clients keep theirs: expect little more than chance."),
    ("lgfedavg", "Of this model 1 never trained, as clients keep theirs: expect little more than chance."),
    ("local", "All of it is as it was drawn at the start: it answers by chance."), ("fedavg", ""), ("ffalora", ""),
])
def test_what_nobody_trained_of_a_fallback_is_named(method, said):
    """A head that never leaves its client is the initial one for whoever has no labels. FFA-LoRA's A is as drawn by
    its rule and trained through B, so nothing is said of it."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
    x, y = digits()
    federation = Federation.from_clients([(x[i::4][:40], y[i::4][:40]) for i in range(4)], classes=10)
    model = adapted(net, "lora:rank=2") if method == "ffalora" else net
    simulation = Simulation(registry.method(method), model, federation, Training(rounds=1, device="cpu"))
    simulation.round()
    row = simulation.method.fallback(simulation.server.state, simulation.init, {})
    assert as_drawn(row, simulation.init) == ([said] if said else [])


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_model_with_batch_normalisation_for_whoever_has_no_labels(tmp_path, monkeypatch, capsys, run, buffers):
    """One blank sample has no statistics of a batch, and none are asked for; where every client keeps its own, the
    server has those of the start alone, so that its model would be of no use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n\ndef Net(inputs, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))\n"
    )
    np.savez("none.npz", x=run[1][:3].numpy())
    words = ["--clients", 4, "--model", "normed.py:Net", "--rounds", 2, "--set", f"buffers={buffers}"]
    assert command(capsys, monkeypatch, "run", "fedavg", *words, "--out", "run")[0] == 0
    code, text, errors = command(capsys, monkeypatch, "personalize", "run", "--data", "none.npz", "-o", "n.safetensors")
    if buffers == "average":
        assert code == 0, errors
        assert "none has no labels" in text
    else:
        assert code == 2
        said = " ".join(errors.split())
        assert "keeps the statistics of its batch normalisation (buffers=local), so the server has none for it" in said
        assert not (tmp_path / "n.safetensors").exists()


@pytest.mark.parametrize(("words", "sentence"), [
    (["--data", "two.npz"], "the samples of 2 clients; name the newcomer with --client"),
    (["--data", "two.npz", "--client", "7"], "unknown client in two.npz '7'"),
    (["--data", "new.npz", "--client", "7"], "names no clients"),
    (["--data", "flat.npz"], "the run's samples have shape [1, 8, 8]; those of flat have [64]"),
    (["--data", "new.npz", "--adapt", "maybe"], "unknown value of --adapt 'maybe'"),
    (["--data", "new.npz", "--report", "jsn"], "did you mean 'json'"),
    (["--data", "new.npz", "--future", "0"], "at least 1 further sample"),
    (["--data", "new.npz", "--model", "linear"], "holds another model"),
    (["--data", "named.npz"], "names 2 classes and the run has 10; name all of them in the run's order"),
    (["--data", "gone.npz"], "there is no file"),
])
def test_mistakes_get_a_sentence(go, place, words, sentence):
    code, _, errors = go("personalize", "run", *words, "-o", "bad.safetensors")
    assert (code, sentence in errors) == (2, True), errors
    assert not (place / "bad.safetensors").exists()


@pytest.mark.parametrize(("wanted", "found", "said"), [
    ((3, 16, 24), (1, 16, 24), "; of images, --data FOLDER:colour=rgb reads them as the run's"),
    ((1, 8, 8), (3, 8, 8), "; of images, --data FOLDER:colour=grey reads them as the run's"),
    ((3, 16, 24), (1, 32, 20), "; of images, --data FOLDER:colour=rgb,size=24x16 reads them as the run's"),
    ((1, 8, 8), (1, 8, 9), "; of images, --data FOLDER:size=8x8 reads them as the run's"),
    ((2, 8, 8), (1, 8, 8), ""),  # two channels are no image
    ((4,), (5,), ""),
])
def test_images_of_another_shape_are_told_what_to_type(wanted, found, said):
    """size is width x height, and samples are [channels, height, width]."""
    assert newcomers._of_images(wanted, found) == said


def test_a_folder_that_is_no_run_gets_a_sentence(go, place):
    (place / "several" / "ifca" / "seed0").mkdir(parents=True)
    (place / "several" / "ifca" / "seed0" / "config.json").write_text("{}")
    for folder, sentence in (("several", "holds 1 run; name one of them, e.g. several/ifca/seed0"),
                             ("gone", "is not a run folder"), ("several/ifca/seed0", "has no checkpoint yet")):
        code, _, errors = go("personalize", folder, "--data", "new.npz", "-o", "bad.safetensors")
        assert (code, sentence in errors) == (2, True), errors


def test_a_run_made_in_python_wants_its_model_named(run):
    folder, x, y = run
    with pytest.raises(CoterieError, match=r"name it, e\.g\. --model"):
        personalize(Saved.open(folder), (x[:20], y[:20]))


def test_runs_of_older_versions_are_read_with_their_data(go, place):
    """Their config.json does not say what a sample looks like."""
    config = place / "run" / "config.json"
    kept = config.read_text()
    try:
        as_before(config, lambda values: values.pop("samples"))
        assert Saved.open(place / "run").spec.shape == (1, 8, 8)
    finally:
        config.write_text(kept)


# -- other units, and constant answers ---------------------------------------------------------------------------------


def hospital(path, n, factor=1.0, cost=1.0, clients=True, seed=0, words=("no", "yes")):
    """Creatinine (88 ± 20), age, and whether somebody is ill, which both say; what it costs is linear in both."""
    rng = np.random.default_rng(seed)
    crea, age = 88 + 20 * rng.standard_normal(n), 60 + 10 * rng.standard_normal(n)
    ill = (crea - 88) / 20 + (age - 60) / 10 + 0.1 * rng.standard_normal(n) > 0
    costs = 5000 + 20 * (crea - 88) + 40 * (age - 60)
    lines = [f"{factor * c},{a},{words[int(i)]},{cost * p}" + (f",h{k % 3}" if clients else "")
             for k, (c, a, i, p) in enumerate(zip(crea, age, ill, costs, strict=True))]
    path.write_text("crea,age,ill,cost" + (",site" if clients else "") + "\n" + "\n".join(lines) + "\n")
    return costs * cost


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Runs on the table of three hospitals, scaled: of classes, of a number, and of classes without a scale."""
    folder = tmp_path_factory.mktemp("hospitals")
    hospital(folder / "all.csv", 240)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    for out, told in (("ill", "label=ill,ignore=cost,scale=true"), ("cost", "label=cost,ignore=ill,scale=true"),
                      ("raw", "label=ill,ignore=cost")):
        words = ["--data", f"all.csv:client=site,{told}", "--model", "linear", "--rounds", 20, "--set", "device=cpu"]
        lr = 1e-4 if out == "raw" else 0.1
        assert command(None, patch, "run", "fedavg", *words, "--set", f"lr={lr}", "--out", out) == (0,)
    patch.undo()
    return folder


@pytest.fixture
def given(hospitals, capsys, monkeypatch):
    monkeypatch.chdir(hospitals)

    def ask(run, *more, **options):
        targets = hospital(hospitals / "new.csv", 40, clients=False, seed=1, **options)
        words = ["personalize", run, "--data", "new.csv", "-o", "new.safetensors", *more]
        words += [] if "--adapt" in words else ["--adapt", "no"]
        code, text, errors = command(capsys, monkeypatch, *words)
        assert code == 0, errors
        return text, json.loads((hospitals / "new.json").read_text()), targets

    return ask


def test_a_newcomer_in_the_runs_units_is_not_warned(given):
    for run in ("ill", "cost"):
        text, beside, _ = given(run)
        assert "constant answer" not in text
        assert "other units?" not in text
        assert "another meaning" not in text
        assert beside["facts"]["other_units"] == []
        assert not beside["facts"]["constant"]["does_as_well"]


def test_a_newcomer_without_labels_of_a_run_that_scaled_its_target(hospitals, capsys, monkeypatch):
    """The target's mean and deviation say nothing of a file that has no such column; what was left out is said."""
    monkeypatch.chdir(hospitals)
    hospital(hospitals / "bare.csv", 12, clients=False)
    lines = (hospitals / "bare.csv").read_text().splitlines()
    (hospitals / "bare.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n,60.5,no\n")
    words = ["personalize", "cost", "--data", "bare.csv:skip=true", "-o", "bare.safetensors"]
    code, text, errors = command(capsys, monkeypatch, *words)
    assert code == 0, errors
    assert "bare has no labels" in text
    assert "left out: " in text


def test_a_newcomer_in_other_units_is_told_so_and_that_a_constant_answer_does_as_well(given, hospitals):
    """Creatinine in mg/dl is 88.4 times smaller: 1 ± 0.23 where the run has 88 ± 20, so everybody seems well. The most
    frequent class, counted a second time from the labels, is right for more."""
    text, beside, _ = given("ill", factor=1 / 88.4)
    assert re.search(r"'crea' is (0\.9|1\.0)\d* ± 0\.\d+ here and 8\d\.\d ± \S+ in the run \(mean ± deviation\)", text)
    assert "'age'" not in text
    assert beside["facts"]["other_units"] == ["crea"]
    guess, value = beside["facts"]["constant"]["value"], beside["estimate"]["value"]
    assert ("A constant answer (its most frequent class) does" in text) == (value <= guess)
    assert value <= guess
    labels = [line.split(",")[2] for line in (hospitals / "new.csv").read_text().splitlines()[1:]]
    assert guess == pytest.approx(max(labels.count("no"), labels.count("yes")) / 40)
    assert beside["facts"]["constant"]["does_as_well"]
    printed = json.loads(given("ill", "--report", "json", factor=1 / 88.4)[0])
    assert printed["why"] == beside["why"]
    assert any(why.startswith("A constant answer (its most frequent class)") for why in printed["why"])


def test_a_newcomer_of_a_single_class_is_told_that_its_estimate_says_little(given):
    """All of its patients are well, and the run says so of such creatinine; so does who says no without a look."""
    text, beside, _ = given("ill", "--adapt", "yes", factor=0.4, words=("no", "no"))
    assert beside["estimate"]["value"] == beside["facts"]["constant"]["value"] == 1
    assert "All its labels are one class: always answering that would be right as often" in text
    assert beside["facts"]["constant"]["does_as_well"]


@pytest.mark.parametrize("adapt", ["no", "yes", "auto"])
def test_a_newcomer_with_labels_of_another_meaning_is_told_so(given, adapt):
    """Its 'yes' is what the run calls 'no': the shared model is wrong about nearly all, which adaptation hides."""
    text, beside, _ = given("ill", "--adapt", adapt, words=("yes", "no"))
    found = beside["facts"]["other_names"]
    assert found["right"] + found["renamed"] == found["n"] == 40
    assert found["renamed"] > 35
    assert (f"The run's model is right about {found['right']} of its 40 samples as they are labelled, and about "
            f"{found['renamed']} if it has 'yes' where the run says 'no', 'no' where the run says 'yes': labels of "
            "another meaning?") in text


def test_a_number_to_predict_in_thousands_is_named_beside_its_own_mean(given):
    """Of an error that is the squared distance to the mean: the folds' mean is that of 36 others, so it scores
    var * (1 + 1 / 36) or so."""
    text, beside, costs = given("cost", cost=1e-3)
    said = f"'cost' is {costs.mean():.3g} ± {costs.std():.3g} here and "
    assert said in text
    assert beside["facts"]["other_units"] == ["cost"]
    assert "A constant answer (its mean) does better: MSE " in text
    assert beside["facts"]["constant"]["value"] == pytest.approx(costs.var() * (1 + 1 / 36), rel=0.1)
    assert beside["estimate"]["value"] > 1e6


def test_without_a_scale_the_constant_answer_alone_speaks(given):
    text, beside, _ = given("raw", factor=1 / 88.4)
    assert "A constant answer (its most frequent class) does" in text
    assert beside["facts"]["other_units"] == []


def test_a_loss_that_takes_a_deviation_beside_the_mean_knows_no_constant_answer(tmp_path):
    """-log N(y; o_0, exp(o_1)) takes two numbers a sample; handed the targets' mean alone, it would fail."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def likelihood(outputs, y):\n"
        "    return outputs[:, 1] + 0.5 * ((y - outputs[:, 0]) / outputs[:, 1].exp()).square()\n"
        "def net(shape, outputs):\n    return torch.nn.Linear(3, 2)\n")
    x = torch.randn(5, 40, 3, generator=torch.Generator().manual_seed(0))
    samples = list(zip(x, x[:, :, 0], strict=True))
    data, loss = coterie.Federation.from_clients(samples[:4]), f"{tmp_path}/own.py:likelihood"
    coterie.run("fedavg", torch.nn.Linear(3, 2), data, folder=tmp_path / "r", rounds=2, device="cpu", lr=0.01,
                loss=code.module(tmp_path / "own.py", "the loss").likelihood)
    found = personalize(Saved.open(tmp_path / "r", f"{tmp_path}/own.py:net", loss), samples[4], adapt="no")
    assert "constant" not in found.facts
    assert not any("constant answer" in why for why in found.why)


@pytest.mark.parametrize(("values", "named"), [
    ([60, 62, 58, 61, 59, 90], False),  # as in the run
    ([2, 14, 9, 4, 12, 6], False),  # a ward for children: 5 deviations away, and less than half as wide
    ([62, 62, 62, 62, 62, 62], False),  # narrow, and where the run is
    ([0, 1, 0, 1, 1, 1], False),  # an indicator, whatever the run's column was
    ([60, 62, 58, 61, 59, 9000], False),  # one wrong value
    ([600, 620, 580, 610, 590, 900], True),
    ([0.060, 0.062, 0.058, 0.061, 0.059, 0.09], True),
    ([-100, 160, 20, 100, 240, -40], True),  # as far on average, eleven times as wide
])
def test_which_columns_look_like_other_units(values, named):
    """The run's column is 60 ± 10. Two columns of another one's categories stand before it."""
    encoding = {"columns": {"ward": ["east", "west"], "age": None}, "label": "ill", "scale": {"age": [60.0, 10.0]}}
    x = torch.zeros(6, 3)
    x[:, 2] = (torch.tensor(values) - 60) / 10
    found = other_units(encoding, x, torch.zeros(6, dtype=torch.int64))
    assert list(found) == (["age"] if named else [])


@pytest.mark.parametrize(("fill", "own"), [({"crea": 90.0}, 90.0), (None, 90.0), ({"crea": 0.0}, 0.0)])
def test_a_filled_gap_hides_no_unit_of_a_newcomer(fill, own):
    """The run is 90 ± 20. One gap beside 20 values of 0.895 ± 0.058 = 0.01 sqrt((20^2 - 1) / 12), filled with the run's
    mean, makes them 5.1 ± 19: as wide as the run. Without it they lie together, at a hundredth of the run's mean. A
    newcomer's own fill=mean in a run without fill is the run's mean, too."""
    encoding = {"columns": {"crea": None}, "label": "ill", "scale": {"crea": [90.0, 20.0]}}
    encoding |= {"fill": fill} if fill else {}
    values = torch.tensor([own, *(0.8 + 0.01 * k for k in range(20))])
    x = ((values - 90) / 20)[:, None]
    found = other_units(encoding, x, torch.zeros(21, dtype=torch.int64))
    assert found["crea"].startswith("'crea' is 0.895 ± 0.0577 here and 90 ± 20 in the run")


@pytest.mark.parametrize(("scanner", "said"), [
    (1, None),
    (2, "'scanner' is 2 ± 0 here (mean ± deviation) and always 1 in the run, which has learned nothing of it: other "
        "units?"),
    (1000, "'scanner' is 1000 ± 0 here (mean ± deviation) and always 1 in the run"),
])
def test_a_column_that_was_always_the_same_in_the_run(tmp_path, scanner, said):
    """Its deviation in the run is 0, and any other number is one that the model has not seen, however near."""
    for name, value in (("run", 1), ("new", scanner)):
        lines = [f"{value},{40 + k},{k % 2}" for k in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["scanner,age,label", *lines]) + "\n")
    encoding = load(tmp_path / "run.csv", scale=True, schema=str(tmp_path / "schema.json")).encoding
    assert encoding["constant"] == ["scanner"]
    new = load(tmp_path / "new.csv", schema=str(tmp_path / "schema.json"))
    assert new.encoding["constant"] == ["scanner"]
    found = other_units(encoding, new.x, new.y)
    assert list(found) == ([] if said is None else ["scanner"])
    assert said is None or found["scanner"].startswith(said)


def test_an_adaptation_that_diverged_is_called_so_and_its_json_has_no_nan():
    right, answer = np.ones(6), np.zeros(6, dtype=np.int64)
    served, adapted_too = Held(right, np.ones(6), answer), Held(right, np.full(6, np.nan), answer)
    said = newcomers._why_adapted(Decision(False, served, adapted_too), 5, classes=True)
    assert "It was not adapted, because that diverged in a" in said
    assert adapted_too.facts() == {"n": 6, "correct": 6, "loss": None}
