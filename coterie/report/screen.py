"""Text on its way to people: the terminal, logs and Markdown.

Names of clients, classes, columns, files, tensors and sites, and what sites and files say is wrong, were written by
others. Whatever is printed is printed from here, or by `errors.tell`, as text: no markup in it is followed, and no sign
in it steers the terminal. A `str` is one line; what has several is a `Text`.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from coterie.errors import visible


class Screen(Console):
    """The terminal. Where output goes to a file or a pipe there is no width to respect: `least` columns, then."""

    def __init__(self, stderr: bool = False, least: int = 0) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and least:
            self.width = max(self.width, least)

    def render_str(self, text: str, **options: Any) -> Text:
        """Of what is printed and of a table's titles and cells: what they need of the width is known from here on."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Whatever else was made into text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, lines=True))


def plain(text: str) -> Text:
    """One line for parts of rich that would read a `str` as markup."""
    return Text(visible(text))


class LogLines(logging.Formatter):
    """A record is one line, whoever wrote the words in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name in logging)
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the same)
        return visible(super().formatException(ei), lines=True)


_MARKS = re.compile(r"[\\`*\[\]]")


def markdown_text(text: str) -> str:
    """A name in Markdown: no emphasis, no link, no tag; what ends a cell is the table's business."""
    return _MARKS.sub(lambda mark: f"\\{mark[0]}", html.escape(visible(text), quote=False))
