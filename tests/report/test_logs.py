"""TensorBoard and MLflow hold what the run folder holds, read back with their own readers."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError
from coterie.report import logs
from coterie.running.folder import Folder

WORDS = ["run", "ifca", "--clients", "6", "--unseen", "2", "--model", "mlp:hidden=8", "--partition", "iid", "--rounds",
         "4", "--set", "device=cpu", "--set", "evaluate_every=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("tensorboard")
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("logged") / "run"
    words = [*WORDS, "--out", str(folder), "--log", "tensorboard", "--log", "mlflow"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return folder


def wanted(run):
    """Name -> {round: value}, from metrics.jsonl."""
    found = {}
    for line in (json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "evaluation":
            for stage in ("served", "adapted", "unseen_served", "unseen_adapted"):
                for name in ("mean", "worst", "std", "jain"):
                    found.setdefault(f"{stage}/{name}", {})[line["round"]] = line["stages"][stage][name]
        if line["kind"] == "round":
            found.setdefault("round/seconds", {})[line["round"] + 1] = line["seconds"]
            found.setdefault("round/bytes_up", {})[line["round"] + 1] = sum(line["up"].values())
            for k, count in enumerate(line["report"]["clients_per_model"]):
                found.setdefault(f"method/clients_per_model_{k + 1}", {})[line["round"] + 1] = count
    return found


def test_tensorboard_has_every_number_at_its_round(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name, values in wanted(run).items():
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(values, rel=1e-6), name


def test_mlflow_has_every_number_at_its_round_and_the_options(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("coterie")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.info.run_name == "ifca"
    assert (logged.data.params["rounds"], logged.data.params["data"]) == ("4", "digits")
    for name, values in wanted(run).items():
        assert {m.step: m.value for m in client.get_metric_history(logged.info.run_id, name)} == pytest.approx(values)
    assert not Path("mlruns").exists()  # nothing beside the run folder


def test_nothing_is_logged_twice_by_a_run_that_goes_on(run, tmp_path):
    """A finished run resumed at its last round has no further round; only the last evaluation could be told again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = CliRunner().invoke(app, ["resume", str(run), "--log", "tensorboard"], catch_exceptions=False)
    assert done.exit_code == 0
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("round/seconds")] == [1, 2, 3, 4]
    assert Folder(run).models() is not None  # the line on the models is there again, once
    assert (run / "metrics.jsonl").read_text().count('"kind": "models"') == 1


def test_an_unknown_or_absent_logger_is_said_before_anything_is_written(tmp_path, monkeypatch):
    out = tmp_path / "run"
    done = CliRunner().invoke(app, [*WORDS, "--out", str(out), "--log", "tensorbord"])
    assert isinstance(done.exception, CoterieError)
    assert "did you mean 'tensorboard'" in str(done.exception)
    monkeypatch.setattr(logs, "find_spec", lambda name: None)  # as where the package is not installed
    done = CliRunner().invoke(app, [*WORDS, "--out", str(out), "--log", "mlflow"])
    assert "pip install 'coterie[mlflow]'" in str(done.exception)
    assert not out.exists()
