"""The picture of who holds what."""

from __future__ import annotations

import matplotlib
import pytest
from marked import marked

from coterie.data import Federation
from coterie.report.bubbles import bubbles


@pytest.mark.parametrize("classes", [3, 0])
def test_the_picture_is_a_png(classes: int, tmp_path: object) -> None:
    federation = Federation.from_clients(marked(12, 9, 15), classes=classes, unseen=1)
    path = bubbles(federation, f"{tmp_path}/picture.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", [r"$\frac$", "$x_2$", "a$b", r"\alpha", "$$", r"\$"])
def test_a_name_is_no_formula(name: str, tmp_path: object) -> None:
    """Broken formulas raised, good ones were typeset; settings of the user's for TeX are not followed either."""
    parts = marked(12, 9, 15)
    federation = Federation.from_clients(parts, classes=3, names=[name, "b", "c"],
                                         recipe={"classes": [name, "d", "e"]})
    with matplotlib.rc_context({"svg.fonttype": "none", "text.usetex": True}):
        text = bubbles(federation, f"{tmp_path}/picture.svg").read_text(encoding="utf-8")
        assert matplotlib.rcParams["text.parse_math"] is True  # whoever draws beside us is left alone
    assert text.count(f">{name}<") == 2
