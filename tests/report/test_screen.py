"""What others wrote is printed as text: on a terminal, in a log, in Markdown."""

import logging
from io import StringIO

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from coterie.report.screen import LogLines, Screen, markdown_text, plain

OWNED = "[/x]\x1b]0;owned\x07 [red] :smile: \x9b31m"
SHOWN = r"[/x]\x1b]0;owned\x07 [red] :smile: \x9b31m"


def printed(*shown, terminal=False, monkeypatch=None, **options):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen(least=100)
    screen.file = StringIO()
    screen.print(*shown, **options)
    return screen.file.getvalue()


QUIET = SHOWN.replace(r"\x07", "")
"""A bell is left out by rich's own `Text`."""


@pytest.mark.parametrize(("made", "shown"), [
    (OWNED, SHOWN), (plain(OWNED), SHOWN), (Group(OWNED), SHOWN), (Text(OWNED), QUIET), (Group(Text(OWNED)), QUIET),
])
def test_neither_markup_nor_escapes_are_followed(made, shown):
    assert printed(made) == shown + "\n"


def test_tables_are_as_wide_as_what_they_show():
    """Title, heads, cells and caption; the right border stands below itself, so the cells were measured as shown."""
    table = Table(OWNED, "n", title=OWNED, caption=OWNED)
    table.add_row(OWNED, "1")
    lines = printed(table).splitlines()
    assert sum(SHOWN in line for line in lines) == 4
    bordered = {len(line.rstrip()) for line in lines if line.startswith(("┃", "│", "┏", "└"))}
    assert bordered == {len("│  │ n │") + len(SHOWN)}


def test_a_name_stays_in_its_line():
    table = Table("client")
    table.add_row("a\ncoterie: done")
    assert r"a\ncoterie: done" in printed(table)
    assert printed("a\nb") == "a\\nb\n"
    assert printed(Text("a\nb")) == "a\nb\n"  # lines of our own


def test_the_screens_own_colours_stay(monkeypatch):
    """Only what rich itself adds are escapes: bold on and off."""
    said = printed(Text(OWNED, "bold"), terminal=True, monkeypatch=monkeypatch)
    assert said == f"\x1b[1m{QUIET}\x1b[0m\n"


def test_a_record_of_a_log_is_one_line():
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogLines("%(message)s"))
    log = logging.Logger("sites")
    log.addHandler(handler)
    log.warning("%s: rejected: %s", "lyon\noslo: admitted", OWNED)
    assert stream.getvalue() == f"lyon\\noslo: admitted: rejected: {SHOWN}\n"
    try:
        raise ValueError(OWNED)
    except ValueError:
        log.exception("failed")
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines()[-1] == f"ValueError: {SHOWN}"


@pytest.mark.parametrize(("name", "text"), [
    ("fedfew:models=5,mu=0.1", "fedfew:models=5,mu=0.1"),
    ("my_file.py:Mine", "my_file.py:Mine"),
    ("*a*`b`[c](d)\\", "\\*a\\*\\`b\\`\\[c\\](d)\\\\"),
    ("<b>&amp;", "&lt;b&gt;&amp;amp;"),
    ("a\nb\x1b", "a\\\\nb\\\\x1b"),
])
def test_names_in_markdown(name, text):
    assert markdown_text(name) == text
