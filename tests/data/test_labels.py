"""What y means: floats are numbers to predict, whole numbers and names are classes, and classes are those there are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from coterie.data import Federation, load
from coterie.errors import CoterieError
from coterie.running.experiment import Experiment

GRADES = [1, 2, 3, 1, 2, 3, 1, 3]


def csv_of(folder, labels, name="grades.csv"):
    lines = [f"{k}.5,{'north' if k % 2 else 'south'},{label}" for k, label in enumerate(labels)]
    (folder / name).write_text("\n".join(["dose,site,grade", *lines]) + "\n")
    return f"{folder / name}:label=grade,client=site"


def parquet_of(folder, labels):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    n = len(labels)
    table = pa.table({"dose": np.arange(n) + 0.5, "site": ["south", "north"] * (n // 2), "grade": np.array(labels)})
    parquet.write_table(table, folder / "grades.parquet")
    return f"{folder / 'grades.parquet'}:label=grade,client=site"


def npz_of(folder, labels):
    n = len(labels)
    np.savez(folder / "grades.npz", x=np.random.default_rng(0).random((n, 2)), y=np.array(labels),
             client=np.array(["south", "north"] * (n // 2)))
    return str(folder / "grades.npz")


def pfllib_of(folder, labels):
    half = len(labels) // 2
    for k, part in enumerate((labels[:half], labels[half:])):
        (folder / "Set" / "train").mkdir(parents=True, exist_ok=True)
        held = {"x": np.random.default_rng(k).random((half, 2), np.float32), "y": np.array(part)}
        np.savez_compressed(folder / "Set" / "train" / f"{k}.npz", data=held)
    return str(folder / "Set")


def leaf_of(folder, labels):
    half = len(labels) // 2
    users = {name: {"x": [[0.5, k] for k in range(half)], "y": list(part)}
             for name, part in (("a", labels[:half]), ("b", labels[half:]))}
    held = {"users": list(users), "num_samples": [half, half], "user_data": users}
    (folder / "all_data.json").write_text(json.dumps(held))
    return str(folder / "all_data.json")


def hub_of(folder, labels):
    from datasets import Dataset

    n = len(labels)
    Dataset.from_dict({"a": [k + 0.5 for k in range(n)], "client": ["s", "n"] * (n // 2), "label": list(labels)}
                      ).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


FORMATS = [csv_of, parquet_of, npz_of, pfllib_of, leaf_of, hub_of]


def federation(data):
    return Experiment(data=data, test=0.0, val=0.0).federation()


# -- floats are numbers to predict -------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", FORMATS)
def test_whole_numbers_kept_as_floats_are_numbers_to_predict(tmp_path, write):
    data = write(tmp_path, [float(v) for v in GRADES])
    source, made = load(data), federation(data)
    assert source.y.is_floating_point()
    assert source.classes is None
    assert sorted(source.y.tolist()) == sorted(GRADES)
    assert (made.classes, made.outputs) == (0, 1)
    assert any("regression=false" in note for note in source.notes)  # what to type where classes were meant


@pytest.mark.parametrize("write", FORMATS)
def test_named_as_labels_they_are_classes(tmp_path, write):
    data = write(tmp_path, [float(v) for v in GRADES])
    made = federation(f"{data}{',' if 'label=' in data else ':'}regression=false")
    assert made.classes == 3
    assert sorted(made.y.tolist()) == sorted(v - 1 for v in GRADES)
    assert made.recipe["classes"] == ["1", "2", "3"]


@pytest.mark.parametrize("write", [csv_of, parquet_of, npz_of, leaf_of, hub_of])
def test_naming_the_classes_names_them_as_labels_too(tmp_path, write):
    """In the order of the names, which is not the numbers' here."""
    source = load(write(tmp_path, [float(v) for v in GRADES]), classes="3,2,1")
    assert source.classes == ("3", "2", "1")
    assert sorted(source.y.tolist()) == sorted(3 - v for v in GRADES)


@pytest.mark.parametrize("write", FORMATS)
def test_whole_numbers_are_numbers_to_predict_where_somebody_says_so(tmp_path, write):
    data = write(tmp_path, GRADES)
    source = load(data, regression=True)
    assert source.y.is_floating_point()
    assert not any("regression=false" in note for note in source.notes)  # it was said


@pytest.mark.parametrize("spelling", ["{}.0", "{}.", "{}e0"])
def test_a_csv_says_by_the_spelling_that_numbers_are_no_whole_ones(tmp_path, spelling):
    """One such value is enough: nobody writes a class with a decimal point."""
    labels = [str(v) for v in GRADES]
    labels[5] = spelling.format(labels[5])
    assert load(csv_of(tmp_path, labels)).y.is_floating_point()
    assert not load(csv_of(tmp_path, GRADES, "whole.csv")).y.is_floating_point()


def test_an_index_of_images_keeps_to_the_same_rule(tmp_path):
    from PIL import Image

    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    for name, labels, floating in (("ages", ("31.0", "42.0"), True), ("kinds", ("31", "42"), False)):
        text = "\n".join(["path,label", *(f"a.png,{label}" for label in labels)])
        (tmp_path / f"{name}.csv").write_text(f"{text}\n")
        assert load(tmp_path / f"{name}.csv").y.is_floating_point() == floating
    assert load(tmp_path / "ages.csv", classes="31.0,42.0").y.tolist() == [0, 1]


def test_a_number_that_is_missing_leaves_the_others_numbers(tmp_path):
    source = load(leaf_of(tmp_path, [1.0, None, 3.0, 1.0, 2.0, 3.0, 1.0, 3.0]), skip=True)
    assert source.y.tolist() == [1, 3, 1, 2, 3, 1, 3]
    assert source.y.is_floating_point()


@pytest.mark.parametrize("y", [torch.tensor([1.0, 2.0, 3.0, 1.0]), np.array([1.0, 2.0, 3.0, 1.0])])
def test_arrays_in_python_keep_to_the_same_rule(y):
    x = torch.randn(4, 2)
    assert Federation.from_clients([(x, y)]).classes == 0
    assert Federation.from_clients([(x, y)], classes=4).y.unique().tolist() == [1, 2, 3]  # named as labels
    assert Federation.from_clients([(x, np.array([1, 2, 3, 1]))], classes=0).classes == 0


def test_classes_and_regression_contradict(tmp_path):
    with pytest.raises(CoterieError, match="leave one of them out"):
        load(csv_of(tmp_path, GRADES), classes="1,2,3", regression=True)


# -- the classes are those there are -----------------------------------------------------------------------------------


LARGE = [10**18, 10**18 + 1]
"""One number in floating point, and two names."""


def test_numbers_of_many_digits_are_names_where_names_are(tmp_path):
    """Of labels and clients; in a parquet file, whose numbers cannot be texts, they are refused."""
    data = load(csv_of(tmp_path, [LARGE[k % 2] for k in range(24)]))
    assert data.y.bincount().tolist() == [12, 12]
    assert list(data.classes) == list(map(str, LARGE))
    with pytest.raises(CoterieError, match="1000000000000000000 cannot be told from the whole numbers beside it"):
        load(parquet_of(tmp_path, [LARGE[k % 2] for k in range(24)]))


def test_labels_in_a_column_are_labels(tmp_path):
    """An array `[N, 1]` of whole numbers, as many programs keep their labels."""
    path = npz_of(tmp_path, [k % 3 for k in range(24)])
    held = dict(np.load(path))
    np.savez(path, **{**held, "y": held["y"].reshape(-1, 1)})
    made = load(path)
    assert made.y.bincount().tolist() == [8, 8, 8]


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("labels", [[1, 2, 3, 1, 2, 3, 1, 3], [0, 5, 12, 0, 5, 12, 0, 12]])
def test_labels_from_1_or_with_gaps_have_as_many_classes_as_there_are(tmp_path, write, labels):
    """12 comes after 5: they are numbers, in rising order, whatever the format keeps them as."""
    made = federation(write(tmp_path, labels))
    assert made.classes == made.outputs == 3
    names = [str(v) for v in sorted(set(labels))]
    assert made.recipe["classes"] == names
    assert sorted(names[k] for k in made.y.tolist()) == sorted(map(str, labels))
    assert made.histogram("train").sum(0).min() > 0  # no class is empty


def test_labels_in_python_have_as_many_classes_as_there_are():
    x = torch.randn(8, 2)
    made = Federation.from_clients([(x[:4], np.array([1, 3, 1, 3])), (x[4:], np.array([2, 2, 1, 3]))], test=0, val=0)
    assert (made.classes, made.recipe["classes"]) == (3, ["1", "2", "3"])
    assert sorted(made.client(0)[1].tolist()) == [0, 0, 2, 2]  # numbered once for all clients
    plain = Federation.from_clients([(x, np.arange(8) % 3)])
    assert plain.classes == 3
    assert "classes" not in plain.recipe
    declared = Federation.from_clients([(x, np.array([1, 3] * 4))], classes=5)
    assert declared.classes == 5
    assert sorted(set(declared.y.tolist())) == [1, 3]


# -- many classes for few samples --------------------------------------------------------------------------------------


def test_many_classes_for_few_rows_are_pointed_out(tmp_path):
    """Prices are taken as classes because they are whole numbers; the note says what to type."""
    prices = np.random.default_rng(0).integers(90_00, 99_99, 200).tolist()
    notes = federation(csv_of(tmp_path, prices)).recipe["notes"]
    said = next(note for note in notes if "looks like a number to predict" in note)
    assert f"{len(set(prices))} different numbers for 200 samples" in said
    assert "regression=true" in said
    assert "label=COLUMN" in said
    named = federation(csv_of(tmp_path, [f"p{k}" for k in range(200)])).recipe["notes"]
    assert any("200 different names for 200 samples" in note and "id" in note for note in named)


def test_most_classes_rare_is_pointed_out_beside_a_few_large_ones():
    labels = np.concatenate([np.zeros(500, int), np.arange(1, 61)])  # 9 samples a class on average
    with pytest.warns(UserWarning, match="60 of them with 2 or fewer"):
        made = Federation.from_clients([(torch.randn(560, 2), labels)])
    assert len(made.recipe["notes"]) == 1


@pytest.mark.parametrize(("classes", "each"), [(1623, 20), (100, 5), (10, 3), (2, 1)])
def test_many_classes_with_their_samples_are_not(classes, each, recwarn):
    """1623 classes of 20 are Omniglot; a few classes are a few classes, however small the data."""
    made = Federation.from_clients([(torch.zeros(classes * each, 1), np.repeat(np.arange(classes), each))])
    assert "notes" not in made.recipe
    assert not [w for w in recwarn if "looks like" in str(w.message)]


# -- targets and their unit --------------------------------------------------------------------------------------------


def test_scaled_targets_are_standardised_with_the_inputs_and_kept_in_their_unit(tmp_path):
    """Over all rows read, as the inputs are. y itself stays what the file holds, to the last digit."""
    prices = [1e9 + 37.25 * k for k in range(8)]
    data = csv_of(tmp_path, prices)
    made = federation(f"{data},scale=true")
    assert (made.unit.mean, made.unit.deviation) == pytest.approx((np.mean(prices), np.std(prices)))
    assert sorted(made.y.tolist()) == prices
    assert made.trained_on.mean().item() == pytest.approx(0, abs=1e-6)
    assert made.trained_on.std(correction=0).item() == pytest.approx(1)
    assert made.fingerprint() != federation(data).fingerprint()
    assert federation(data).unit is None


def test_classes_have_no_unit(tmp_path):
    made = federation(f"{csv_of(tmp_path, GRADES)},scale=true")
    assert (made.classes, made.unit) == (3, None)


def test_a_constant_target_is_only_centred(tmp_path):
    made = federation(f"{csv_of(tmp_path, [7.5] * 8)},scale=true")
    assert (made.unit.mean, made.unit.deviation) == (7.5, 1.0)


def test_the_note_on_unscaled_columns_speaks_of_the_target(tmp_path):
    large, small = csv_of(tmp_path, [1e5 + k / 2 for k in range(8)], "large.csv"), csv_of(tmp_path, [0.5] * 8)
    note = next(note for note in load(large).notes if "large numbers" in note)
    assert "'grade' (the target, about 1e+05)" in note
    assert not any("the target" in note for note in load(small).notes)
    assert not any("large numbers" in note for note in load(large, scale=True).notes)


def test_a_schema_carries_what_the_label_is_and_its_unit(tmp_path):
    """A second site writes its targets as whole numbers, on another scale: it follows the first one's."""
    first = csv_of(tmp_path, [10.5, 20.5, 30.5, 40.5], "first.csv")
    load(first, schema=str(tmp_path / "s.json"), scale=True)
    second = Experiment(data=f"{csv_of(tmp_path, [100, 300, 100, 200])},schema={tmp_path / 's.json'}").federation()
    assert second.classes == 0
    assert (second.unit.mean, second.unit.deviation) == pytest.approx((25.5, np.std([10.5, 20.5, 30.5, 40.5])))
    assert sorted(second.y.tolist()) == [100, 100, 200, 300]


def test_a_schema_keeps_the_order_of_the_classes_that_were_named(tmp_path):
    load(csv_of(tmp_path, ["b", "a", "c", "a"]), classes="c,b,a", schema=str(tmp_path / "s.json"))
    assert load(csv_of(tmp_path, ["a", "b", "a", "b"]), schema=str(tmp_path / "s.json")).y.tolist() == [2, 1, 2, 1]


# -- what is pointed out -----------------------------------------------------------------------------------------------


def notes_of(made, word):
    return [note for note in made.recipe.get("notes", ()) if word in note]


def test_many_labels_with_commas_are_said_to_look_like_numbers(tmp_path):
    lines = [f'{k}.5,"{k + 10},{k % 7}00"' for k in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["dose,grade", *lines]) + "\n")
    data = f"{tmp_path / 't.csv'}:label=grade,decimal=point"
    told = notes_of(federation(data), "40 different texts")
    assert len(told) == 1
    assert "they look like numbers with commas, such as 10,000" in told[0]
    assert not notes_of(federation(csv_of(tmp_path, range(-20, 20))), "commas")  # whole numbers have none


def test_labels_and_targets_that_are_all_equal_are_pointed_out(tmp_path):
    for label, said in (("2.5", "all 8 targets are equal (2.5)"), ("ill", "all 8 labels are of one class (ill)")):
        told = notes_of(federation(csv_of(tmp_path, [label] * 8)), "nothing can be learned")
        assert len(told) == 1
        assert told[0].startswith(said)
    for labels in (["2.5"] * 7 + ["2.6"], ["ill"] * 7 + ["well"]):
        assert not notes_of(federation(csv_of(tmp_path, labels)), "nothing can be learned")
    with pytest.warns(UserWarning, match="all 4 targets are equal"):
        Federation.from_assignment(np.random.rand(4, 2), np.zeros(4), [np.arange(4)])


def test_a_class_called_minus_one_is_asked_about_in_tables(tmp_path):
    found = federation(csv_of(tmp_path, [-1, 0, 1, 0, 1, -1, 0, 1]))
    assert found.classes == 3
    assert "is -1 'no label'?" in notes_of(found, "-1")[0]
    for labels in ([-1, 1] * 4, [-2, -1, 0, 1] * 2, [0, 1] * 4):  # two classes, a scale, and no -1
        assert not notes_of(federation(csv_of(tmp_path, labels)), "no label")


def test_labels_that_differ_in_case_or_blanks_alone_are_named(tmp_path):
    found = federation(csv_of(tmp_path, ["Yes", "yes", "no", "no  idea", "no idea", "Yes", "yes", "no"]))
    assert found.classes == 5
    told = notes_of(found, "differ in case")
    assert len(told) == 1
    assert "'Yes' and 'yes'" in told[0]
    assert "'no  idea' and 'no idea'" in told[0]
    assert not notes_of(federation(csv_of(tmp_path, ["yes", "no"] * 4)), "differ in case")
