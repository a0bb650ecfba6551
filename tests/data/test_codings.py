"""Labels or categories that clients seem to write in other ways are pointed out, with who writes what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.data import codings
from coterie.running.experiment import Experiment

SITES = ("ams", "ber", "cph", "dub", "edi")
WORDS, CODES = ("benign", "malignant"), ("0", "1")


def notes(folder, labels, sex=None, **options):
    """Sites with their labels, and their categories of a column, in turn: the notes on how these are written."""
    rng = np.random.default_rng(0)
    lines = ["radius,sex,client,label"]
    for name, words in labels.items():
        for k in range(40):
            held = ("f", "m") if sex is None else sex[name]
            lines.append(f"{rng.normal():.3f},{held[k // 2 % len(held)]},{name},{words[k % len(words)]}")
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    made = Experiment(data=str(folder / "t.csv"), **options).federation()
    return [note for note in made.recipe.get("notes", ()) if "written otherwise" in note]


def each(*held):
    return dict(zip(SITES, held, strict=False))


@pytest.mark.parametrize(
    ("labels", "said"),
    [(each(CODES, CODES, WORDS, WORDS),
      "2 groups without a class in common, ams, ber with '0', '1'; cph, dub with 'benign', 'malignant':"),
     (each(WORDS, WORDS, WORDS, CODES), "2 groups without a class in common, ams, ber, cph with 'benign', 'malignant'; "
                                        "dub with '0', '1':"),
     (each(CODES, WORDS), "2 groups without a class in common, ams with '0', '1'; ber with 'benign', 'malignant':"),
     (each(CODES, ("FALSE", "TRUE"), WORDS, WORDS, WORDS), "3 groups without a class in common, ams with '0', '1'; ber "
      "with 'FALSE', 'TRUE'; cph, dub, edi with 'benign', 'malignant':"),
     (each(("nein", "ja"), ("nein", "ja"), ("no", "yes"), ("no", "yes")), "ams, ber with 'ja', 'nein'; cph, dub with"),
     (each(("0", "1", "9"), ("0",), ("1",), WORDS), "ams, ber, cph with '0', '1', '9'; dub with"),
     (each(("0", "1", "unclear"), ("0", "1"), WORDS, WORDS), "ams, ber with '0', '1', 'unclear'; cph, dub with")],
    ids=["two and two", "one of four", "one and one", "three codings", "two languages", "with skew",
         "a word among numbers"],
)
def test_groups_of_clients_that_share_no_label(labels, said, tmp_path):
    """Numbers here and words there, or a few groups with as many words each: probably one label in several codings.

    A client with 0 alone and one with 1 alone are in one group with who has both.
    """
    (note,) = notes(tmp_path, labels)
    assert note.startswith("clients fall into")
    assert said in note
    assert note.endswith("the same labels, written otherwise? Write them alike then")


def test_a_folder_with_a_coding_in_each_file(tmp_path):
    for name, words in each(CODES, ("no", "yes"), ("neg", "pos")).items():
        (tmp_path / f"{name}.csv").write_text("x,label\n" + "".join(f"{k}.5,{words[k % 2]}\n" for k in range(40)))
    said = Experiment(data=str(tmp_path)).federation().recipe["notes"]
    (note,) = (note for note in said if "written otherwise" in note)
    assert "3 groups without a class in common, ams with '0', '1'; ber with 'no', 'yes'; cph with 'neg', 'pos'" in note


def test_a_word_misspelt_at_one_site(tmp_path):
    """The site shares 'malignant' with the others, so there are no groups; it alone has 'begnin' for their 'benign'."""
    (said,) = notes(tmp_path, each(WORDS, WORDS, WORDS, ("begnin", "malignant"), WORDS))
    assert said.startswith("client dub alone has the class 'begnin', and lacks 'benign', which all others have")


@pytest.mark.parametrize(
    "labels",
    [each(WORDS, (*WORDS, "other"), WORDS), each(WORDS, WORDS[:1], WORDS), each(("cat",), ("dog",)),
     each(CODES, ("yes",), ("no",)), {name: (name, f"{name}2") for name in SITES},
     each(("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"), ("8", "9")), each(("0", "1"), ("2", "3")),
     each(("0", "1"), ("0", "1"), ("2", "3"), ("2", "3")), each(("a", "b", "c"), ("d", "e")),
     {name: [str(v) for v in np.random.default_rng(k).integers(0, 50, 40)] for k, name in enumerate(SITES)},
     {name: [*WORDS * 20, "ill" if name == "dub" else "well"] for name in SITES}],
    ids=["one more", "one less", "one class each", "one class here", "own everywhere", "two digits each", "two and two",
         "parts of the digits", "unequal words", "ages", "a rare class"],
)
def test_skewed_labels_are_no_spelling(labels, tmp_path):
    """Honest skew: numbers everywhere are one coding (a 'pathological' partition gives two digits to a client), one
    class alone is skew, and so are words of which everybody has others."""
    assert notes(tmp_path, labels) == []


def test_clients_that_a_partition_made_up_have_no_spelling():
    """Two clients with the labels of two hospitals are dealt so: only clients of the data's own write labels."""
    recipe = {"classes": ["0", "1", "no", "yes"]}
    counts, bounds = np.array([[5, 5, 0, 0], [0, 0, 5, 5]]), np.array([[0, 10, 10, 10], [10, 20, 20, 20]])
    given = torch.zeros(20, 1), bounds, counts, ("a", "b")
    assert codings.notes(*given, {**recipe, "partition": "iid"}) == []
    assert len(codings.notes(*given, {**recipe, "partition": "natural"})) == 1


def test_categories_written_otherwise_at_one_site(tmp_path):
    labels = dict.fromkeys(SITES, WORDS)
    (said,) = notes(tmp_path, labels, sex={**dict.fromkeys(SITES, ("m", "w")), "cph": ("1", "2")})
    assert said.startswith("column 'sex': clients fall into 2 groups without a value in common")
    assert "ams, ber, dub, edi with 'm', 'w'; cph with '1', '2'" in said
    assert said.endswith("the same values, written otherwise? Write them alike then, or leave the column out with "
                         "ignore=sex")
    assert notes(tmp_path, labels, sex={**dict.fromkeys(SITES, ("A", "B", "C")), "cph": ("0", "1", "2")})


def test_categories_that_differ_as_clients_do(tmp_path):
    """Wards of five hospitals, a hospital for women (one value), and a value that one site alone has."""
    labels = dict.fromkeys(SITES, WORDS)
    both = dict.fromkeys(SITES, ("m", "w"))
    wards = {name: (f"{name} 1", f"{name} 2") for name in SITES}
    for sex in (wards, {**both, "ber": ("f",)}, {**both, "ber": ("m", "w", "d")}):
        assert notes(tmp_path, labels, sex=sex) == []
