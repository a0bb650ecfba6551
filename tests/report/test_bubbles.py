"""The picture of who holds what."""

from __future__ import annotations

import pytest
from marked import marked

from coterie.data import Federation
from coterie.report.bubbles import bubbles


@pytest.mark.parametrize("classes", [3, 0])
def test_the_picture_is_a_png(classes: int, tmp_path: object) -> None:
    federation = Federation.from_clients(marked(12, 9, 15), classes=classes, unseen=1)
    path = bubbles(federation, f"{tmp_path}/picture.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
