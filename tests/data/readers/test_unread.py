"""Files of other kinds in a folder are said: whole sites vanished that had sent theirs as .xlsx or .dcm."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from PIL import Image

from coterie.data import load
from coterie.errors import CoterieError
from coterie.running.experiment import Experiment

ROWS = "age,label\n" + "".join(f"{30 + k},{k % 2}\n" for k in range(12))
QUIET = (".DS_Store", "Thumbs.db", "desktop.ini", "README.txt", "LICENSE", "CITATION.cff", "notes.md", ".git/config",
         "__MACOSX/site0.csv")


def written(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(ROWS.encode()) if name.endswith(".gz") else ROWS.encode())
    return root


def pictures(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), len(name), np.uint8)).save(root / name)
    return root


def test_tables_of_other_names_are_said(tmp_path):
    """6 sites sent a file, and 2 of them are read: the others are named, also by what a comparison records."""
    written(tmp_path, "site0.csv", "site1.csv", "site2.txt", "site3.xlsx", "site4.csv.gz", "sub/site5.csv", *QUIET)
    source = load(tmp_path)
    assert sorted(set(source.client)) == ["site0", "site1"]
    (said,) = (note for note in source.notes if "not read" in note)
    assert said == ("not read: 4 files of other names (site2.txt, site3.xlsx, site4.csv.gz, sub/site5.csv); of a "
                    "folder of tables, .csv, .tsv, .parquet and .pq files are read that lie in it directly")
    assert said in Experiment(data=str(tmp_path)).federation().recipe["notes"]


def test_of_many_unread_files_a_few_are_named(tmp_path):
    written(tmp_path, "site0.csv", *(f"more/{k}.txt" for k in range(9)))
    (said,) = (note for note in load(tmp_path).notes if "not read" in note)
    assert "9 files of other names (more/0.txt, more/1.txt, more/2.txt, more/3.txt, and 5 more);" in said


def test_tables_alone_say_nothing(tmp_path):
    """Neither do pages for people, nor the schema that the reader itself wrote there."""
    written(tmp_path / "f", "site0.csv", "site1.TSV", *QUIET)
    (tmp_path / "f/site1.TSV").write_text(ROWS.replace(",", "\t"))
    for _ in range(2):
        source = load(tmp_path / "f", format="table", schema=str(tmp_path / "f/schema.json"))
        assert not [note for note in source.notes if "not read" in note]
    assert (tmp_path / "f/schema.json").exists()


def test_images_of_other_names_are_said(tmp_path):
    pictures(tmp_path, *(f"site{s}/{c}/{k}.png" for s in "AB" for c in ("lesion", "none") for k in range(3)))
    written(tmp_path, *(f"siteA/lesion/{k}.dcm" for k in range(3, 9)), "siteB/lesion/0.tga", "siteB/lesion/3.heic",
            "siteB/lesion/scan", *QUIET[:-1])
    (said,) = load(tmp_path).notes
    assert said.startswith("not read: 9 files of other names (siteA/lesion/3.dcm, siteA/lesion/4.dcm, "
                           "siteA/lesion/5.dcm, siteA/lesion/6.dcm, and 5 more); of a folder of images, .png, .jpg, ")


def test_files_at_another_depth_are_counted_among_all(tmp_path):
    """4 of 12 images lie a folder too deep; they were left out of the total, as '4 of 8'."""
    pictures(tmp_path, *(f"a/x/{k}.png" for k in range(4)), *(f"b/y/{k}.png" for k in range(4)),
             *(f"b/y/deep/{k}.png" for k in range(4)))
    with pytest.raises(CoterieError, match="4 of 12 files lie outside the folders of the others"):
        load(tmp_path)
