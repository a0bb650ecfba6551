"""Clients and classes that have names are called by them: on the page, in the figures and in the picture of the data."""

import matplotlib
import pytest
from chromium import chromium, opened

from coterie.data import Federation, digits, partition
from coterie.report.bubbles import bubbles
from coterie.report.data import gather
from coterie.report.figures import figures
from coterie.report.page import page as html

DIAGNOSES = ["healthy", "pneumonia", "tuberculosis"]  # of the fixture `sites`, in this order


@pytest.fixture(scope="module")
def data(named):
    return gather([named])


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one


@pytest.fixture
def report(data, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(html(data), encoding="utf-8")
    return path.as_uri()


def ticks(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


def drawn(federation, path):
    """The texts of the picture, as SVG keeps them."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return bubbles(federation, path).read_text(encoding="utf-8")


# -- classes ----------------------------------------------------------------------------------------------------------


def test_the_figure_names_the_classes(data):
    assert ticks(dict(figures(data))["classes"].axes[0].yaxis) == DIAGNOSES


def test_the_picture_of_the_data_names_the_classes(sites, tmp_path):
    made = drawn(sites, tmp_path / "picture.svg")
    assert all(f">{name}<" in made for name in DIAGNOSES)


def test_classes_without_names_keep_their_numbers(tmp_path):
    x, y = (part[:300] for part in digits())
    made = drawn(Federation.from_assignment(x, y, partition("iid", y.numpy(), 3, seed=0)), tmp_path / "picture.svg")
    assert all(f">{k}<" in made for k in range(10))


def test_the_page_names_the_classes(browser, report, data):
    """At the axis, in the tip with the client's own counts, most frequent first, and in the client's card."""
    counts = sorted(zip(data["clients"][3]["classes"], DIAGNOSES), reverse=True)
    with opened(browser, report) as page:
        texts = page.locator("#classes svg text").all_text_contents()
        assert [t for t in texts if t in DIAGNOSES] == DIAGNOSES
        assert not {"0", "1", "2"} & set(texts)
        page.locator('#classes rect[data-client="3"]').hover()
        assert page.locator("#tip").inner_text().split("\n")[2:] == [f"{name}: {n}" for n, name in counts]
        page.locator('#classes rect[data-client="3"]').click()
        assert page.locator("#card .bars-x span").evaluate_all("all => all.map(e => e.title)") == DIAGNOSES
        assert page.said == []
