"""Sites read their own files: those of one federation number their classes alike, and answer in the users' unit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError
from coterie.flower.job import Job, fresh_id
from coterie.flower.loopback import Loopback
from coterie.flower.operator import predict
from coterie.flower.plan import Plan
from coterie.flower.policy import Policy
from coterie.flower.rounds import serve
from coterie.flower.site import site_at
from coterie.running.training import Training
from coterie.serving.portable import read_model

TRAINING = Training(rounds=2, lr=0.05, device="cpu")


def table(path, labels, seed=0):
    rng = np.random.default_rng(seed)
    rows = [f"{rng.normal():.3f},{rng.normal():.3f},{label}" for label in labels]
    path.write_text("\n".join(["a,b,label", *rows]) + "\n")
    return str(path)


def job(**values):
    return Job(**{"experiment": fresh_id(), "method": "fedavg", "model": "linear", "shape": (2,), "classes": 3,
                  "outputs": 3, "training": TRAINING, **values})


def site(folder, name, data):
    return site_at(name, data, folder / name, "cpu", val=0.0, test=0.25)


def test_a_site_with_some_of_the_classes_numbers_them_as_the_others_do(tmp_path):
    """1 and 3 of the classes 1, 2, 3 are numbers 0 and 2, and not 0 and 1."""
    agreed = job(class_names=("1", "2", "3"))
    some = site(tmp_path, "berlin", table(tmp_path / "b.csv", [1, 3] * 6)).federation(agreed)
    every = site(tmp_path, "lyon", table(tmp_path / "l.csv", [1, 2, 3] * 4)).federation(agreed)
    assert some.y.unique().tolist() == [0, 2]
    assert every.y.unique().tolist() == [0, 1, 2]
    assert some.classes == every.classes == 3


def test_without_names_a_label_is_its_own_number(tmp_path):
    """So sites agree without a word; a label that has no place is refused with the way out."""
    made = site(tmp_path, "berlin", table(tmp_path / "b.csv", [0, 2] * 6)).federation(job())
    assert made.y.unique().tolist() == [0, 2]
    with pytest.raises(CoterieError, match="berlin has the label 3, which is none of the run's 3 classes: 0, 1, 2"):
        site(tmp_path, "berlin", table(tmp_path / "b.csv", [1, 3] * 6)).federation(job())


def test_names_are_looked_up_and_never_numbered_by_the_site(tmp_path):
    """A site without birds: cat and dog are 1 and 2 of bird, cat, dog."""
    data = table(tmp_path / "b.csv", ["cat", "dog"] * 6)
    named = site(tmp_path, "berlin", data).federation(job(class_names=("bird", "cat", "dog")))
    assert named.y.unique().tolist() == [1, 2]
    with pytest.raises(CoterieError, match="berlin names 2 classes and the run has 3"):
        site(tmp_path, "berlin", data).federation(job())
    with pytest.raises(CoterieError, match="berlin has the label dog"):
        site(tmp_path, "berlin", data).federation(job(class_names=("bird", "cat", "fox")))


def test_a_plan_names_the_classes(tmp_path):
    (tmp_path / "plan.toml").write_text('method = "fedavg"\nshape = [2]\nclasses = 3\nclass_names = ["1", "2", "3"]\n')
    assert Plan.configured(tmp_path / "plan.toml").jobs[0].class_names == ("1", "2", "3")
    (tmp_path / "plan.toml").write_text('method = "fedavg"\nshape = [2]\nclasses = 3\nclass_names = ["1", "2"]\n')
    with pytest.raises(CoterieError, match="names 2 classes, and classes says 3"):
        Plan.configured(tmp_path / "plan.toml")


def test_predictions_are_in_the_names_of_the_classes(tmp_path):
    data = {name: table(tmp_path / f"{name}.csv", [1, 3] * 10, seed) for seed, name in enumerate(("berlin", "lyon"))}
    agreed = job(class_names=("1", "2", "3"))
    line = Loopback([site(tmp_path, name, path) for name, path in data.items()])
    serve([agreed], line, Policy(sites=2, deadline=30, wait=5, poll=0.01))
    path, right = predict(tmp_path / "berlin", data["berlin"], tmp_path / "said.csv")
    said = [line.split(",")[1] for line in path.read_text().splitlines()[1:]]
    assert set(said) <= {"1", "2", "3"}
    assert right == pytest.approx(np.mean([said[k] == str((1, 3)[k % 2]) for k in range(20)]))


def test_sites_that_share_a_schema_answer_in_the_users_unit(tmp_path):
    """Scores that they told, and what their model files answer, are prices; the schema holds the one unit."""
    rng = np.random.default_rng(0)
    paths = {}
    for k, name in enumerate(("berlin", "lyon")):
        a, b = rng.normal(100, 20, 80), rng.normal(5, 2, 80)
        price = 90_000 + 800 * (a - 100) + 5000 * (b - 5) + 1000 * k + rng.normal(0, 500, 80)
        split = ["test" if i % 4 == 0 else "train" for i in range(80)]
        rows = [f"{x:.3f},{y:.3f},{z:.2f},{s}" for x, y, z, s in zip(a, b, price, split, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,price,split", *rows]) + "\n")
        paths[name] = f"{tmp_path / name}.csv:label=price,scale=true,schema={tmp_path / 'schema.json'}"
    agreed = job(classes=0, outputs=1, training=Training(rounds=8, lr=0.05, device="cpu", metric="mae"))
    sites = [site(tmp_path, name, path) for name, path in paths.items()]
    serve([agreed], Loopback(sites), Policy(sites=2, deadline=30, wait=5, poll=0.01))
    schema = json.loads((tmp_path / "schema.json").read_text())
    for name in paths:
        folder = tmp_path / name / agreed.experiment
        told = json.loads((folder / "model.json").read_text())
        unit = dict(zip(("mean", "deviation"), schema["scale"]["price"], strict=True))
        assert {key: told["target"][key] for key in unit} == pytest.approx(unit)
        rows = [line.split(",") for line in (tmp_path / f"{name}.csv").read_text().splitlines()[1:]]
        rows = [[float(v) for v in row[:3]] for row in rows if row[3] == "test"]
        scale = schema["scale"]
        x = torch.tensor([[(row[k] - scale[c][0]) / scale[c][1] for k, c in enumerate("ab")] for row in rows])
        with torch.no_grad():
            answers = read_model(folder / "model.safetensors").loaded()(x)[:, 0].double().numpy()
        apart = np.abs(answers - np.array([row[2] for row in rows])).mean()
        assert told["scores"]["served"]["test"]["mae"] == pytest.approx(apart, rel=1e-5)
        assert apart < 8000  # the prices' deviation is about 19,000
