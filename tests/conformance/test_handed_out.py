"""What leaves a run is what its table reports: exported and personalized files, `model_for` and the models of sites.

Every method is run by the real command on clients whose validation scores go up and down, so that the round chosen on
them is seldom the last. Each model that is handed out is then scored without the library: its file is loaded into the
plain module, which answers the client's test samples, and accuracy and cross entropy must be those of the lines that
clients.csv has for the round in the table.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import adapter_for
from commands import exit_code, in_process_shown
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import coterie
from coterie import registry
from coterie.contract.sent import MOST
from coterie.data.partition import generator
from coterie.data.splits import deal
from coterie.flower.job import Job
from coterie.flower.loopback import Loopback
from coterie.flower.policy import Policy
from coterie.flower.rounds import serve
from coterie.flower.site import Site
from coterie.report.table import to_csv
from coterie.running.chosen import CHOSEN
from coterie.running.folder import Folder
from coterie.running.training import Training
from coterie.serving import newcomers
from coterie.serving.portable import read_model

METHODS = sorted(registry.methods())
OFTEN = ("ditto", "fedavg", "fedfew", "fedper", "pacfl")  # with and without states of the clients, few models, clusters
EVERY = [m if m in OFTEN else pytest.param(m, marks=pytest.mark.long) for m in METHODS]
NAMES = ("berlin", "lyon", "oslo", "turin", "wien")
FEATURES, CLASSES, MODEL = 4, 3, "mlp:hidden=5"
VAL = 0.1
"""The share of validation samples that a newcomer's are dealt with, the command's own default."""
ROUNDS = 8
OPTIONS = {  # the learning rate rises to where steps jump about, so that scores are best before the end
    "batch": 4, "lr": 1.5, "warmup": 6, "epochs": 2, "evaluate_every": 1, "precision": "float64", "device": "cpu",
}

SMALL = 0.2
"""The alpha of adapters: with a larger one steps of this length lead to NaN."""


def options_for(method):
    """Where adapters train beside everything else, steps are a bit shorter, for the same reason."""
    return OPTIONS | ({"lr": 0.6} if registry.method(method).adapters else {})


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Newcomers are computed where there is a GPU on it; the runs they are compared with are not."""
    monkeypatch.setattr(newcomers, "anywhere", lambda training: training)


@pytest.fixture(scope="module")
def samples():
    """Each client's 30 samples and 20 for testing: classes that overlap, and labels of which a third is noise.

    Those for training are in the order in which personalize deals a client's samples, so that whichever client is kept
    out of training and comes as a newcomer trains and chooses on the same samples as in the table.
    """
    rng, found = np.random.default_rng(3), {}
    centres = rng.standard_normal((CLASSES, FEATURES))
    for i, name in enumerate(NAMES):
        y = np.where(rng.random(50) < 0.33, rng.integers(0, CLASSES, 50), (rng.integers(0, 2, 50) + i) % CLASSES)
        x = (centres[y] + 1.2 * rng.standard_normal((50, FEATURES))).astype(np.float32)
        train, val, _ = deal(np.arange(30), VAL, 0.0, generator(0, "split", name))
        found[name] = SimpleNamespace(
            train=(x[train], y[train]), val=(x[val], y[val]), test=(x[30:], y[30:]), brought=(x[:30], y[:30])
        )
    return found


@pytest.fixture(scope="module")
def data(samples, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "clients.npz"
    parts = [(name, split, *getattr(one, split)) for name, one in samples.items() for split in ("train", "val", "test")]
    np.savez(
        path, x=np.concatenate([x for *_, x, _ in parts]), y=np.concatenate([y for *_, y in parts]),
        client=np.concatenate([[name] * len(y) for name, _, _, y in parts]),
        split=np.concatenate([[split] * len(y) for _, split, _, y in parts]),
    )
    return path


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """method -> the folder of its run, by the real command; one client is unseen."""
    found = {}

    def build(method):
        if method not in found:
            found[method] = folder = tmp_path_factory.mktemp(method) / "run"
            words = ["--data", data, "--unseen", 1, "--model", MODEL, "--rounds", ROUNDS, "--out", folder]
            words += ["--adapter", adapter_for(method, SMALL)] if adapter_for(method, SMALL) else []
            words += [word for name, value in options_for(method).items() for word in ("--set", f"{name}={value}")]
            with pytest.MonkeyPatch.context() as patch:
                assert exit_code(patch, "run", method, *words) == 0
        return found[method]

    return build


def reported(folder, table):
    """stage -> the round of the table, and client -> accuracy and loss that clients.csv has for that round."""
    with open(table, newline="") as file:
        rounds = {line["stage"]: int(line["rounds"]) for line in csv.DictReader(file) if line["when"] == "chosen"}
    with open(folder / "clients.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    scores = {
        stage: {line["name"]: (float(line["accuracy"]), float(line["loss"])) for line in lines
                if line["stage"] == stage and int(line["round"]) == rounds[stage.removeprefix("unseen_")]}
        for stage in sorted({line["stage"] for line in lines})
    }
    return rounds, scores


def scored(module, test):
    """Accuracy and mean cross entropy of a plain module on a client's test samples."""
    x, y = torch.from_numpy(test[0]).double(), torch.from_numpy(test[1])
    with torch.no_grad():
        outputs = module.double().eval()(x)
    return (outputs.argmax(1) == y).double().mean().item(), cross_entropy(outputs, y).item()


def of_file(path):
    """The file's tensors, loaded into the module that they are of."""
    module = read_model(path).module.double()
    module.load_state_dict(load_file(path))
    return module


def agree(found, printed, most=np.inf):
    """The same number of test samples is answered correctly, and the same loss up to the last bits of sums.

    A site tells no loss above `most`, however far its model has run away.
    """
    assert found[0] == pytest.approx(printed[0], rel=1e-12)
    assert min(found[1], most) == pytest.approx(printed[1], rel=1e-6)


@pytest.mark.parametrize("method", EVERY)
def test_what_is_exported_and_personalized_scores_what_the_table_printed(
    trained, samples, method, tmp_path, monkeypatch, capsys
):
    folder = trained(method)
    rounds, scores = reported(folder, folder / "comparison.csv")
    for stage in ("served", "adapted"):
        seen, unseen = scores[stage], scores[f"unseen_{stage}"]
        assert (len(seen), len(unseen)) == (4, 1)
        for name, printed in [*list(seen.items())[::2], *unseen.items()]:
            path = tmp_path / f"{name}-{stage}.safetensors"
            words = ["export", folder, "--client", name, "-o", path, *(["--adapted"] if stage == "adapted" else [])]
            said = in_process_shown([*map(str, words)], monkeypatch, capsys).out
            assert f"the model after round {rounds[stage]}, {CHOSEN} (stage {stage})" in said
            facts = json.loads(path.with_suffix(".json").read_text())
            assert (facts["round"], facts["stage"], facts["when"]) == (rounds[stage], stage, CHOSEN)
            agree(scored(of_file(path), samples[name].test), printed)
    (name,) = scores["unseen_served"]
    x, y = samples[name].brought
    np.savez(tmp_path / "new.npz", x=x, y=y, client=[name] * len(y))
    words = ["personalize", folder, "--data", tmp_path / "new.npz", "--adapt", "no", "-o", tmp_path / "new.safetensors"]
    said = in_process_shown([*map(str, words)], monkeypatch, capsys).out
    assert f"The server is that after round {rounds['served']}, {CHOSEN} for the stage served." in said
    agree(scored(of_file(tmp_path / "new.safetensors"), samples[name].test), scores["unseen_served"][name])


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("placed", [False, True], ids=["in memory", "with a folder"])
def test_model_for_scores_what_the_table_says(samples, tmp_path, method, placed):
    """From Python: the chosen round by default, the last one on request; what was handed out changes nothing."""
    federation = together(samples, unseen=1)
    result = coterie.run(
        method, coterie.models.model("mlp", (FEATURES,), CLASSES, hidden=5), federation, rounds=ROUNDS,
        folder=tmp_path / "run" if placed else None, adapter=adapter_for(method, SMALL), **options_for(method),
    )
    for when in ("chosen", "last", "chosen"):
        for stage in ("served", "adapted", "unseen_served", "unseen_adapted"):
            at = result.at(stage, when)
            assert result.handed_out(stage, when).round == result.round_of(stage, when)
            for place, client in enumerate(at.clients.tolist()):
                module = result.model_for(client, "adapted" in stage, when)
                printed = at.test["accuracy"][place], at.test["loss"][place]
                agree(scored(module, samples[federation.names[client]].test), printed)
    assert result.simulation.rounds_done == ROUNDS


def together(samples, names=NAMES, unseen=0):
    splits = [[getattr(samples[name], split) for name in names] for split in ("train", "test", "val")]
    return coterie.Federation.from_splits(*splits, classes=CLASSES, names=names, unseen=unseen)


@pytest.mark.parametrize("method", EVERY)
def test_the_models_of_sites_score_what_the_servers_table_says(samples, tmp_path, method):
    """Four sites train and one comes at the end; the table is made from what the server's folder holds."""
    made = run_sites(samples, tmp_path, method)
    rounds, scores = made.rounds, made.scores
    assert scores["served"].keys() == set(NAMES[:4])
    for name in NAMES:
        home = tmp_path / name / method
        facts = json.loads((home / "model.json").read_text())
        printed = scores["served" if name in NAMES[:4] else "unseen_served"][name]
        assert (facts["round"], facts["when"]) == (rounds["served"], CHOSEN)
        agree(scored(of_file(home / "model.safetensors"), samples[name].test), printed, MOST)
        agree((facts["scores"]["served"]["test"]["accuracy"], facts["scores"]["served"]["test"]["loss"]), printed)
        if rounds["served"] != ROUNDS and name in NAMES[:4]:
            last = json.loads((home / "last.json").read_text())
            assert (last["round"], last["when"]) == (ROUNDS, "last")
            agree(scored(of_file(home / "last.safetensors"), samples[name].test), made.last[name], MOST)


def run_sites(samples, home, method, names=NAMES, **options):
    """The experiment over sites in this process, with a folder; the last of five sites comes after training."""
    sites = [Site(name, together(samples, [name]), home / name, "cpu", accept="any") for name in names]
    job = Job.for_data(
        together(samples), experiment=method, method=registry.spelling(registry.method(method)), model=MODEL,
        training=Training(rounds=ROUNDS, **options_for(method)), adapter=adapter_for(method, SMALL), **options,
    )
    policy = Policy(sites=4, deadline=30, wait=5, poll=0.01)
    for some in (sites[:4], sites):
        serve([job], Loopback(some), policy, home / "server")
    result = Folder(home / "server").result()
    to_csv([result], home / "table.csv")
    rounds, scores = reported(home / "server", home / "table.csv")
    at = result.at("served", "last")
    last = {result.names[k]: (at.test["accuracy"][i], at.test["loss"][i]) for i, k in enumerate(at.clients.tolist())}
    return SimpleNamespace(rounds=rounds, scores=scores, last=last)


@pytest.mark.long
def test_for_most_methods_the_chosen_round_is_not_the_last(trained):
    """Otherwise the tests above would say nothing."""
    other = {m for m in METHODS if reported(trained(m), trained(m) / "comparison.csv")[0]["served"] != ROUNDS}
    assert len(other) >= 0.9 * len(METHODS), sorted(other)


@pytest.mark.parametrize("method", OFTEN)
def test_the_chosen_round_is_one_in_the_middle(trained, method):
    rounds, _ = reported(trained(method), trained(method) / "comparison.csv")
    assert ROUNDS not in rounds.values()
    assert max(rounds.values()) > 0


@pytest.mark.parametrize("form", ["torchscript", "torch-export", "onnx"])
def test_other_formats_are_of_the_chosen_round(trained, samples, tmp_path, monkeypatch, capsys, form):
    """What the library writes it compares with the row; here the file's own answers are scored."""
    ending = {"torchscript": "pt", "torch-export": "pt2", "onnx": "onnx"}[form]
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="pip install 'coterie[export]'")
    folder = trained("ditto")
    _, scores = reported(folder, folder / "comparison.csv")
    name, printed = next(iter(scores["served"].items()))
    path = tmp_path / f"model.{ending}"
    in_process_shown(["export", str(folder), "--client", name, "-o", str(path)], monkeypatch, capsys)
    x, y = (torch.from_numpy(part) for part in samples[name].test)
    with torch.no_grad():
        outputs = answers(form, path, x.double())
    assert (outputs.argmax(1) == y).double().mean().item() == printed[0]
    assert cross_entropy(outputs, y).item() == pytest.approx(printed[1], rel=1e-5)


def answers(form, path, x):
    if form == "torchscript":
        return torch.jit.load(str(path))(x)
    if form == "torch-export":
        return torch.export.load(str(path)).module()(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("words", [["--client", "berlin"], ["--client", "berlin", "--adapted"], ["--model", "0"]])
def test_the_last_round_on_request(trained, tmp_path, monkeypatch, capsys, words):
    folder = trained("fedavg")
    name = json.loads((folder / "config.json").read_text())["clients"][0]
    words = [name if word == "berlin" else word for word in words]
    path = tmp_path / "last.safetensors"
    words = ["export", str(folder), *words, "--round", "last", "-o", str(path)]
    said = in_process_shown(words, monkeypatch, capsys).out
    assert f"the model after round {ROUNDS}, the last one" in said
    facts = json.loads(path.with_suffix(".json").read_text())
    assert (facts["round"], facts["when"]) == (ROUNDS, "last")


def test_sites_without_scores_use_the_last_round_and_say_so(samples, tmp_path):
    sites = [Site(name, together(samples, [name]), tmp_path / name, "cpu", accept="any") for name in NAMES[:4]]
    job = Job.for_data(
        together(samples), experiment="quiet", method="ditto", model=MODEL, scores=False,
        training=Training(rounds=ROUNDS, **OPTIONS),
    )
    serve([job], Loopback(sites), Policy(sites=4, deadline=30, wait=5, poll=0.01), tmp_path / "server")
    for name in NAMES[:4]:
        home = tmp_path / name / "quiet"
        facts = json.loads((home / "model.json").read_text())
        assert (facts["round"], facts["when"]) == (ROUNDS, "last")
        assert facts["note"] == "It is the last round: this experiment's sites send no scores."
        assert not list(home.glob("chosen-*"))
        assert not (home / "last.safetensors").exists()
    assert not list(Path(tmp_path / "server").glob("chosen-*"))
