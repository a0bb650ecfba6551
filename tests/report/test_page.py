"""The page's sources: every script is inlined, in one order, and all of them can be read."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from coterie.report.page import SCRIPTS, program

WEB = Path(str(files("coterie.report"))) / "web"


def test_every_script_of_the_folder_is_inlined_once():
    """A file that is not named would be shipped and never run."""
    assert sorted(SCRIPTS) == sorted(path.stem for path in WEB.glob("*.js"))
    whole = program()
    assert whole.startswith('"use strict";\n(() => {\n')
    assert whole.endswith("})();")
    places = [whole.index((WEB / f"{name}.js").read_text("utf-8")) for name in SCRIPTS]
    assert places == sorted(places)


@pytest.mark.parametrize("path", sorted(WEB.iterdir()), ids=lambda path: path.name)
def test_lines_are_at_most_120_characters(path):
    assert [number for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if len(line) > 120] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_knows_a_metric_by_name(name):
    """Title, unit and direction are the scale's, which the data hold."""
    assert not re.search(r"accuracy|squared|MSE|[\"']loss[\"']", (WEB / f"{name}.js").read_text("utf-8"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_begins_with_what_it_is_for(name):
    first = (WEB / f"{name}.js").read_text("utf-8").splitlines()[0]
    assert first.startswith("// ")
    assert first.endswith(".")
