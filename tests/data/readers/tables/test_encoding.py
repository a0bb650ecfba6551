"""What a table's file or column is not, in words that say what to do."""

from __future__ import annotations

import pytest

from coterie.data import load
from coterie.errors import CoterieError


def refused(path, **options):
    with pytest.raises(CoterieError) as caught:
        load(path, **options)
    return str(caught.value)


def test_what_a_table_may_be_is_listed(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"a": 1, "label": 0}\n')
    said = refused(tmp_path / "t.jsonl", format="table")
    assert said == ("a table is a file .csv, .tsv, .txt, .dat, .data, .parquet or .pq, or a folder of csv and parquet "
                    "files; 't.jsonl' is none of them.")


@pytest.mark.parametrize("name", ["t.dat", "t.txt", "t"])
def test_plain_text_of_another_name_is_a_table_where_the_format_says_so(tmp_path, name):
    (tmp_path / name).write_text("a;label\n0.5;0\n1.5;1\n")
    assert load(f"{tmp_path / name}:format=table").x.tolist() == [[0.5], [1.5]]
    assert "say it with format=NAME" in refused(tmp_path / name) or "no file or folder" in refused(tmp_path / name)


def test_the_ending_may_be_in_capitals(tmp_path):
    (tmp_path / "T.CSV").write_text("a,label\n0.5,0\n1.5,1\n")
    assert load(tmp_path / "T.CSV").x.tolist() == [[0.5], [1.5]]


def test_latin_1_is_to_be_saved_as_utf_8(tmp_path):
    (tmp_path / "t.csv").write_bytes("ort,label\nKöln,0\nBonn,1\n".encode("latin-1"))
    said = refused(tmp_path / "t.csv")
    assert "byte 0xf6 is not written in UTF-8; save the file as UTF-8" in said
    assert "codec" not in said


def test_a_column_that_is_empty_in_all_rows_can_be_left_out(tmp_path):
    (tmp_path / "t.csv").write_text("a,gap,label\n0.5,,0\n1.5,,1\n2.5,,0\n")
    assert "leave the empty column out with ignore=gap" in refused(tmp_path / "t.csv")
    assert "fill=mean" not in refused(tmp_path / "t.csv")
    assert load(tmp_path / "t.csv", fill="mean").notes == (
        "filled in: column 'gap' lacked 3 of 3 values (0); it is empty, and ignore=gap leaves it out",)
    assert load(tmp_path / "t.csv", ignore="gap").notes == ()
