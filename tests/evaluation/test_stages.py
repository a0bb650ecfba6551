"""Stages have their names and their order in one place."""

import ast
from pathlib import Path

import pytest

import coterie
from coterie.evaluation.stages import ABOUT, PREFIX, SEEN, STAGES, basis, title, unseen

PACKAGE = Path(coterie.__file__).parent


def test_the_names_and_their_order_are_those_of_run_folders():
    """clients.csv and metrics.jsonl hold these words, so they cannot change."""
    assert STAGES == ("served", "adapted", "unseen_served", "unseen_adapted")
    assert tuple(ABOUT) == SEEN


@pytest.mark.parametrize("stage", SEEN)
def test_an_unseen_stage_is_based_on_the_seen_one(stage):
    assert basis(unseen(stage)) == basis(stage) == stage
    assert title(stage) == stage
    assert title(unseen(stage)) == f"unseen clients, {stage}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_writes_them_out(path):
    """Neither both names in a row, which would be a second order, nor the prefix of unseen stages."""
    if path == PACKAGE / "evaluation" / "stages.py":
        return
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            written = {item.value for item in node.elts if isinstance(item, ast.Constant)}
            assert not set(SEEN) <= written, f"line {node.lineno}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not node.value.startswith(PREFIX), f"line {node.lineno}"


def test_neither_does_the_page():
    """It gets them with its data."""
    programs = list((PACKAGE / "report").rglob("*.js"))
    assert programs
    for path in programs:
        text = path.read_text("utf-8")
        assert not any(f'"{name}"' in text for name in (*STAGES, PREFIX)), path.name
