"""Ids, dates, groups and stray words are pointed out with what to type; ordinary features are not."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.data import load
from coterie.errors import CoterieError


def refused(*args, **options):
    with pytest.raises(CoterieError) as error:
        load(*args, **options)
    return str(error.value)


def noted(path, *words):
    """The notes of a source that hold any of these words."""
    return [note for note in load(path).notes if any(word in note for word in words)]


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
    (said,) = noted(path, "rather than measurements")
    assert f"'{name}': {why}" in said
    assert f"ignore={name}" in said
    assert "'age'" not in said
    assert not noted(f"{path}:ignore={name}", "rather than measurements"), "what is typed helps"
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
        assert not noted(path, "rather than measurements", "dates or times", "whose rows", "other texts"), name


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


@pytest.mark.parametrize(("written", "mark"), [
    ("{} mg", "'mg' beside them"), ("{}mmHg", "'mmHg' beside them"), ("{}%", "'%' beside them"),
    ("< {}.5", "'<' beside them"), ("€{}.50", "'€' beside them"), ("1 {:03d}", "blanks for thousands"),
    ("{}.5 µg/l", "'µg/l' beside them"),
])
def test_numbers_with_something_beside_them_are_pointed_out(tmp_path, written, mark):
    """As texts they are categories, and look like codes of groups or names of rows, which they are not."""
    for n, value in ((60, lambda k: int(DRAWN[k])), (60, lambda k: MIXED[k] + 10), (60, lambda k: k // 3 + 10)):
        path = table(tmp_path / "t.csv", {"dose": lambda k, value=value: written.format(value(k))}, n)
        (said,) = noted(path, "column 'dose'")
        first = written.format(value(0))
        assert f"column 'dose' holds numbers with {mark} ('{first}', line 2 of t.csv), so each of its" in said
        assert "write the numbers alone" in said
    many = table(tmp_path / "t.csv", {"dose": lambda k: written.format(k)}, 900)
    assert f"which are numbers with {mark} (" in refused(many)
    mixed = table(tmp_path / "t.csv", {"dose": lambda k: written.format(k) if k % 2 else k})
    assert noted(mixed, f"holds numbers with {mark}"), "half with and half without are numbers, too"


@pytest.mark.parametrize("code", ["A{}", "E{}.9", "room {}", "{}-{}", "ward {} b", "{}{}x{}"])
def test_codes_are_no_numbers_with_something_beside_them(tmp_path, code):
    path = table(tmp_path / "t.csv", {"place": lambda k: code.format(k % 7, "abcdefg"[k % 7], k % 3)})
    assert not noted(path, "beside them", "thousands")


def test_an_array_that_seems_to_name_clients_is_said_where_none_does(tmp_path):
    """`clients` is not `client`: its samples would be dealt to made-up clients without a word."""
    held = {"x": np.ones((60, 2)), "y": np.arange(60) % 2}
    for name in ("clients", "client_id", "site"):
        np.savez(tmp_path / "a.npz", **held, **{name: np.arange(60) % 4})
        (said,) = noted(tmp_path / "a.npz", "call it 'client'")
        assert f"'a.npz' has no array 'client', and '{name}' was not read; if it says whose" in said
    np.savez(tmp_path / "a.npz", **held, client=np.arange(60) % 4, sites=np.arange(60) % 5)
    assert not noted(tmp_path / "a.npz", "call it 'client'")


def test_named_features_are_the_users_choice(tmp_path):
    path = table(tmp_path / "t.csv", {"id": lambda k: k})
    assert not noted(f"{path}:x=id", "rather than measurements")


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
    client = lambda k: "ab"[k % 2]  # noqa: E731
    path = table(tmp_path / "t.csv", {"age": lambda k: round(DRAWN[k], 2), name: column, "client": client})
    (said,) = noted(path, "whose rows")
    assert f"group={name} keeps them on one side" in said
    assert noted(f"{path}:ignore={name}", "whose rows"), "who leaves it out still tears groups"
    assert not noted(f"{path}:group={name}", "whose rows", "rather than measurements")


def test_what_is_no_group_is_not(tmp_path):
    """The client itself, a column with as many values as clients, and columns without repeats."""
    columns = {"age": lambda k: int(DRAWN[k]), "patient": lambda k: k % 4, "client": lambda k: f"c{k % 4}",
               "sample": lambda k: f"s{MIXED[k]:03d}", "ward": lambda k: ["east", "west"][k % 2]}
    assert not noted(table(tmp_path / "t.csv", columns), "whose rows")
    many = {"patient": lambda k: f"p{k // 3:04d}", "age": lambda k: DRAWN[k % 60]}
    assert "group=patient keeps those of one on one side" in refused(table(tmp_path / "t.csv", many, 600))


def test_groups_of_other_formats_are_pointed_out_too(tmp_path):
    """An array that nobody asked for, a column of an index of images, and the speaker of texts."""
    from PIL import Image

    held = {"x": np.ones((60, 2)), "y": np.arange(60) % 2, "client": np.arange(60) % 3}
    np.savez(tmp_path / "a.npz", **held, lesion=MIXED // 3, weight=MIXED, noise=np.arange(60) % 2)
    (said,) = noted(tmp_path / "a.npz", "whose rows")
    assert "group=lesion keeps them on one side" in said
    assert not noted(f"{tmp_path / 'a.npz'}:group=lesion", "whose rows")
    Image.new("L", (4, 4)).save(tmp_path / "1.png")
    rows = "".join(f"1.png,{k % 2},HAM_{MIXED[k] // 3:05d},{k % 2}\n" for k in range(60))
    (tmp_path / "list.csv").write_text(f"path,label,lesion,sex\n{rows}")
    (said,) = noted(tmp_path / "list.csv", "whose rows")
    assert "group=lesion keeps them on one side" in said
    assert not noted(f"{tmp_path / 'list.csv'}:group=lesion", "whose rows")
    path = table(tmp_path / "t.csv", {"said": lambda k: f"good day {k}", "speaker": lambda k: f"s{k // 4}"})
    (said,) = noted(f"{path}:text=said", "whose rows")
    assert "group=speaker keeps them on one side" in said


# --- spellings and codes for what is missing --------------------------------------------------------------------------


def test_categories_that_differ_in_case_alone_are_named(tmp_path):
    path = table(tmp_path / "t.csv", {"ward": lambda k: ("East", "east", "west")[k % 3]})
    assert "column 'ward'" in noted(path, "differ in case")[0]
    assert "'East' and 'east'" in noted(path, "differ in case")[0]
    assert not noted(table(tmp_path / "t.csv", {"ward": lambda k: ("east", "west")[k % 2]}), "differ in case")


BMI = np.random.default_rng(7).normal(27, 4, 400)


@pytest.mark.parametrize(("code", "every"), [(-999, 10), (9999, 15), (-99, 3)])
def test_numbers_that_look_like_missing_codes_are_pointed_out(tmp_path, code, every):
    """The other values' mean and deviation, computed from them alone, are those that the note tells."""
    path = table(tmp_path / "t.csv", {"bmi": lambda k: code if k % every == 0 else f"{BMI[k]:.2f}"})
    rest = np.array([float(f"{BMI[k]:.2f}") for k in range(60) if k % every])
    told = noted(path, "missing value")
    assert len(told) == 1
    assert f"column 'bmi' holds {code} {60 - len(rest)} times, far from its other values" in told[0]
    assert f"(about {rest.mean():.3g}, deviation {rest.std():.3g})" in told[0]


@pytest.mark.parametrize(("column", "way"), [("bmi", "and fill the gaps with fill=mean, or leave their rows out"),
                                              ("label", "and leave their rows out")])
def test_what_to_do_about_missing_codes(tmp_path, column, way):
    """fill= is for features: what is to be predicted is not filled in."""
    lines = ["x,bmi,label", *(f"{k}.5,{-999 if column == 'bmi' and k % 10 == 0 else BMI[k]:.2f},"
                              f"{-999 if column == 'label' and k % 10 == 0 else BMI[-k]:.2f}" for k in range(60))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    (note,) = noted(tmp_path / "t.csv", "missing value")
    assert note.startswith(f"perhaps missing: column '{column}' holds -999 6 times")
    assert note.endswith(f"leave these cells empty in the file {way} with skip=true")


@pytest.mark.parametrize("column", [
    lambda k: -999 if k in (3, 4) else f"{BMI[k]:.2f}",  # twice only
    lambda k: -99 if k % 10 == 0 else f"{40 * (BMI[k] - 27):.1f}",  # not far
    lambda k: -999 if k % 10 == 0 else -2000 if k == 5 else f"{BMI[k]:.2f}",  # not the end of the range
    lambda k: (-1, 1)[k % 2],  # two values
    lambda k: 999 if k < 50 else k,  # too few others
])
def test_ordinary_numbers_are_no_missing_codes(tmp_path, column):
    assert not noted(table(tmp_path / "t.csv", {"bmi": column}), "missing value")


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "diabetes", "digits", "linnerud"])
def test_well_known_tables_raise_no_alarm_of_missing_codes(tmp_path, name):
    sets = pytest.importorskip("sklearn.datasets")
    held = getattr(sets, f"load_{name}")()
    y = held.target if held.target.ndim == 1 else held.target[:, 0]
    lines = [",".join(f"x{k}" for k in range(held.data.shape[1])) + ",label"]
    lines += [",".join(map(str, [*row, label])) for row, label in zip(held.data, y, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert not noted(tmp_path / "t.csv", "missing value", "differ in case", "no label", "equal")
