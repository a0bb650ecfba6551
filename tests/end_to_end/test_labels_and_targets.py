"""From a file to a table and to a model: classes keep their names, and numbers to predict keep their unit."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from commands import in_process, in_process_shown

import coterie
from coterie.contract.units import Unit
from coterie.data.summary import task_in_words
from coterie.running.experiment import Experiment
from coterie.running.saved import Saved
from coterie.serving import export, portable
from coterie.serving.newcomer_data import read
from coterie.serving.newcomers import personalize

SMALL = ["--rounds", "3", "--model", "linear", "--set", "device=cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """houses.csv: prices of about 1e5 that inputs of about 100 explain; grades.csv: grades 1 to 3."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(3)
    area, age = rng.normal(120, 40, 240), rng.integers(0, 60, 240)
    price = 100_000 + 1500 * (area - 120) - 400 * (age - 30) + rng.normal(0, 8000, 240)
    rows = [f"{a:.2f},{b},{'abcd'[k % 4]},{c:.2f}" for k, (a, b, c) in enumerate(zip(area, age, price, strict=True))]
    (folder / "houses.csv").write_text("\n".join(["area,age,town,price", *rows]) + "\n")
    grade = rng.integers(1, 4, 150)
    rows = [f"{rng.normal(g, 0.4):.3f},{rng.normal(-g, 0.4):.3f},{'xyz'[k % 3]},{g}" for k, g in enumerate(grade)]
    (folder / "grades.csv").write_text("\n".join(["a,b,site,grade", *rows]) + "\n")
    return folder


def houses(place, **options):
    asked = {"label": "price", "client": "town", "scale": "true", **options}
    return f"{place / 'houses.csv'}:{','.join(f'{k}={v}' for k, v in asked.items())}"


@pytest.fixture(scope="module")
def run(place):
    """A run that learned: its last round is the one it reports, so that all models are of one round."""
    made = coterie.experiment({
        "data": houses(place), "methods": ["fedavg"], "model": "linear",
        "training": {"rounds": 8, "lr": 0.02, "metric": "mae", "watch": "mse,r2", "device": "cpu",
                     "precision": "float64", "evaluate_every": 1},
    })
    result = made.run(place / "run")[0]
    assert result.round_of("served") == 8
    return result


def raw(place):
    """price -> the row's inputs, scaled here from the file by nothing but numpy."""
    with (place / "houses.csv").open() as file:
        rows = list(csv.DictReader(file))
    x = np.array([[float(row["area"]), float(row["age"])] for row in rows])
    x = (x - x.mean(0)) / x.std(0)
    made = {row["price"]: one for row, one in zip(rows, x, strict=True)}
    assert len(made) == len(rows)
    return made


def again(place, run, client, answer):
    """The scores of a client, computed from the file's own numbers and what a model answers to them."""
    known = raw(place)
    truth = run.simulation.federation.client(client, "test")[1].double().numpy()
    x = np.stack([known[f"{price:.2f}"] for price in truth])
    found = answer(torch.from_numpy(x)).double().numpy()[:, 0]
    squares = (found - truth) ** 2
    spread = ((truth - truth.mean()) ** 2).sum()
    return {"mae": np.abs(found - truth).mean(), "mse": squares.mean(), "loss": squares.mean(),
            "r2": 1 - squares.sum() / spread}


def test_scores_of_scaled_targets_are_in_the_users_unit(place, run):
    """As the model that is handed out gives them on the file's own numbers, every client, every metric."""
    scores = run.at("served")
    for client in range(4):
        model = run.model_for(client)
        with torch.no_grad():
            expected = again(place, run, client, lambda x, model=model: model(x.to(next(model.parameters()).dtype)))
        assert {name: scores.test[name][client] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert scores.test["mae"].mean() < 40_000  # and it learned: the deviation of the prices is about 58,000
    assert scores.test["r2"].min() > 0.5


@pytest.mark.parametrize("ending", ["safetensors", "pt", "pt2", "onnx"])
def test_exported_models_answer_in_the_users_unit(place, run, tmp_path, ending):
    if ending == "onnx":
        pytest.importorskip("onnxscript")
    found = portable.of_client(Saved.open(place / "run"), "b", False)
    path = tmp_path / f"b.{ending}"
    export.export_model(found, path, export.format_of(path, None))
    if ending == "pt":
        answer = torch.jit.load(str(path))
    elif ending == "pt2":
        answer = torch.export.load(str(path)).module()
    elif ending == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        entry = session.get_inputs()[0]

        def answer(x):
            return torch.from_numpy(session.run(None, {entry.name: x.numpy()})[0])
    else:
        answer = portable.read_model(path).loaded()
        told = json.loads(path.with_suffix(".json").read_text())["target"]
        prices = np.array([float(price) for price in raw(place)])
        assert (told["mean"], told["deviation"]) == pytest.approx((prices.mean(), prices.std()))
        assert told["answer"] == "mean + deviation * output"
    with torch.no_grad():
        expected = again(place, run, 1, lambda x: answer(x.to(found.row.dtype)))
    scores = run.at("served")
    assert {name: scores.test[name][1] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_training_is_that_on_targets_scaled_by_hand(place, run, tmp_path):
    """Mean squared error of standardised targets, times the variance, is that of the prices themselves."""
    with (place / "houses.csv").open() as file:
        rows = list(csv.DictReader(file))
    prices = np.array([float(row["price"]) for row in rows])
    scaled = (prices - prices.mean()) / prices.std()
    lines = [f"{row['area']},{row['age']},{row['town']},{y!r}" for row, y in zip(rows, scaled.tolist(), strict=True)]
    (tmp_path / "houses.csv").write_text("\n".join(["area,age,town,price", *lines]) + "\n")
    by_hand = Saved.open(place / "run").experiment.changed(data=houses(tmp_path)).run()[0]
    mine, theirs = run.at("served").test, by_hand.at("served").test
    np.testing.assert_allclose(mine["mse"], theirs["mse"] * prices.var(), rtol=1e-4)
    np.testing.assert_allclose(mine["mae"], theirs["mae"] * prices.std(), rtol=1e-4)
    np.testing.assert_allclose(mine["r2"], theirs["r2"], rtol=1e-4)


def test_a_newcomer_is_scored_and_answered_in_the_users_unit(place, run):
    """Its estimate is a squared error of prices; the model that it gets errs by about that much."""
    saved = Saved.open(place / "run")
    (x, y), name, *_ = read(f"{place / 'houses.csv'}:client=town", "c", saved)
    found = personalize(saved, (x, y), name, "no")
    prices = y.double().numpy()
    assert prices.mean() > 50_000  # as the file has them
    with torch.no_grad():
        model = found.module()
        answers = model(x.to(next(model.parameters()).dtype)).double().numpy()[:, 0]
    assert found.estimate.value == pytest.approx(((answers - prices) ** 2).mean(), rel=0.5)
    assert found.estimate.value > 1e6


def test_a_mean_below_0_is_added():
    """`value - -0.08` is no sentence."""
    said = task_in_words(0, 1, Unit(-0.08, 2.0), {"encoding": {"label": "z"}})
    assert said.startswith("regression on 'z', trained as (value + 0.08) / 2;")
    assert "(value - 0.08) / 2;" in task_in_words(0, 1, Unit(0.08, 2.0), {"encoding": {"label": "z"}})


def test_a_run_says_what_it_predicts(place, tmp_path, monkeypatch, capsys):
    shown = in_process_shown(["data", houses(place)], monkeypatch, capsys).out
    assert "regression on 'price', trained as (value - " in " ".join(shown.split())
    assert "scores and answers are in its own unit" in " ".join(shown.split())
    words = ["run", "fedavg", "--data", houses(place), *SMALL, "--out", str(tmp_path / "r")]
    assert "task: regression on 'price', trained as" in in_process_shown(words, monkeypatch, capsys).out
    shown = in_process_shown(["data", f"{place / 'grades.csv'}:label=grade,client=site"], monkeypatch, capsys).out
    assert "classification, 3 classes: 1, 2, 3" in shown
    told = in_process_shown(["data", f"{place / 'houses.csv'}:label=age,client=town"], monkeypatch, capsys)
    assert "looks like a number to predict" in told.err


def test_classes_from_1_keep_their_names_to_the_end(place, tmp_path, monkeypatch, capsys):
    """In the run's matrices and in what a file says; a newcomer with some of the classes has the same ones."""
    data = f"{place / 'grades.csv'}:label=grade,client=site"
    words = ["run", "fedavg", "--data", data, *SMALL, "--out", str(tmp_path / "r")]
    assert "task: classification, 3 classes: 1, 2, 3" in in_process_shown(words, monkeypatch, capsys).out
    saved = Saved.open(tmp_path / "r")
    assert (saved.spec.classes, saved.spec.class_names) == (3, ("1", "2", "3"))
    assert saved.folder.result().confusion().classes == ("1", "2", "3")
    export.export_model(portable.of_client(saved, "x", False), tmp_path / "x.safetensors", "safetensors")
    assert json.loads((tmp_path / "x.json").read_text())["job"]["class_names"] == ["1", "2", "3"]
    lines = (place / "grades.csv").read_text().splitlines()
    some = [line for line in lines[1:] if line.endswith((",1", ",3"))]
    (tmp_path / "new.csv").write_text("\n".join([lines[0], *some]) + "\n")
    (_, y), *_ = read(f"{tmp_path / 'new.csv'}:client=site", "x", saved)
    assert y.unique().tolist() == [0, 2]
    np.savez(tmp_path / "new.npz", x=np.zeros((4, 2), np.float32), y=np.array([1, 3, 3, 1]))
    assert read(str(tmp_path / "new.npz"), None, saved)[0][1].tolist() == [0, 2, 2, 0]
    (tmp_path / "odd.csv").write_text("\n".join([lines[0], *some, "0.5,0.5,x,4"]) + "\n")
    words = ["personalize", str(tmp_path / "r"), "--data", f"{tmp_path / 'odd.csv'}:client=site", "--client", "x", "-o",
             str(tmp_path / "o.safetensors")]
    code, said = in_process(words, monkeypatch, capsys)
    assert code == 2
    assert "has the label 4, which is none of the run's 3 classes: 1, 2, 3" in said


def test_a_newcomer_with_another_class_of_as_many_is_refused(tmp_path):
    """Two names against two names: numbered by themselves, fox would silently be dog."""
    rows = [f"{k / 7:.3f},{'ab'[k % 2]},{('cat', 'dog')[k % 3 % 2]}" for k in range(40)]
    (tmp_path / "run.csv").write_text("\n".join(["v,site,kind", *rows]) + "\n")
    Experiment(data=f"{tmp_path / 'run.csv'}:label=kind,client=site", methods=("fedavg",), model="linear",
               training=coterie.Training(rounds=1, device="cpu")).run(tmp_path / "r")
    np.savez(tmp_path / "new.npz", x=np.zeros((6, 1), np.float32), y=np.array(["cat", "fox"] * 3))
    with pytest.raises(coterie.CoterieError, match="has the label fox, which is none of the run's 2 classes: cat, dog"):
        read(str(tmp_path / "new.npz"), None, Saved.open(tmp_path / "r"))
