"""The list of what a user has trusted: where it lies, who may write to it, and what happens without it."""

import os
from pathlib import Path

import pytest

from coterie.trust import digests

ONE, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def listed(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_TRUSTED", str(tmp_path / "conf" / "trusted"))
    monkeypatch.setattr(digests, "_unkept", set())
    return tmp_path / "conf" / "trusted"


def test_what_is_added_is_trusted_and_nobody_else_reads_it(listed):
    """One line for each content, with the name it had; a name cannot make lines of its own."""
    assert not digests.trusted(ONE)
    digests.add(ONE, f"mine.py\n{OTHER}  evil.py\x1b[2J")
    digests.add(ONE, "mine.py")
    assert digests.trusted(ONE)
    assert not digests.trusted(OTHER)
    assert listed.read_text() == f"{ONE}  mine.py?{OTHER}  evil.py?[2J\n"
    assert listed.stat().st_mode & 0o777 == 0o600
    assert listed.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("variables", "place"), [
    ({"COTERIE_TRUSTED": "/a/b"}, "/a/b"),
    ({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/coterie/trusted"),
    ({"XDG_CONFIG_HOME": "not/whole", "HOME": "/h"}, "/h/.config/coterie/trusted"),
    ({"HOME": "/h"}, "/h/.config/coterie/trusted"),
])
def test_where_it_lies(monkeypatch, variables, place):
    for name in ("COTERIE_TRUSTED", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(digests.place()) == place


@pytest.mark.parametrize("kind", ["others may write", "a pipe", "a folder"])
def test_a_list_that_is_nobodys_word_trusts_nothing_and_says_why(listed, kind):
    listed.parent.mkdir()
    if kind == "others may write":
        listed.write_text(f"{ONE}  mine.py\n")
        listed.chmod(0o666)
    elif kind == "a pipe":
        os.mkfifo(listed)
    else:
        listed.mkdir()
    assert not digests.trusted(ONE)
    assert str(listed) in digests.trouble()


def test_without_a_place_it_counts_for_this_process(monkeypatch, capsys):
    """A home that cannot be written to: said once, and nothing is kept."""
    monkeypatch.setenv("COTERIE_TRUSTED", "/proc/nowhere/trusted")
    monkeypatch.setattr(digests, "_unkept", set())
    for _ in range(2):
        digests.add(ONE, "mine.py")
    assert digests.trusted(ONE)
    said = capsys.readouterr().err
    assert said.count("that mine.py is trusted cannot be kept") == 1
    assert "it counts for this process alone" in said


def test_without_a_home_nothing_is_trusted(monkeypatch):
    monkeypatch.delenv("COTERIE_TRUSTED")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert not digests.trusted(ONE)
    assert "there is no home folder" in digests.trouble()


def test_a_damaged_list_trusts_what_it_says_and_no_more(listed):
    listed.parent.mkdir()
    listed.write_bytes(f"{ONE[:-1]}\nxx{OTHER}\n{'3' * 65}\n".encode() + b"\xff\xfe\n" + f"{'4' * 64}\n".encode())
    listed.chmod(0o600)
    assert [digit for digit in "1234" if digests.trusted(digit * 64)] == ["4"]
