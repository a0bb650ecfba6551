"""Rows of tables: the sign between columns is found, and what is wrong has the line that an editor shows."""

from __future__ import annotations

import numpy as np
import pytest
from data_files import write_leaf

from coterie.data import load
from coterie.errors import CoterieError


def refused(*args, **options):
    with pytest.raises(CoterieError) as error:
        load(*args, **options)
    return str(error.value)


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
    assert ("column 'dose' holds numbers with a comma or points for thousands ('0,5', line 2 of t.csv): decimal=comma "
            "reads 3,5 as 3.5") in said
    assert load(path, decimal="comma").x.tolist() == [[0.5], [1234.5], [2]]
    assert load(path, decimal="point").x.shape == (3, 3)
    path.write_text('dose,label\n"0,5",0\n"1,5",1\n')
    assert "column 'dose' holds numbers with a comma" in refused(path)
    path.write_text("dose;label\n1;0,5\n2;1,5\n")
    assert "column 'label' holds numbers with a comma" in refused(path)
    assert load(path, decimal="comma").y.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("first", ["0.119", "1.234", "3.5", "1.5e3", "1,234.5", "1,234,567"])
def test_what_a_decimal_comma_cannot_read_is_refused_with_its_line(tmp_path, first):
    """0.119 is 119 thousandths to one reader and 119 to another, and nothing in the cell tells which."""
    path = tmp_path / "t.csv"
    path.write_text(f"dose;label\n0,5;0\n{first};1\n2;1\n")
    said = refused(path, decimal="comma")
    assert f"column 'dose' holds a number that decimal=comma cannot read ('{first}', line 3 of t.csv)" in said
    assert "so for 1.234 either 1,234 or 1234, or leave the column out with ignore=dose" in said
    path.write_text(f"dose;label\n1;0,5\n2;{first}\n")
    assert f"column 'label' holds a number that decimal=comma cannot read ('{first}', line 3 of t.csv)" in refused(
        path, decimal="comma")


def test_points_mark_thousands_beside_a_comma_or_another_point(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("price;label\n1.234,5;0\n1.234.567;1\n-12.345,0;0\n,5;1\n")
    assert load(path, decimal="comma").x.flatten().tolist() == [1234.5, 1234567, -12345, 0.5]
    path.write_text("price;label\n1.234.567;0\n2.345.678;1\n")  # two points are no decimals
    assert load(path, decimal="comma").x.flatten().tolist() == [1234567, 2345678]
    said = refused(path)
    assert "column 'price' holds numbers with a comma or points for thousands ('1.234.567', line 2 of t.csv)" in said


def test_a_lone_comma_never_marks_thousands(tmp_path):
    """0,119 is 0.119 by decimal=comma, refused unless the user says, and a text, not 119, by decimal=point."""
    path = tmp_path / "t.csv"
    path.write_text("dose;label\n0,119;0\n1,234;1\n")
    assert load(path, decimal="comma").x.flatten().tolist() == pytest.approx([0.119, 1.234])
    assert load(path, decimal="point").x.tolist() == [[1, 0], [0, 1]]  # categories
    assert "'0,119', line 2 of t.csv" in refused(path)


def test_numbers_with_a_comma_beside_a_stray_text_are_said(tmp_path):
    """One typo makes categories of the column: that was said of 0.5, and not of 0,5."""
    path = tmp_path / "t.csv"
    path.write_text("dose;label\n0,5;0\n1,5;1\n2,5x;1\n")
    for decimal in ("comma", "auto"):
        assert any("column 'dose' holds numbers and also other texts ('2,5x', line 4 of t.csv)" in note
                   for note in load(path, decimal=decimal).notes)


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
    ("age,split,label\n1,train,0\n2,maybe,1\n", "split other than train, val and test: line 3 of t.csv ('maybe')"),
    ("age,split,label\n1,0,0\n2,1,1\n", "split other than train, val and test: line 2 of t.csv ('0'), line 3 of"),
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


# --- codes with leading zeros -----------------------------------------------------------------------------------------


def test_labels_clients_and_groups_with_leading_zeros_are_names(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,label,client,patient\n1,01,01,007\n2,02,1,7\n3,1,01,007\n4,1,2,7\n")
    source = load(path, group="patient")
    assert source.classes == ("01", "02", "1")
    assert source.y.tolist() == [0, 1, 2, 2]
    assert source.client.tolist() == ["01", "1", "01", "2"]
    assert source.group.tolist() == ["007", "7", "007", "7"]


def test_features_and_targets_with_leading_zeros_stay_numbers(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,label\n01,010\n002,2\n3,3\n")
    source = load(path, regression=True)
    assert source.x.tolist() == [[1], [2], [3]]
    assert source.y.tolist() == [10, 2, 3]
    path.write_text("a,label\n01,01\n002,2.5\n3,3\n")  # 2.5 is measured, so 01 is
    assert load(path).y.tolist() == [1, 2.5, 3]
    path.write_text("a,client,label\n1,01,0\n2,1,1\n3,1.5,0\n")  # a client's name is never measured
    assert load(path).client.tolist() == ["01", "1", "1.5"]


def test_an_underscore_makes_a_name(tmp_path):
    """Python reads 1_2 as 12, nobody else does: visit 2 of patient 1 and patient 12 are two."""
    path = tmp_path / "t.csv"
    path.write_text("a,label,client\n1,1_2,1_2\n2,12,12\n3,1_2,12\n")
    source = load(path)
    assert (source.classes, source.y.tolist()) == (("12", "1_2"), [1, 0, 1])
    assert source.client.tolist() == ["1_2", "12", "12"]


def test_leading_zeros_are_kept_whatever_a_site_s_own_file_shows(tmp_path):
    """'01' of one file is '01' of the other, whose column has a word too, and of the schema's next table."""
    folder = tmp_path / "sites"
    folder.mkdir()
    (folder / "a.csv").write_text("ward,label\n01,01\n1,1\n")  # numbers alone
    (folder / "b.csv").write_text("ward,label\n01,1\nx,1\n")
    schema = str(tmp_path / "schema.json")
    source = load(folder, schema=schema)
    assert source.x.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]  # 01, 1 and x
    assert (source.classes, source.y.tolist()) == (("01", "1"), [0, 1, 1, 1])
    (tmp_path / "next.csv").write_text("ward,label\n01,01\n")
    found = load(tmp_path / "next.csv", schema=schema)
    assert (found.x.tolist(), found.y.tolist()) == ([[1, 0, 0]], [0])


# --- commas and points ------------------------------------------------------------------------------------------------


def sites(folder, **bodies):
    folder.mkdir()
    for name, values in bodies.items():
        lines = [f'"{value}",{k % 2}' for k, value in enumerate(values)]
        (folder / f"{name}.csv").write_text("\n".join(["bmi,label", *lines]) + "\n")
    return folder


@pytest.mark.parametrize("rows", [4, 150])  # few texts would be categories, many are too many for that
def test_files_with_decimal_commas_beside_files_with_points_are_named(tmp_path, rows):
    commas, points = [f"{20 + k},7" for k in range(rows)], [f"{20 + k}.7" for k in range(rows)]
    for name, first, second in (("a", commas, points), ("b", points, commas)):
        folder = sites(tmp_path / name, East=first, West=second)
        file, other = ("East", "West") if first is commas else ("West", "East")
        said = refused(folder)
        assert f"column 'bmi' holds numbers with a comma in one file ('20,7', line 2 of {file}.csv)" in said
        assert "write all files alike" in said
        said = refused(folder, decimal="comma")
        assert f"column 'bmi' holds a number that decimal=comma cannot read ('20.7', line 2 of {other}.csv)" in said


def test_whole_numbers_beside_decimal_commas_are_read_with_them(tmp_path):
    folder = sites(tmp_path / "s", East=["1,5", "2,5"], West=["3", "4"])
    assert "decimal=comma reads 3,5 as 3.5" in refused(folder)
    assert load(folder, decimal="comma").x.flatten().tolist() == [1.5, 2.5, 3, 4]


@pytest.mark.parametrize("values", [["12,345", "1,234,567", "900"], ["12,345.50", "1,000.25", "3.5"]])
def test_thousands_with_commas_are_refused_as_labels_and_features(tmp_path, values):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,label", *(f'{k},"{v}"' for k, v in enumerate(values))]) + "\n")
    said = refused(path)
    assert f"holds numbers with a comma or points for thousands ('{values[0]}', line 2 of t.csv)" in said
    assert "commas that mark thousands must be taken out of the file" in said
    assert "column 'label' holds numbers with a comma" in refused(path, label="a", x="label")


@pytest.mark.parametrize(("said", "where"), [("inf", "line 3 of t.csv (inf)"), ("-1e60", "line 3 of t.csv (-1e+60)")])
def test_an_infinite_target_is_called_infinite_with_line_and_column(tmp_path, said, where):
    path = tmp_path / "t.csv"
    path.write_text(f"a,price\n1,0.5\n2,{said}\n3,2.5\n")
    told = refused(path, label="price")
    assert f"an infinite value in column 'price': {where}" in told
    assert "no label" not in told
    assert load(path, label="price", skip=True).y.tolist() == [0.5, 2.5]


def test_an_infinite_target_of_an_array_is_no_missing_one(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.zeros((3, 2)), y=np.array([0.5, np.inf, np.nan]))
    told = refused(tmp_path / "t.npz")
    assert "an infinite label" in told
    assert "no label" in told
