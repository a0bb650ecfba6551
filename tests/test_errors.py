"""Counts read as people write them, wherever the program tells one."""

import pytest
import torch
from typer.testing import CliRunner

from coterie.cli import app
from coterie.data import Federation
from coterie.errors import CoterieError, counted, say, shortened, tell, visible
from coterie.flower.policy import Policy
from coterie.report.bubbles import _title
from coterie.report.contents import gather


def test_a_count_has_its_noun_in_the_right_number():
    assert [counted(n, "round") for n in (0, 1, 2)] == ["0 rounds", "1 round", "2 rounds"]
    assert [counted(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]


@pytest.mark.parametrize(("text", "seen"), [
    ("Universitätsspital Zürich, 東京, נתניה", "Universitätsspital Zürich, 東京, נתניה"),  # letters of any script
    ("क\u094d\u200dष 👩\u200d🔬", "क\u094d\u200dष 👩\u200d🔬"),  # joiners belong to words and to signs made of several
    ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"), ("\x9b31m", r"\x9b31m"), ("\x7f", r"\x7f"), ("a\tb\r\n", r"a\tb\r\n"),
    ("\u202egnp.exe", r"\u202egnp.exe"), ("\u2066\u2069\u200e\u061c", r"\u2066\u2069\u200e\u061c"),
    ("\u2028\u2029\u0085", r"\u2028\u2029\x85"), ("\ud800", r"\ud800"), ("\ufeff\U000e0041", r"\ufeff\U000e0041"),
])
def test_what_steers_a_terminal_is_written_out(text, seen):
    assert visible(text) == seen
    assert visible(seen) == seen


def test_lines_of_our_own_stay_lines(capsys):
    assert visible("a\n\tb\r\x1b", lines=True) == "a\n\tb\\r\\x1b"
    tell("a\nb\x1b", end="")
    say(["a\nb\x1b"])
    assert capsys.readouterr() == ("a\nb\\x1b", "coterie: a\\nb\\x1b\n")


def test_a_long_name_is_its_beginning():
    """The written-out signs count: what is shown has so many letters at most."""
    assert shortened("abc", 3) == "abc"
    assert shortened("abcd efg", 6) == "abcd…"  # no blank before the mark
    assert shortened("\x1b" * 9, 6) == "\\x1b\\…"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of one round with one seed."""
    folder = tmp_path_factory.mktemp("single") / "run"
    words = ["run", "fedavg", "--clients", "3", "--model", "linear", "--rounds", "1", "--set", "device=cpu"]
    done = CliRunner().invoke(app, [*words, "--out", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return folder


def test_a_run_of_one_round_is_shown_as_one(single):
    shown = CliRunner().invoke(app, ["show", str(single)], catch_exceptions=False).output
    assert "1 round" in shown
    assert "1 rounds" not in shown


def test_the_report_counts_one_round_and_one_seed(single):
    facts = gather([single])["facts"]
    assert [fact for fact in facts if "round" in fact or "seed" in fact] == ["1 round, learning rate 0.05", "1 seed"]


def test_an_unfinished_run_is_one_of_one_run(single, tmp_path):
    (tmp_path / "run").mkdir()
    for path in single.iterdir():
        if path.is_file() and path.name != "result.json":
            (tmp_path / "run" / path.name).write_bytes(path.read_bytes())
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")], catch_exceptions=False).output
    assert "unfinished: 1 of 1 run;" in shown


def test_one_client_is_one_client():
    alone = Federation.from_clients([(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))], classes=2)
    assert repr(alone) == "<Federation: 1 client, 4 samples [2]>"
    assert _title(alone, range(1)) == "1 client, 4 samples"
    number = Federation.from_clients([(torch.zeros(4, 2), torch.zeros(4))])
    assert "regression, 1 target\n" in number.summary()


def test_one_site_is_one_site():
    with pytest.raises(CoterieError, match=r"minimum=2 answers cannot come from 1 site\."):
        Policy(sites=1, minimum=2)
