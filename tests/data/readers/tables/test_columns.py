"""Files of a folder that differ in columns: those that are asked for must be in all of them."""

from __future__ import annotations

import pytest

from coterie.data import load
from coterie.errors import CoterieError


def refused(*args, **options):
    with pytest.raises(CoterieError) as error:
        load(*args, **options)
    return str(error.value)



def folder(tmp_path):
    root = tmp_path / "sites"
    root.mkdir()
    (root / "a.csv").write_text("age,ward,label\n1,x,0\n2,y,1\n")
    (root / "b.csv").write_text("dose,age,label\n9,3,0\n8,4,1\n")
    return root


def test_a_column_is_not_taken_and_left_out_at_once(tmp_path):
    """x=a,ignore=a took it. Two sentences of the user contradict each other, and nobody knows which one is meant."""
    path, schema = tmp_path / "t.csv", str(tmp_path / "s.json")
    path.write_text("a,b,label\n1,2,0\n2,3,1\n")
    said = refused(path, x="a,b", ignore="b")
    assert said == "column 'b' is taken by x and left out by ignore; name it in one of them."
    load(path, schema=schema)
    assert "column 'a' is taken by the schema and left out by ignore" in refused(path, schema=schema, ignore="a")
    path.write_text("said,b,label\nyes,2,0\nno,3,1\n")
    assert "column 'said' is taken by text and left out" in refused(path, text="said", ignore="said")


def test_a_role_that_a_column_has_by_its_name_stays_and_is_said(tmp_path):
    """ignore= is about features; who writes ignore=client may think that the rows have no clients then."""
    path = tmp_path / "t.csv"
    path.write_text("a,client,label\n1,u,0\n2,v,1\n")
    source = load(path, ignore="client")
    assert source.client.tolist() == ["u", "v"]
    assert any(note.startswith("column 'client' is left out of the features by ignore, and it is the client still")
               for note in source.notes)
    assert not any("ignore" in note for note in load(path, client="client", ignore="client").notes)


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


def test_a_column_without_a_name_is_neither_the_label_nor_the_client(tmp_path):
    """pandas writes its index so. It was taken for whatever nobody had named, the text of the sample included, and
    refused as such."""
    (tmp_path / "t.csv").write_text(",age,label\n0,31,1\n1,42,0\n2,53,1\n")
    source = load(tmp_path / "t.csv")
    assert source.y.tolist() == [1, 0, 1]
    assert source.client is None
    assert source.split is None
    assert [feature.name for feature in source.features] == ["unnamed 1", "age"]
    assert any("'unnamed 1': by its name" in note and "ignore=unnamed 1" in note for note in source.notes)
    assert load(f"{tmp_path / 't.csv'}:ignore=unnamed 1").x.tolist() == [[31], [42], [53]]
