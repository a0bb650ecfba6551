"""One run as plain values: what is written is what is read, and records of earlier versions still are."""

import json

import pytest
import torch
from torch import nn

import coterie
from coterie.data import digits
from coterie.errors import CoterieError
from coterie.flower.job import Job
from coterie.running.experiment import Experiment
from coterie.running.spec import RunSpec
from coterie.running.training import Training

SPEC = RunSpec("fedfew:models=2", "mlp:hidden=4", (1, 8, 8), 10, 10, Training(rounds=3, lr=0.1), "head")
TABLE = RunSpec("ditto", "linear", (3,), 2, 2, dtype="float32", class_names=("ill", "well"), encoding={"columns": {}})
TOKENS = RunSpec("fedavg", "textcnn:width=4", (6,), 2, 2, dtype="int64")

OLD_JOB = {
    "experiment": "a1", "method": "fedper", "model": "mlp:hidden=5", "shape": [4], "classes": 3, "outputs": 3,
    "training": {"rounds": 2, "lr": 0.1}, "head": None, "scores": False,
}
"""As version 0.1 wrote it into plan.json, job.json and every message."""


class Bag(nn.Sequential):
    def __init__(self):
        super().__init__(nn.EmbeddingBag(7, 2), nn.Linear(2, 3))


@pytest.mark.parametrize("spec", [SPEC, TABLE, TOKENS], ids=["images", "table", "tokens"])
def test_what_is_written_is_read_back(spec):
    """As flat values, and as config.json with the federation's recipe, where names and encoding stand."""
    assert RunSpec.of(json.loads(json.dumps(spec.values()))) == spec
    recipe = {"classes": list(spec.class_names), "encoding": spec.encoding} if spec.class_names else {}
    config = json.loads(json.dumps({**spec.config(), "federation": recipe}))
    assert RunSpec.of_config(config, spec.model) == spec


def test_what_is_not_known_is_not_written():
    """Versions that know nothing of these values refuse them."""
    assert {"dtype", "class_names", "encoding"}.isdisjoint(SPEC.values())


def test_jobs_of_earlier_versions_are_read():
    job = Job.of(OLD_JOB)
    assert (job.method, job.shape, job.training.rounds, job.scores, job.dtype) == ("fedper", (4,), 2, False, "")
    assert job.values().keys() == OLD_JOB.keys()
    assert Job.of(json.loads(json.dumps(job.values()))) == job


@pytest.mark.parametrize(("change", "sentence"), [
    ({"shape": None}, "the experiment's settings cannot be read"),
    ({"dtype": "int46"}, "did you mean 'int64'"),
    ({"colour": "red"}, "the experiment's settings cannot be read"),
    ({"training": {"round": 3}}, "did you mean 'rounds'"),
])
def test_settings_that_make_no_job_are_a_sentence(change, sentence):
    with pytest.raises(CoterieError, match=sentence):
        Job.of({**OLD_JOB, **change})
    with pytest.raises(CoterieError, match="settings cannot be read"):
        Job.of({name: value for name, value in OLD_JOB.items() if name != "shape"})


def test_every_place_describes_the_same_samples():
    """An experiment, a run folder and a job agree on what digits look like: 1 x 8 x 8 real numbers of 10 classes."""
    experiment = Experiment(clients=3, model="linear")
    federation = experiment.federation()
    x, y = digits()
    data = coterie.Federation.from_clients([(x[:30], y[:30])])
    for spec in (
        experiment.spec(federation, "fedavg"),
        Job.for_data(federation, experiment="e", method="fedavg", model="linear"),
        RunSpec.for_data(data, method="fedavg", model="linear"),
    ):
        assert (spec.shape, spec.classes, spec.outputs, spec.dtype) == ((1, 8, 8), 10, 10, "float32")


def test_the_recorded_type_decides_and_else_the_layers():
    """`nn.EmbeddingBag` looks tokens up as `nn.Embedding` does; a model may look up other things than its samples."""
    untold = RunSpec("fedavg", "linear", (4,), 3, 3)
    assert not untold.takes_tokens()
    assert untold.takes_tokens(Bag())
    assert untold.takes_tokens(nn.Sequential(nn.Embedding(7, 2), nn.Flatten(), nn.Linear(8, 3)))
    assert not RunSpec("fedavg", "linear", (4,), 3, 3, dtype="float64").takes_tokens(Bag())
    assert RunSpec("fedavg", "linear", (4,), 3, 3, dtype="int64").takes_tokens()


def test_samples_of_the_right_form():
    tokens = RunSpec("fedavg", "linear", (5,), 3, 3, dtype="int64").random_samples(50, torch.float32, Bag())
    assert (tokens.shape, tokens.dtype, int(tokens.min()), int(tokens.max())) == ((50, 5), torch.int64, 0, 6)
    real = SPEC.random_samples(4, torch.float64)
    assert (real.shape, real.dtype) == ((4, 1, 8, 8), torch.float64)
    assert TOKENS.blank_samples(2, 1).tolist() == [[1] * 6] * 2
    assert SPEC.blank_samples(2, 0).dtype == torch.float32
    assert Job.of({**OLD_JOB, "dtype": "int64"}).made_up(2).x.dtype == torch.int64


# -- a loss of one's own ----------------------------------------------------------------------------------------------

LOSSES = """
import torch.nn.functional as F
from torch import nn


def huber(outputs, y):
    return F.huber_loss(outputs[:, 0], y, reduction="none")


def squares(outputs, y):
    return (outputs[:, 0] - y).square()


absolute = nn.L1Loss(reduction="none")
number = 3
"""


@pytest.fixture
def losses(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(LOSSES)
    return path


def test_a_loss_is_written_where_there_is_one_and_read_from_its_file(losses):
    spec = RunSpec("fedavg", "linear", (3,), 0, 1, loss=f"{losses}:huber")
    assert "loss" not in SPEC.values()
    assert RunSpec.of(json.loads(json.dumps(spec.values()))) == spec
    found = spec.own_loss()(torch.tensor([[0.5], [3.0]]), torch.zeros(2))
    assert found.tolist() == [0.125, 2.5]  # x^2 / 2 up to 1, then |x| - 1/2
    assert SPEC.own_loss() is None


@pytest.mark.parametrize(("spelling", "sentence"), [
    ("{}:hubber", "did you mean 'huber'"),
    ("{}:number", "number in .* is a int; a function of outputs and labels is needed"),
    ("{}:huber:delta=2", "is a function in a file, spelled file.py:name"),
    ("huber", "is a function in a file, spelled file.py:name, not 'huber'"),
    ("{}x.py:huber", "there is no file .* to take the loss huber from"),
])
def test_a_loss_that_is_not_there_is_a_sentence(losses, spelling, sentence):
    with pytest.raises(CoterieError, match=sentence):
        RunSpec("fedavg", "linear", (3,), 0, 1, loss=spelling.format(losses)).own_loss()


def test_a_loss_in_a_file_is_not_for_sites(losses):
    with pytest.raises(CoterieError, match=r"the loss .* lies in a file, which is not sent to sites"):
        Job("fedavg", "linear", (3,), 0, 1, loss=f"{losses}:huber", experiment="one")


@pytest.mark.parametrize(("training", "sentence"), [
    ({"class_weights": "balanced"}, "class_weights=balanced is for classes"),
    ({"augment": "flip"}, r"these samples have shape \[3\]"),
])
def test_a_server_refuses_what_no_site_could_train(training, sentence):
    with pytest.raises(CoterieError, match=sentence):
        Job("fedavg", "linear", (3,), 0, 1, Training(**training), experiment="one")
