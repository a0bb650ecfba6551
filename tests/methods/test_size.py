"""A method file is read next to its paper, so it must stay about as short: lines of code are counted."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from pathlib import Path

import pytest

import coterie.methods

FILES = sorted(path for path in Path(coterie.methods.__path__[0]).glob("*.py") if path.stem != "__init__")
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def lines_of_code(text: str) -> int:
    """Lines with code on them: no blanks, no comments, no docstrings of modules, classes, functions and options."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_count_is_one_by_hand():
    """def, x =, the two lines of the call and return: 5."""
    text = '"""Module."""\n\ndef f():\n    """Two\n    lines."""\n    x = 1  # why\n\n    # why\n    print(\n'
    assert lines_of_code(text + "        x)\n    return x\n") == 5


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_no_method_is_longer_than_a_page(file):
    assert lines_of_code(file.read_text()) <= 120, "the contract misses a word; propose it"


def test_the_median_method_is_short():
    assert statistics.median(lines_of_code(file.read_text()) for file in FILES) <= 47  # some of them name ranges
