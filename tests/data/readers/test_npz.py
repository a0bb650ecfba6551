"""Names in .npz files, and names for classes that are whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.data import load
from coterie.errors import CoterieError
from coterie.running.experiment import Experiment


def refused(*args, **options):
    with pytest.raises(CoterieError) as error:
        load(*args, **options)
    return str(error.value)



@pytest.mark.parametrize("key", ["class_names", "label_names", "target_names", "classes"])
def test_npz_names_its_classes(tmp_path, key):
    held = {"x": np.ones((6, 2), np.float32), "y": np.array([0, 1, 2] * 2), "client": np.array([0, 0, 0, 1, 1, 1])}
    called = {key: np.array(["mel", "nv", "bcc"]), "client_names": np.array(["wien", "rom"])}
    np.savez(tmp_path / "a.npz", **held, **called)
    source = load(tmp_path / "a.npz")
    assert source.classes == ("mel", "nv", "bcc")
    assert source.y.tolist() == [0, 1, 2] * 2
    assert source.client.tolist() == ["wien"] * 3 + ["rom"] * 3
    made = Experiment(data=str(tmp_path / "a.npz"), val=0, test=0).federation()
    assert (made.recipe["classes"], made.classes) == (["mel", "nv", "bcc"], 3)
    assert "3 classes: mel, nv, bcc" in made.summary()
    assert Experiment(data=str(tmp_path / "a.npz")).spec(made).class_names == ("mel", "nv", "bcc")
    assert load(f"{tmp_path / 'a.npz'}:class_names=x,y,z").classes == ("x", "y", "z")


def test_npz_says_where_names_do_not_fit(tmp_path):
    held = {"x": np.ones((4, 2)), "y": np.array([0, 1, 2, 3]), "client": np.array([0, 1, 2, 5])}
    np.savez(tmp_path / "a.npz", **held, class_names=np.array(["a", "b"]))
    assert "class_names has 2 names, for the labels 0 to 1, but the labels in" in refused(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **held, client_names=np.array(["a", "b"]))
    assert "has 2 names in client_names, but a client 5" in refused(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=held["x"], y=np.array(list("abca")), class_names=np.array(["c", "b", "a"]))
    assert load(tmp_path / "a.npz").y.tolist() == [2, 1, 0, 2], "names fix the order of labels that are names"
    np.savez(tmp_path / "a.npz", x=held["x"], y=np.array([0.5, 1, 2, 3]), class_names=np.array(["c", "b", "a"]))
    assert load(tmp_path / "a.npz").classes is None, "targets have no classes"


def test_whole_number_classes_of_a_table_get_names(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("age,label\n1,0\n2,1\n3,0\n")
    source = load(f"{path}:class_names=well,ill")
    assert (source.classes, source.y.tolist()) == (("well", "ill"), [0, 1, 0])
    assert "class_names has 1 name, for the labels 0 to 0" in refused(f"{path}:class_names=well")
    assert "one class twice" in refused(f"{path}:class_names=well,well")
    path.write_text("age,label\n1,a\n2,b\n")
    assert "are names already (a, b)" in refused(f"{path}:class_names=well,ill")
    path.write_text("age,label\n1,0.5\n2,1.5\n")
    assert "targets of a regression" in refused(f"{path}:class_names=well,ill")


def test_npz_names_its_features(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.eye(4, 2), y=np.arange(4) % 2, feature_names=np.array(["age", "dose"]))
    assert [feature.name for feature in load(tmp_path / "a.npz").features] == ["age", "dose"]
