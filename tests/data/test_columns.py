"""What the columns of a table are: separators, rows in messages, files that differ, ids, dates and groups, and names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_files import write_leaf

from coterie.cli.app import app
from coterie.data import Federation, load
from coterie.data.features import MOST, Feature, features_of, listed
from coterie.errors import CoterieError
from coterie.running.experiment import Experiment


def refused(*args, **options):
    with pytest.raises(CoterieError) as error:
        load(*args, **options)
    return str(error.value)


def noted(path, *words):
    """The notes of a source that hold any of these words."""
    return [note for note in load(path).notes if any(word in note for word in words)]


# --- the sign between columns -----------------------------------------------------------------------------------------

ROWS = [["age", "dose", "label"], ["31", "0.5", "0"], ["42", "1.5", "1"], ["53", "2.5", "1"]]


@pytest.mark.parametrize(("sign", "word"), [(";", "semicolon"), ("\t", "tab"), ("|", "bar")])
def test_the_sign_between_columns_is_found_and_said(tmp_path, sign, word):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(sign.join(row) for row in ROWS) + "\n")
    source = load(path)
    assert source.x.tolist() == [[31, 0.5], [42, 1.5], [53, 2.5]]
    assert f"1 file read with the separator {word} (t.csv); separator=comma would read otherwise" in source.notes
    assert "has no column 'label'" in refused(path, separator="comma") or "cannot be read" in refused(
        path, separator="comma")


def test_commas_are_not_said_and_an_option_goes_before_what_is_found(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(",".join(row) for row in ROWS) + "\n")
    assert not any("separator" in note for note in load(path).notes)
    path.write_text('a;b,label\n"1;2",0\n"3;4",1\n')  # both signs fit: 2 columns each
    assert load(path).x.shape == (2, 2)  # 'a;b' is a column of two texts
    assert "separator" not in " ".join(load(path, separator=",").notes)
    assert "unknown separator 'colon'" in refused(path, separator="colon")


def test_texts_with_semicolons_do_not_mislead(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("said,label\nyes; or no,0\nwell; perhaps,1\nno,0\n")
    assert load(path).x.shape == (3, 3)
    path.write_text('said;label\n"a;b, c";0\n"d, e";1\n')  # commas and semicolons inside quotes
    assert load(path).x.shape == (2, 2)


def test_an_index_of_images_may_have_semicolons(tmp_path):
    from PIL import Image

    Image.new("L", (4, 4)).save(tmp_path / "1.png")
    Image.new("L", (4, 4)).save(tmp_path / "2.png")
    (tmp_path / "list.csv").write_text("path;label\n1.png;a\n2.png;b\n")
    assert load(tmp_path / "list.csv").classes == ("a", "b")


def test_decimal_commas_are_no_categories(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("dose;label\n0,5;0\n1.234,5;1\n2;1\n")
    said = refused(path)
    assert "column 'dose' holds numbers with a comma ('0,5', line 2 of t.csv): decimal=comma reads 3,5 as 3.5" in said
    assert load(path, decimal="comma").x.tolist() == [[0.5], [1234.5], [2]]
    assert load(path, decimal="point").x.shape == (3, 3)
    path.write_text('dose,label\n"0,5",0\n"1,5",1\n')
    assert "column 'dose' holds numbers with a comma" in refused(path)
    path.write_text("dose;label\n1;0,5\n2;1,5\n")
    assert "column 'label' holds numbers with a comma" in refused(path)
    assert load(path, decimal="comma").y.tolist() == [0.5, 1.5]


# --- rows in messages -------------------------------------------------------------------------------------------------


def test_lines_are_counted_as_an_editor_does(tmp_path):
    """The header is line 1, empty lines count, and a quoted value may reach over several lines."""
    path = tmp_path / "t.csv"
    path.write_text('age,note,label\n31,"two\nlines",a\n\n,short,b\n53,short,\n')
    said = refused(path)
    assert "1 of 3 rows has no value in column 'age': line 5 of t.csv" in said
    path.write_text('age,note,label\n31,"two\nlines",a\n\n4,short,b\n53,short,\n')
    assert "1 of 3 samples has no label: line 6 of t.csv" in refused(path)
    path.write_text("age,label\n31,0\n\n42,1,5\n")
    assert "line 4 has 3 values, the header 2" in refused(path)


@pytest.mark.parametrize(("text", "said"), [
    ("age,label\n1,0\ninf,1\n", "1 of 2 rows has an infinite value in column 'age': line 3 of t.csv (inf)"),
    ("age,label\n1,0\n1e300,1\n", "1 of 2 rows has an infinite value in column 'age': line 3 of t.csv (1e+300)"),
    ("age,split,label\n1,train,0\n2,maybe,1\n", "unknown split: line 3 of t.csv ('maybe')"),
    ("age,split,label\n1,train,0\n2,test,1\n", "that no training sample has: line 3 of t.csv (class 1)"),
    ("age,client,label\n1,a,0\n2,,1\n", "has no value in column 'client': line 3 of t.csv"),
])
def test_every_wrong_value_of_a_table_has_its_line(tmp_path, text, said):
    (tmp_path / "t.csv").write_text(text)
    assert said in refused(tmp_path / "t.csv")


def test_a_class_that_is_not_listed_has_its_line_and_so_has_a_stray_text(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("age,label\n1,cat\n2,cow\n3,dog\n")
    assert "not in classes: line 3 of t.csv (class cow)" in refused(path, classes="cat,dog")
    path.write_text("age,label\n" + "".join(f"{k},0\n" for k in range(150)) + "old,1\n")
    assert "(e.g. 'old', line 152 of t.csv)" in refused(path)
    path.write_text("age,label\n1,0\n2,1\n")
    load(path, schema=tmp_path / "s.json")
    path.write_text("age,label\n1,0\nold,1\n")
    assert "must hold numbers, as the schema says; it holds 'old', line 3 of t.csv" in refused(
        path, schema=tmp_path / "s.json")


def test_many_wrong_rows_are_counted_and_the_first_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("age,client,label\n" + "".join(f"{'' if k % 2 else k},{'ab'[k % 4 // 2]},0\n" for k in range(20)))
    assert ("10 of 20 rows have no value in column 'age' (client a: 5, client b: 5): line 3 of t.csv, line 5 of t.csv, "
            "line 7 of t.csv, line 9 of t.csv, and 6 more") in refused(path)


def test_other_formats_say_the_index(tmp_path):
    x = np.ones((4, 2), np.float32)
    x[2, 1] = np.inf
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1, 0, 1]))
    assert "1 of 4 samples hold NaN or infinite values: index 2 of a.npz" in refused(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), y=np.array([0, 1, -1, 1]))
    assert "which stands for none: index 2 of a.npz" in refused(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), y=np.array([0, 1, 12345, 1]))
    assert "outside 0 to 9999: index 2 of a.npz (12345)" in refused(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=np.array([0, 1, 1]), split=np.array(["train", "tset", "test"]))
    assert "got 'tset' at index 1" in refused(tmp_path / "a.npz")
    root = write_leaf(tmp_path)
    file = root / "train" / "all_data_0.json"
    file.write_text(file.read_text().replace('"y": [0, 1, 0]', '"y": [0, -1, 0]', 1))
    assert "index 1 of train/all_data_0.json, client f00" in refused(root)


# --- files that differ ------------------------------------------------------------------------------------------------


def folder(tmp_path):
    root = tmp_path / "sites"
    root.mkdir()
    (root / "a.csv").write_text("age,ward,label\n1,x,0\n2,y,1\n")
    (root / "b.csv").write_text("dose,age,label\n9,3,0\n8,4,1\n")
    return root


def test_files_that_differ_obey_x(tmp_path):
    source = load(folder(tmp_path), x="age")
    assert source.x.tolist() == [[1], [2], [3], [4]]
    assert source.client.tolist() == ["a", "a", "b", "b"]


def test_and_ignore(tmp_path):
    assert load(folder(tmp_path), ignore="ward,dose").x.tolist() == [[1], [2], [3], [4]]


def test_otherwise_file_and_column_are_named_with_what_to_type(tmp_path):
    root = folder(tmp_path)
    assert "'a.csv' has no column 'dose', which 'b.csv' has; x=age takes the columns that both have" in refused(root)
    assert "unknown column" in refused(root, x="length")
    assert "'b.csv' has no column 'ward', which 'a.csv' has; it is needed in every file" in refused(root, x="age,ward")
    (root / "b.csv").write_text("age,outcome\n3,0\n")
    assert "'b.csv' has no column 'label', which 'a.csv' has; it is needed in every file" in refused(root, x="age")


def test_a_schema_needs_its_columns_alone(tmp_path):
    root = folder(tmp_path)
    load(root / "a.csv", x="age", schema=tmp_path / "s.json")
    assert load(root, schema=str(tmp_path / "s.json")).x.tolist() == [[1], [2], [3], [4]]


# --- ids and dates ----------------------------------------------------------------------------------------------------


def table(path, columns, n=60):
    """A csv file of these columns, functions of the row's number; the label is none of them."""
    rng = np.random.default_rng(0)
    lines = [",".join([*columns, "label"])]
    lines += [",".join([*(str(column(k)) for column in columns.values()), str(rng.integers(2))]) for k in range(n)]
    path.write_text("\n".join(lines) + "\n")
    return path


MIXED = np.random.default_rng(5).permutation(60)
DRAWN = np.random.default_rng(6).normal(50, 10, 400)
SUSPICIOUS = {
    "a counter": ("x1", lambda k: k + 1, "it counts the rows"),
    "a counter backwards": ("x1", lambda k: 500 - 2 * k, "it counts the rows"),
    "a counter in another order": ("x1", lambda k: MIXED[k], "every row has its own number"),
    "numbers of as many digits": ("x1", lambda k: 48000 + 37 * MIXED[k], "every row has its own number"),
    "a name": ("PatientID", lambda k: k % 3, "by its name"),
    "another name": ("site_id", lambda k: k % 3, "by its name"),
    "what pandas writes": ("Unnamed: 0", lambda k: k % 7, "by its name"),
    "a text for each row": ("code", lambda k: f"c{MIXED[k]}x", "nearly every row has its own text"),
}


@pytest.mark.parametrize("what", SUSPICIOUS)
def test_ids_are_pointed_out(tmp_path, what):
    name, column, why = SUSPICIOUS[what]
    path = table(tmp_path / "t.csv", {"age": lambda k: round(DRAWN[k], 2), name: column})
    (said,) = noted(path, "to be ids")
    assert f"'{name}': {why}" in said
    assert f"ignore={name}" in said
    assert "'age'" not in said
    assert not noted(f"{path}:ignore={name}", "to be ids"), "what is typed helps"
    assert load(f"{path}:ignore={name}").x.shape[1] == 1


ORDINARY = {
    "numbers with a fraction, all different": lambda k: DRAWN[k],
    "rising numbers with a fraction": lambda k: k / 7,
    "ages": lambda k: int(DRAWN[k]),
    "0 and 1": lambda k: k % 2,
    "a count": lambda k: int(abs(DRAWN[k] - 50)),
    "years": lambda k: 1990 + int(DRAWN[k]) % 30,
    "amounts of money": lambda k: int(10 ** (3 + DRAWN[k] / 25)),
    "a constant": lambda k: 7,
    "an ordinary category": lambda k: ["east", "west", "hall"][k % 3],
    "a category of many": lambda k: f"{'abcdefghij'[int(DRAWN[k]) % 10]} ward",
    "body mass": lambda k: round(DRAWN[k] / 2, 1),
}


@pytest.mark.parametrize("what", ORDINARY)
@pytest.mark.parametrize("n", [12, 60, 400])
def test_ordinary_features_are_not(tmp_path, what, n):
    for name in ("age", "glycemic_index", "valid", "kid", "video", "time"):
        path = table(tmp_path / "t.csv", {name: ORDINARY[what], "z": lambda k: DRAWN[k]}, n)
        assert not noted(path, "to be ids", "dates or times", "whose rows", "other texts"), name


DATES = {
    "iso": ("seen", lambda k: f"2021-03-{k % 28 + 1:02d}"),
    "with a time": ("seen", lambda k: f"2021-03-{k % 28 + 1:02d} 10:{k:02d}:00"),
    "european": ("seen", lambda k: f"{k % 28 + 1}.03.2021"),
    "american": ("seen", lambda k: f"3/{k % 28 + 1}/2021"),
    "a time of day": ("seen", lambda k: f"{k % 24}:{k % 60:02d}"),
    "yyyymmdd": ("seen", lambda k: 20210300 + k % 28 + 1),
    "seconds since 1970": ("seen", lambda k: 1_600_000_000 + 86_413 * MIXED[k]),
    "milliseconds": ("seen", lambda k: 1_600_000_000_000 + 86_413_000 * MIXED[k]),
    "a name": ("birth_date", lambda k: 30_000 + 7 * MIXED[k] % 999),
}


@pytest.mark.parametrize("what", DATES)
def test_dates_are_pointed_out(tmp_path, what):
    name, column = DATES[what]
    path = table(tmp_path / "t.csv", {"age": lambda k: round(DRAWN[k], 2), name: column})
    (said,) = noted(path, "dates or times")
    assert f"column '{name}' seems to hold dates or times" in said
    assert f"ignore={name}" in said


def test_too_many_dates_for_categories_are_called_dates(tmp_path):
    path = table(tmp_path / "t.csv", {"seen": lambda k: f"20{k % 90 + 10}-01-{k // 90 + 1:02d}"}, 180)
    assert "which seem to be dates; leave it out with ignore=seen" in refused(path)


def test_dates_of_parquet_are_pointed_out_too(tmp_path):
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as parquet

    when = [datetime.datetime(2021, 3, k % 28 + 1) for k in range(60)]
    parquet.write_table(pa.table({"seen": when, "age": DRAWN[:60], "label": [0, 1] * 30}), tmp_path / "t.parquet")
    assert len(noted(tmp_path / "t.parquet", "dates or times")) == 1


def test_a_stray_word_among_numbers_is_pointed_out(tmp_path):
    """One 'unknown' makes 60 ages into categories."""
    path = table(tmp_path / "t.csv", {"age": lambda k: "unknown" if k == 9 else int(DRAWN[k])})
    (said,) = noted(path, "other texts")
    assert "column 'age' holds numbers and also other texts ('unknown', line 11 of t.csv)" in said
    path.write_text(path.read_text().replace("unknown", "NA"))
    assert not noted(f"{path}:fill=mean", "other texts")


def test_named_features_are_the_users_choice(tmp_path):
    path = table(tmp_path / "t.csv", {"id": lambda k: k})
    assert not noted(f"{path}:x=id", "to be ids")


# --- groups -----------------------------------------------------------------------------------------------------------

GROUPS = {
    "by its name": ("lesion", lambda k: MIXED[k] // 3),
    "an id with repeats": ("subject_id", lambda k: f"s{MIXED[k] // 2}"),
    "codes": ("x1", lambda k: f"HAM_{MIXED[k] // 2:05d}"),
    "blocks of texts": ("x1", lambda k: f"{'abcdefghijklmnopqrstuvwxyzABCDE'[k // 2]} street"),
}


@pytest.mark.parametrize("what", GROUPS)
def test_a_column_that_looks_like_a_group_is_pointed_out(tmp_path, what):
    name, column = GROUPS[what]
    path = table(tmp_path / "t.csv", {"age": lambda k: round(DRAWN[k], 2), name: column, "client": lambda k: "ab"[k % 2]})
    (said,) = noted(path, "whose rows")
    assert f"group={name} keeps them on one side" in said
    assert noted(f"{path}:ignore={name}", "whose rows"), "who leaves it out still tears groups"
    assert not noted(f"{path}:group={name}", "whose rows", "to be ids")


def test_what_is_no_group_is_not(tmp_path):
    """The client itself, a column with as many values as clients, and columns without repeats."""
    columns = {"age": lambda k: int(DRAWN[k]), "patient": lambda k: k % 4, "client": lambda k: f"c{k % 4}",
               "sample": lambda k: f"s{MIXED[k]:03d}", "ward": lambda k: ["east", "west"][k % 2]}
    assert not noted(table(tmp_path / "t.csv", columns), "whose rows")
    many = {"patient": lambda k: f"p{k // 3:04d}", "age": lambda k: DRAWN[k % 60]}
    assert "group=patient keeps those of one on one side" in refused(table(tmp_path / "t.csv", many, 600))


# --- names of classes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["class_names", "label_names", "target_names", "classes"])
def test_npz_names_its_classes(tmp_path, key):
    held = {"x": np.ones((6, 2), np.float32), "y": np.array([0, 1, 2] * 2), "client": np.array([0, 0, 0, 1, 1, 1])}
    np.savez(tmp_path / "a.npz", **held, **{key: np.array(["mel", "nv", "bcc"])}, client_names=np.array(["wien", "rom"]))
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


# --- features in words ------------------------------------------------------------------------------------------------


def test_the_features_of_a_table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("age,ward,dose,label\n31,east,0.5,0\n,west,1.5,1\n53,east,,0\n64,hall,,1\n")
    source = load(path, fill="mean")
    assert source.features == (
        Feature("age", "whole number", 1, 31, 64, missing=1 / 4),
        Feature("ward", "category", 3, categories=3),
        Feature("dose", "number", 1, 0.5, 1.5, missing=2 / 4),
    )
    assert sum(feature.inputs for feature in source.features) == source.x.shape[1]


def test_two_hundred_features_fit_80_columns_and_are_cut_with_a_word():
    many = [Feature(f"measurement of something very long, number {k}", "number", 1, -1e-12 / 3, 1e12 / 7) for k in range(200)]
    text = listed(many)
    assert max(map(len, text.splitlines())) <= 80
    assert f"and {200 - MOST} more features; --each lists all of them." in text
    assert len(text.splitlines()) == MOST + 2
    assert len(listed(many, every=True).splitlines()) == 201
    wide = listed([Feature("ward", "category", 100, categories=100, missing=1e-5), Feature("c", "number", 1, 3, 3)])
    assert "100 different, 100 input" in wide
    assert "< 0.1 %" in wide
    assert "3 everywhere (constant)" in wide
    assert "2 features make 101 inputs." in wide


def test_other_samples_show_their_features_too():
    numbers = features_of(torch.tensor([[1.0, 5.0], [2.0, 5.0]]))
    assert numbers == (Feature("x[0]", "number", 1, 1, 2), Feature("x[1]", "number", 1, 5, 5))
    assert [f.name for f in features_of(torch.zeros(2, 2), ["a", "b"])] == ["a", "b"]
    images = features_of(torch.linspace(-1, 1, 2 * 3 * 16).reshape(2, 3, 4, 4))
    assert [(f.name, f.kind, f.inputs) for f in images] == [(f"channel {k}", "image 4x4", 16) for k in range(3)]
    assert (images[0].low, images[2].high) == (-1, 1)
    (tokens,) = features_of(torch.tensor([[1, 7], [0, 3]]))
    assert (tokens.kind, tokens.inputs, tokens.low, tokens.high) == ("text or codes", 2, 0, 7)


@pytest.mark.parametrize("each", [False, True])
def test_coterie_data_lists_them(tmp_path, capsys, each):
    columns = {f"f{k}": (lambda k: lambda row: round(DRAWN[(row + k) % 400], 3))(k) for k in range(60)}
    path = table(tmp_path / "t.csv", {"id": lambda k: k, **columns, "client": lambda k: "abc"[k % 3]})
    with pytest.raises(SystemExit) as ended:
        app(["data", str(path), *(["--each"] if each else [])])
    assert ended.value.code in (0, None)
    out, err = capsys.readouterr()
    assert "feature  type           range" in out
    assert "id       whole number   0 to 59" in out
    assert ("more features; --each lists all of them" in out) != each
    assert ("\nf59 " in out) == each
    assert "ignore=id" in err
    assert max(len(line) for line in out.splitlines()) <= 80


def test_npz_names_its_features(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.eye(4, 2), y=np.arange(4) % 2, feature_names=np.array(["age", "dose"]))
    assert [feature.name for feature in load(tmp_path / "a.npz").features] == ["age", "dose"]


def test_a_federation_in_python_needs_none_of_this():
    made = Federation.from_clients([(np.zeros((4, 2)), np.arange(4) % 2)])
    assert "groups" not in made.summary()
