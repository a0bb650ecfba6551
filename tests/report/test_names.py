"""Clients and classes that have names are called by them: on the page, in its figures and in the data's picture."""

import matplotlib
import pytest
from chromium import chromium, opened

from coterie.data import Federation, digits, partition
from coterie.report.bubbles import bubbles
from coterie.report.contents import gather
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


# -- clients ----------------------------------------------------------------------------------------------------------


def test_the_figures_name_the_clients(data, sites):
    """All twelve, the longest shortened to 24 characters; by gain in the one, in the data's order in the other."""
    shown = [name if len(name) <= 24 else f"{name[:23]}…" for name in sites.names]
    assert "Universitätsspital Züri…" in shown
    drawn = dict(figures(data))
    assert sorted(ticks(drawn["clients"].axes[0].xaxis)) == sorted(shown)
    assert ticks(drawn["classes"].axes[0].xaxis) == shown


def test_the_picture_of_the_data_names_the_clients(sites, tmp_path):
    made = drawn(sites, tmp_path / "picture.svg")
    assert all(f">{name}<" in made for name in sites.names if len(name) <= 24 and "'" not in name)


@pytest.mark.parametrize(("clients", "shown"), [(40, 40), (400, 67)])
def test_names_are_thinned_out_only_where_they_cannot_fit(clients, shown, tmp_path):
    """40 names have 12.2 inches, 22 points each; of 400 clients 200 are drawn, 4.4 points each: every third name."""
    x, y = (part[: 2 * clients] for part in digits())
    names = [f"clinic-{i:03}" for i in range(clients)]
    parts = [(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]) for i in range(clients)]
    made = drawn(Federation.from_clients(parts, names=names, classes=10, test=0, val=0), tmp_path / "picture.svg")
    assert sum(f">{name}<" in made for name in names) == shown


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_the_page_names_the_clients(browser, report, sites, size):
    """On a screen and on a phone; the whole name on hover, and a click chooses the client."""
    long = "Universitätsspital Zürich"
    with opened(browser, report, size) as page:
        for chart in ("clients", "classes"):
            texts = page.locator(f"#{chart} svg text[data-client]").all_text_contents()
            assert sorted(texts) == sorted(n if n != long else "Universitätsspital Züri…" for n in sites.names), chart
        page.locator("#classes svg text", has_text="Universitätsspital").hover()
        assert page.locator("#tip").inner_text() == long
        page.locator("#classes svg text", has_text="Universitätsspital").click()
        assert page.locator("#client").input_value() == str(sites.names.index(long))
        assert page.locator("#clients svg text.on").all_text_contents() == ["Universitätsspital Züri…"]
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.said == []
