"""Any nn.Module from a Python file, also in the styles of torchvision and Hugging Face."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import exit_code
from torch import nn

import coterie
from coterie.errors import CoterieError
from coterie.flower.job import Job
from coterie.models import model
from coterie.options import parse_options
from coterie.running.experiment import Experiment

RESNET = '''
"""In the style of torchvision: BatchNorm, residual blocks, a downsampling branch, adaptive pooling, `fc`."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inputs != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width=4, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = Block(width, width)
        self.layer2 = Block(width, 2 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))
'''

BERT = '''
from transformers import BertConfig, BertForSequenceClassification


def bert(num_classes, layers=1):
    """Random weights from a config; its forward answers with an object that has `logits`."""
    return BertForSequenceClassification(BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=num_classes,
    ))
'''

BRANCHING = '''
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.head = nn.Linear(shape[0], outputs)

    def forward(self, x):
        if x.abs().sum() >= 0:
            return self.head(x)
        return self.head(-x)


class Tied(nn.Module):
    def __init__(self, other):
        super().__init__()


def table(outputs):
    return {"outputs": outputs}


made = nn.Linear(4, 3)
'''


def coterie_in(folder, *words):
    """`python -m coterie` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-m", "coterie", *map(str, words)], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=300)


def test_a_model_in_the_style_of_torchvision_runs_from_its_file_and_is_resumed(tmp_path, monkeypatch, capsys):
    """The real command; then the file is gone, and resuming takes the run's own copy and says so."""
    (tmp_path / "mymodel.py").write_text(RESNET)
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=images, y=np.arange(60) % 3)
    words = ["--data", "data.npz", "--model", "mymodel.py:ResNet:width=3", "--clients", 3, "--set", "device=cpu"]
    done = coterie_in(tmp_path, "run", "fedbn", *words, "--rounds", 1, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "cannot be stacked" not in done.stdout
    record = json.loads((tmp_path / "out" / "experiment.json").read_text())
    assert record["experiment"]["model"] == f"{tmp_path / 'mymodel.py'}:ResNet:width=3"
    (copy,) = (tmp_path / "out" / "code").glob("*/mymodel.py")
    assert copy.read_text() == RESNET
    assert record["code"] == {str(tmp_path / "mymodel.py"): hashlib.sha256(RESNET.encode()).hexdigest()}
    (tmp_path / "mymodel.py").unlink()
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "resume", "out") == 0
    assert f"mymodel.py is gone; the run goes on with its copy {copy.relative_to(tmp_path)}." in capsys.readouterr().err


def test_a_changed_model_file_is_noticed(tmp_path, monkeypatch, capsys):
    """The copy is used and said to be; without one as it was, the run is not gone on with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymodel.py").write_text(BRANCHING)
    np.savez("data.npz", x=np.random.default_rng(0).normal(size=(60, 4)).astype("f4"), y=np.arange(60) % 3)
    words = ["--data", "data.npz", "--clients", "3", "--rounds", "1", "--set", "device=cpu", "--out", "out"]
    assert exit_code(monkeypatch, "run", "fedavg", "--model", "mymodel.py:Net", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the model cannot be stacked" in said
    assert "mymodel.py line 11: if x.abs().sum() >= 0:" in said
    assert "Clients are trained one after another: the same results, slower." in said
    (tmp_path / "mymodel.py").write_text(BRANCHING + "\n# other\n")
    assert exit_code(monkeypatch, "resume", "out") == 0
    assert "has changed since the run began; the run goes on with its copy" in capsys.readouterr().err
    next((tmp_path / "out" / "code").glob("*/mymodel.py")).write_text("")
    assert exit_code(monkeypatch, "resume", "out") == 2
    assert "is not the copy the run made of it" in capsys.readouterr().err


def test_a_model_in_the_style_of_hugging_face_runs(tmp_path):
    """Trained and scored: the loss of client 0 is the one that transformers itself computes."""
    pytest.importorskip("transformers", reason="pip install transformers, to try its models")
    (tmp_path / "mine.py").write_text(BERT)
    x = torch.randint(0, 20, (3, 12, 6), generator=torch.Generator().manual_seed(0))
    data = coterie.Federation.from_clients([(one, one[:, 0] % 2) for one in x])
    factory = model(f"{tmp_path / 'mine.py'}:bert", (6,), 2, layers=1)
    result = coterie.run("fedper", factory, data, rounds=2, device="cpu")
    assert result.simulation.layout.head == "classifier"
    x, y = data.client(0, "test")
    before, after = (e.stages["served"].test["loss"][0] for e in (result.history[0], result.history[-1]))
    assert after != before
    with torch.no_grad():
        assert after == pytest.approx(float(result.model_for(0)(input_ids=x, labels=y).loss), rel=1e-5)


def test_the_signature_decides_what_a_model_is_told(tmp_path):
    """`shape`, `inputs`, `outputs`, `classes` and `num_classes` by their names; everything else is an option."""
    path = tmp_path / "told.py"
    path.write_text(
        "from torch import nn\n"
        "def net(inputs, classes, hidden=2, **rest):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.Linear(hidden, classes))\n"
    )
    made = model(f"{path}:net", (2, 3), 5, hidden=7)()
    assert [m.out_features for m in made if isinstance(m, nn.Linear)] == [7, 5]
    assert made[1].in_features == 6
    assert parse_options("a/b.py:Net:hidden=64,32,lr=0.1") == ("a/b.py:Net", {"hidden": "64,32", "lr": 0.1})


@pytest.mark.parametrize(("spec", "sentence"), [
    ("mymodel.py:Nett", "did you mean 'Net'"),
    ("mymodel.py:made", "made in .* is a Linear; a class or a function is needed"),
    ("mymodel.py:table", "gives a dict; an nn.Module was expected"),
    ("mymodel.py:Tied", "missing 1 required positional argument: 'other'"),
    ("mymodel.py:Net:hidden=3", "has no options, got 'hidden'"),
    ("gone.py:Net", "there is no file .* to take the model Net from"),
    ("broken.py:Net", "cannot be imported: SyntaxError"),
])
def test_mistakes_get_a_sentence(tmp_path, spec, sentence):
    (tmp_path / "mymodel.py").write_text(BRANCHING)
    (tmp_path / "broken.py").write_text("def")
    name, options = parse_options(str(tmp_path / spec))
    with pytest.raises(CoterieError, match=sentence):
        model(name, (4,), 3, **options)


def test_a_path_in_a_toml_file_is_taken_from_its_folder(tmp_path):
    (tmp_path / "mymodel.py").write_text(BRANCHING)
    (tmp_path / "experiment.toml").write_text('model = "mymodel.py:Net"\n')
    assert Experiment.read(tmp_path / "experiment.toml").model == f"{tmp_path / 'mymodel.py'}:Net"


def test_a_file_is_not_sent_to_sites():
    with pytest.raises(CoterieError, match="lies in a file, which is not sent to sites"):
        Job("fedavg", "mymodel.py:Net", (4,), 3, 3, experiment="one")
