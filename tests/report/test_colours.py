"""Ten methods in one chart can be told apart, on light and on dark paper, and by colour-blind readers."""

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

from coterie.report.plots import COLOURS, line_style

# Linear RGB -> linear RGB as seen without the red or the green cones (Machado, Oliveira and Fernandes 2009).
RED_BLIND = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
GREEN_BLIND = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
# Linear RGB -> cones, and their cube roots -> OKLab (Ottosson 2020).
CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
         [0.0883024619, 0.2817188376, 0.6299787005]]
LAB = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
       [0.0259040371, 0.7827717662, -0.8086757660]]


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def apart(a, b, sight=None):
    """The distance in OKLab, where black and white are 1 apart and 0.02 is just noticed."""
    seen = [np.clip(np.array(sight or np.eye(3)) @ linear(c), 0, 1) for c in (a, b)]
    lab = [np.array(LAB) @ np.cbrt(np.array(CONES) @ c) for c in seen]
    return float(np.linalg.norm(lab[0] - lab[1]))


def contrast(a, b):
    light = sorted(float(np.dot([0.2126, 0.7152, 0.0722], linear(c))) for c in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


def palettes():
    """The colours --m0, --m1, ... of each theme of the page, and the paper they are drawn on."""
    blocks = re.findall(r"\{([^{}]*--m0:[^{}]*)\}", (files("coterie.report") / "web" / "page.css").read_text("utf-8"))
    return [(re.findall(r"--m\d: (#\w{6})", b), re.search(r"--panel: (#\w{6})", b)[1]) for b in blocks]


def test_the_distance_is_the_known_one():
    assert apart("#000000", "#ffffff") == pytest.approx(1, abs=1e-3)
    assert apart("#808080", "#808080") == 0
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_page_and_figures_have_the_same_colours():
    light, auto_dark, dark = palettes()
    assert light == (list(COLOURS), "#ffffff")
    assert auto_dark == dark
    assert len(dark[0]) == 10


@pytest.mark.parametrize("number", [0, 2], ids=["light", "dark"])
def test_ten_methods_are_told_apart(number):
    """The two blues that were taken for one were 0.13 apart for everybody; two others 0.01 for the green-blind."""
    colours, paper = palettes()[number]
    assert min(apart(a, b) for a, b in combinations(colours, 2)) > 0.18
    assert min(apart(a, b, blind) for a, b in combinations(colours, 2) for blind in (RED_BLIND, GREEN_BLIND)) > 0.09
    assert min(contrast(colour, paper) for colour in colours) >= 3


def test_twenty_lines_differ_in_colour_or_dashes():
    assert len({(COLOURS[i % 10], line_style(i)) for i in range(20)}) == 20
