"""The page in a real Chromium: what a reader clicks does what it says, offline and without a complaint."""

import json
import os
import re
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from chromium import SIZES, chromium, opened, screenshots, unfold
from rescored import DIAGNOSES, SITES, made_up_answers

import coterie
from coterie.data import Federation
from coterie.evaluation.reading import number
from coterie.models import model
from coterie.report.contents import gather, told
from coterie.report.figures import figures, focus
from coterie.report.page import page as html
from coterie.report.table import rows
from coterie.report.watch import server
from coterie.running.folder import inside


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def report(compared, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(gather([compared])), encoding="utf-8")
    return path


def column(page, name):
    """The texts of a column of the table, without the small print, with the stage of each line."""
    place = page.locator("#methods thead button").all_inner_texts().index(name)
    return page.eval_on_selector_all(
        "#methods tbody tr",
        f"rows => rows.map(r => [r.dataset.stage, r.children[{place}].firstChild.textContent.trim()])",
    )


def test_sorting_filtering_theme_and_a_client(browser, report, compared):
    """Every control that the page has, with what it must then show known from the run's own files."""
    lines = rows([folder.result() for folder in inside(compared)])
    with opened(browser, report.as_uri()) as page:
        # sort: within a stage, by the worst client, best first, then worst first
        for best_first in (True, False):
            page.locator('[data-sort="worst"]').click()
            wanted = [
                (stage, number(100 * line.worst, 1))
                for stage in ("served", "adapted")
                for line in sorted((x for x in lines if x.stage == stage), key=lambda x: x.worst, reverse=best_first)
            ]
            assert [tuple(cell) for cell in column(page, "worst")] == wanted
        assert page.locator("#methods th[aria-sort]").inner_text().startswith("worst")

        # filter: by name, then by stage as well
        page.get_by_role("searchbox").fill("fedfew")
        left = page.eval_on_selector_all("#methods tbody tr", "rows => rows.map(r => r.dataset.method)")
        assert set(left) == {"fedfew:official", "fedfew:normalise=true"}
        page.locator("#methods").get_by_role("button", name="adapted").click()
        assert page.locator("#count").inner_text() == "2 of 10 lines"
        page.get_by_role("searchbox").fill("")
        page.locator("#methods").get_by_role("button", name="both stages").click()
        assert page.locator("#methods tbody tr").count() == 10

        # theme: there and back, and the paper is really dark in between
        def paper():
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            return sum(int(part) for part in colour[4:-1].split(","))

        light = paper()
        page.locator("#theme").click()
        assert page.locator("html").get_attribute("data-theme") == "dark"
        assert paper() < 150 < 600 < light
        page.locator("#theme").click()
        assert paper() == light

        # a client: chosen in one chart, shown in all, with its facts; and let go again
        data = json.loads((compared / "ifca" / "seed0" / "data.json").read_text())
        names = json.loads((compared / "ifca" / "seed0" / "config.json").read_text())["clients"]
        assert page.locator("#card").is_hidden()
        page.locator('#clients rect[data-client="5"]').click()
        card = page.locator("#card").inner_text()
        assert f"Client {names[5]}" in card
        sizes = [data["sizes"][split][5] for split in ("train", "val", "test")]
        assert "{} train, {} validation, {} test".format(*sizes) in card
        assert f"{sum(n > 0 for n in data['histogram'][5])} of 10" in card
        assert page.locator("#client").input_value() == "5"
        for chart in ("clients", "classes", "few"):
            assert page.locator(f"#{chart} svg text.on", has_text=names[5]).count() >= 1, chart
        for chart in ("spread", "size"):
            assert page.locator(f'#{chart} circle[data-client="5"][opacity="1"]').count() >= 1, chart
            assert page.locator(f'#{chart} circle[data-client="6"][opacity="1"]').count() == 0, chart
        page.locator("#clients svg").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#client").input_value() not in ("5", "-1")
        page.keyboard.press("Escape")
        assert page.locator("#card").is_hidden()

        # another method, stage and axis
        page.locator("#method").select_option("ifca")
        page.locator("#stage").get_by_role("button", name="adapted").click()
        assert "ifca (adapted)" in page.locator("#clients .lead").inner_text()
        page.get_by_role("button", name="by bytes").click()
        assert "MB" in page.locator("#convergence svg").first.inner_html()

        assert page.said == []
        assert page.asked == [report.as_uri()]


@pytest.mark.parametrize(
    ("method", "stage", "against"),
    [("fedavg", "adapted", "fedavg|served"), ("fedavg", "served", "fedavg|adapted"),
     ("local", "served", "fedavg|served"), ("ifca", "adapted", "fedavg|served")],
)
def test_the_page_opens_with_what_the_headline_names(browser, compared, tmp_path, method, stage, against):
    """Also where a baseline leads; it is compared with the first of the comparisons that is not itself."""
    data = gather([compared])
    data["answer"]["mean"] = [method, stage]
    (tmp_path / "report.html").write_text(html(data), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        assert page.locator("#method").input_value() == method
        assert page.locator('#stage [aria-pressed="true"]').inner_text() == stage
        assert page.locator("#base").input_value() == against
        assert page.locator("#methods tr.on").get_attribute("data-method") == method
        assert "clients gain" in page.locator("#clients .lead").inner_text()
        assert page.said == []
    assert focus(data)[0]["name"] == method
    assert focus(data)[1] == stage


def test_models_that_learned_nothing_are_called_out_first(browser, compared, tmp_path):
    data = gather([compared])
    assert data["answer"]["warnings"] == []  # these have learned
    data["answer"] |= {"headline": "No method does better than guessing.", "warnings": ["Scale the inputs."]}
    (tmp_path / "report.html").write_text(html(data), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri(), SIZES["report-phone"]) as page:
        assert page.locator("#headline").inner_text() == "No method does better than guessing."
        assert page.locator("#callouts li").first.inner_text() == "Scale the inputs."
        assert page.said == []


def test_table_chart_and_sentences_round_alike(browser, compared, tmp_path):
    """An unseen mean of 88.25 %, which programs round in two ways, and a mean that two decimals show as 70.65 %."""
    data = gather([compared])
    ifca = next(m for m in data["methods"] if m["name"] == "ifca")
    for line in ifca["lines"]:
        line |= {"mean": 0.70649, "unseen": 0.8825}
    for stage in ("served", "adapted"):
        fedavg = next(m for m in data["methods"] if m["name"] == "fedavg")
        next(x for x in fedavg["lines"] if x["stage"] == stage)["mean"] = 0.65004
        for key, value in ((stage, 0.70649), (f"unseen_{stage}", 0.8825)):
            ifca["values"][key] = [v if v is None else value for v in ifca["values"][key]]
    data["answer"]["mean"] = ["ifca", "served"]
    (tmp_path / "report.html").write_text(html(data), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        row = page.locator('#methods tr[data-method="ifca"][data-stage="served"]').inner_text()
        assert "70.65" in row
        assert "88.3" in row
        assert number(88.25, 1) == "88.3"  # as in the terminal
        assert page.locator("#spread svg text", has_text="70.65").count() == 1
        assert page.locator("#unseen svg text", has_text="88.3").count() == 1
        assert "+5.65 points on average" in page.locator("#clients .lead").inner_text()  # 70.65 - 65.00
        assert page.said == []


def test_a_collapse_is_called_out_and_health_is_not(browser, report):
    with opened(browser, report.as_uri()) as page:
        (said,) = page.locator("#callouts li").all_inner_texts()
        assert said.startswith("fedfew:official: The 3 models have collapsed into one")
        page.locator("#few-method").select_option("ifca")
        assert "collapsed" not in page.locator("#few-words").inner_text()
        page.locator("#few-method").select_option("fedfew:official")
        assert "have collapsed into one" in page.locator("#few-words").inner_text()
        assert page.said == []


@pytest.mark.parametrize(("size", "scheme"), [(SIZES["report"], "light"), (SIZES["report-phone"], "dark")])
def test_newcomers_are_shown_with_churn(browser, churned, tmp_path, size, scheme):
    """Sentence, lines, counts and tips are those of the data; the fixture says who comes and goes."""
    data = gather([churned])
    found = next(m for m in data["methods"] if m["name"] == "fedper")["newcomers"]["served"]
    (tmp_path / "report.html").write_text(html(data), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri(), size, scheme) as page:
        unfold(page)
        page.locator("#method").select_option("fedper")
        page.locator("#stage").get_by_role("button", name="served").click()
        page.keyboard.press("Escape")
        said = page.locator("#newcomers .lead").inner_text()
        assert said.startswith("4 clients were there from the start, 3 arrived in 8 rounds and 2 left. On arrival, ")
        assert f"newcomers have {100 * found['mean'][0]:.1f} % with fedper (served)" in said
        assert f"clients from the start {100 * found['start'][0]:.1f} % at that time" in said
        assert page.locator("#newcomers h3").all_inner_texts() == ["Served", "Adapted"]
        for panel in page.locator("#newcomers .panel").all():
            assert panel.locator("path:not(.reach)").count() == 3 + 1  # three methods; the clients from the start
            texts = panel.locator("svg text").all_text_contents()
            assert texts[texts.index("clients") + 1 :] == ["3", "3", "2", "2", "2", "2", "2"]  # 3 leaves after 2 rounds
        first = page.locator('#newcomers [data-tip^="fedper\\a on arrival"]').first
        first.scroll_into_view_if_needed()
        first.hover()
        assert page.locator("#tip").inner_text() == f"fedper\non arrival: {100 * found['mean'][0]:.1f} %\n3 newcomers"
        page.locator("#newcomers .legend button", has_text="local").click()
        assert page.locator("#method").input_value() == "local"
        assert "with local (served)" in page.locator("#newcomers .lead").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.said == []


def test_nobody_asks_for_newcomers_without_churn(browser, report):
    with opened(browser, report.as_uri()) as page:
        assert page.locator("#newcomers").is_hidden()
        assert page.locator("#newcomers").inner_html() == ""


# -- words for what is not there ---------------------------------------------------------------------------------------

PROGRAMS = re.compile(r"\b(null|NaN|undefined|Infinity|None|Object)\b")
"""What programs say where people would say nothing."""
SAID = """() => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const told = ["aria-label", "title", "data-tip", "d", "x", "y", "cx", "cy", "width", "height", "style"];
  const words = [...document.body.querySelectorAll("*:not(script)")].flatMap((one) =>
    told.filter((name) => one.hasAttribute(name)).map((name) => one.getAttribute(name)));
  return document.body.innerText.split("\\n").concat(words);
}"""
"""All that is read on the page, in its tips and by a screen reader, and where its charts are drawn."""


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """The folder of a comparison of regressions at a learning rate at which every number overflows."""
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(30, 3, generator=draw), torch.randn(30, generator=draw)) for _ in range(4)]
    folder = tmp_path_factory.mktemp("diverged") / "cmp"
    coterie.compare([], model("linear", (3,), 1), Federation.from_clients(parts), folder=folder, rounds=3,
                    lr=1e30, evaluate_every=1, device="cpu")
    return folder


def alike_but_drawn(clients):
    """Clients of 40 samples in two classes."""
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(40, 3, generator=draw), torch.arange(40) % 2) for _ in range(clients)]
    return Federation.from_clients(parts, classes=2)


@pytest.fixture(scope="module")
def crowd(sites, tmp_path_factory):
    """The folder of a comparison of twelve methods."""
    folder = tmp_path_factory.mktemp("crowd") / "cmp"
    names = ["fedper", "ifca", "apfl", "ditto", "fedprox", "fedrep", "lgfedavg", "scaffold", "fedbabu", "pfedme"]
    coterie.compare(names, model("mlp", (3,), 3, hidden=8), sites, folder=folder, rounds=3, lr=0.1, evaluate_every=1,
                    device="cpu")
    return folder


OLD = Path(__file__).parents[1] / "end_to_end" / "old_runs"


@pytest.mark.parametrize("size", list(SIZES.values()), ids=list(SIZES))
@pytest.mark.parametrize("runs", ["compared", "churned", "diverged", "one client", "flower", "old", "one round"])
def test_no_page_says_null(browser, request, runs, size, tmp_path):
    """In any section, with and without a client, in any stage and by any axis."""
    if runs in ("flower", "old"):
        folder = OLD / ("flower/server" if runs == "flower" else "sites")
    elif runs in ("one client", "one round"):
        folder = tmp_path / "run"
        data = alike_but_drawn(1 if runs == "one client" else 3)
        coterie.run("fedavg", model("linear", (3,), 2), data, folder=folder, rounds=1, evaluate_every=1, device="cpu")
    else:
        folder = request.getfixturevalue(runs)
    (tmp_path / "report.html").write_text(html(gather([folder])), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri(), size) as page:
        unfold(page)
        for stage in ("adapted", "served"):
            page.locator("#stage").get_by_role("button", name=stage).click()
            for client in ("-1", "0"):
                page.locator("#client").select_option(client)
                assert [said for said in page.evaluate(SAID) if PROGRAMS.search(said)] == []
        assert page.said == []


@pytest.mark.parametrize("stage", ["served", "adapted"])
def test_a_chart_without_numbers_is_a_sentence(browser, diverged, tmp_path, stage):
    """Adapted losses are no numbers in any round; served ones in round 0 only, where one dot each is drawn."""
    (tmp_path / "report.html").write_text(html(gather([diverged])), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        page.locator("#stage").get_by_role("button", name=stage).click()
        for one in page.locator("main section .chart").all():
            marks = one.evaluate(
                """c => [...c.querySelectorAll("path, circle, rect, image")].filter((mark) => {
                  const style = getComputedStyle(mark);
                  const seen = (paint) => paint !== "none" && !/transparent|, 0\\)/.test(paint);
                  const box = mark.getBBox();
                  return !mark.closest("clipPath") && (box.width || box.height) &&
                    (mark.tagName === "image" || seen(style.fill) || seen(style.stroke));
                }).length"""
            )
            what = one.locator("svg").get_attribute("aria-label")
            assert marks > 0 or "no finite value" in one.inner_text(), what
        if stage == "adapted":
            assert "is not a finite number: its training diverged" in page.locator("#clients .note").inner_text()
            assert "is not a finite number: its training diverged" in page.locator("#convergence .note").inner_text()
        else:
            assert "A curve that stops early has no finite mean" in page.locator("#convergence .lead").inner_text()
        assert page.said == []


@pytest.mark.parametrize("size", list(SIZES.values()), ids=list(SIZES))
def test_of_many_curves_the_best_and_the_chosen_are_in_colour(browser, crowd, tmp_path, size):
    """Five best, the chosen method and the one it is compared with; the rest grey, until pointed at or chosen."""
    data = gather([crowd])
    (tmp_path / "report.html").write_text(html(data), encoding="utf-8")
    stage = data["answer"]["mean"][1]
    means = {m["name"]: next(x["mean"] for x in m["lines"] if x["stage"] == stage) for m in data["methods"]}
    best = set(sorted(means, key=means.get, reverse=True)[:5])
    colours = """all => Object.fromEntries(all.map((c) =>
      [c.dataset.curve, getComputedStyle(c.querySelector(".line") || c).stroke]))"""
    with opened(browser, (tmp_path / "report.html").as_uri(), size) as page:

        def drawn():
            found = page.eval_on_selector_all("#convergence g[data-curve]", colours)
            assert set(found) == set(means)
            counts = Counter(found.values())
            return {name for name in found if counts[found[name]] == 1}, found

        coloured, found = drawn()
        against = page.locator("#base").input_value().rpartition("|")[0]
        assert coloured == best | {data["answer"]["mean"][0], against}
        assert len({found[name] for name in means if name not in coloured}) == 1  # one grey
        named = page.locator("#convergence > .panel > div > ul.legend button").all_inner_texts()
        assert len(named) == len(coloured)
        # another one is chosen from the list of the grey ones
        other = next(name for name in means if name not in coloured)
        page.locator("#convergence summary").click()
        page.locator(f'#convergence .others button[data-method="{other}"]').click()
        assert page.locator("#method").input_value() == other
        assert other in drawn()[0]
        # and a grey one lights up under the pointer
        grey = next(name for name in means if name not in drawn()[0])
        page.locator(f'#convergence .others button[data-method="{grey}"]').hover()
        assert drawn()[1][grey] == page.evaluate("getComputedStyle(document.body).color")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.said == []


def test_few_curves_have_a_colour_each(browser, report):
    with opened(browser, report.as_uri()) as page:
        lines = page.locator("#convergence g[data-curve] .line")
        found = [line.get_attribute("stroke") for line in lines.all()]
        assert len(found) == len(set(found)) == 5
        assert page.locator("#convergence .others").count() == 0


def test_the_static_figures_name_a_few_of_many_curves(crowd):
    """Seven names at most and one for the others, in place of twelve that nobody can tell apart."""
    made = dict(figures(gather([crowd])))["convergence"]
    names = [text.get_text() for text in made.legends[0].get_texts()]
    assert len(names) <= 8
    assert re.fullmatch(r"\d other methods", names[-1])
    tints = {line.get_color() for line in made.axes[0].lines}
    assert len(tints) == len(names)


# -- the bar, the card and the head ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*SIZES.values(), (844, 390)], ids=[*SIZES, "phone-on-its-side"])
def test_the_bar_leaves_room_for_the_page(browser, balanced, tmp_path, size):
    """With all five choices it takes at most a tenth of the screen, and no anchor ends behind it."""
    written(balanced, tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), size) as page:
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        for section in ("spread", "convergence", "reproduce"):
            page.evaluate(f"location.hash = '#{section}'")
            page.wait_for_timeout(50)
            bar, head, right = page.evaluate(
                f"""() => {{
                  const bar = document.querySelector(".controls").getBoundingClientRect();
                  return [Math.max(0, bar.bottom), document.querySelector("#{section} h2").getBoundingClientRect().top,
                    bar.width];
                }}"""
            )
            assert bar <= size[1] / 10
            assert head >= bar, section
            assert right == size[0]  # nothing shows through beside it
        assert page.said == []


def test_the_bar_of_a_phone_opens_and_closes_by_keyboard(browser, balanced, tmp_path):
    written(balanced, tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), SIZES["report-phone"]) as page:
        line = page.locator("#chosen")
        assert line.inner_text().startswith("fedper (served) against fedavg (served)")
        assert page.locator("#method").is_hidden()
        line.focus()
        page.keyboard.press("Enter")
        assert line.get_attribute("aria-expanded") == "true"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "method"
        page.locator("#method").select_option("local")
        assert "local (served)" in line.inner_text()
        page.keyboard.press("Escape")
        assert page.locator("#method").is_hidden()
        assert page.evaluate("document.activeElement.id") == "chosen"
        assert page.said == []


def test_the_card_stands_beside_the_charts(browser, report):
    """On a desktop nothing of a section lies under it; chosen in a chart, that chart stays where it was."""
    with opened(browser, report.as_uri()) as page:
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        page.locator("#spread").scroll_into_view_if_needed()
        mark = page.locator('#spread circle[data-client="5"]').first
        before = page.locator("#spread h2").bounding_box()
        mark.click()
        assert abs(page.locator("#spread h2").bounding_box()["y"] - before["y"]) <= 2
        left = page.locator("#card").bounding_box()["x"]
        boxes = [panel.bounding_box() for panel in page.locator("main .panel").all()]
        assert max(box["x"] + box["width"] for box in boxes) < left
        assert page.said == []


def test_the_card_says_what_a_value_is(browser, balanced, tmp_path):
    """The value with its unit, the metric by name, and the methods by what they give this client, recomputed."""
    data = written(balanced, tmp_path / "report.html")
    of = {m["name"]: m["values"]["served"][3] for m in data["methods"]}
    with opened(browser, (tmp_path / "report.html").as_uri(), SIZES["report-phone"]) as page:
        unfold(page)
        page.locator("#client").select_option("3")
        card = page.locator("#card")
        assert f"{number(100 * of['fedper'], 1)} % with fedper (served)" in card.inner_text()
        assert card.locator("caption").inner_text() == "Its test balanced accuracy in %, best served first"
        wanted = sorted(of, key=of.get, reverse=True)
        assert card.locator("tbody td:first-child").all_inner_texts() == wanted
        assert card.bounding_box()["height"] <= 0.45 * SIZES["report-phone"][1]
        assert page.evaluate("document.documentElement.scrollWidth") == SIZES["report-phone"][0]


def test_the_card_of_somebody_who_left_knows_the_test_samples(browser, churned, tmp_path):
    """Client 0 leaves in round 4 of 8: it is in no later evaluation, and its test samples are still its own."""
    data = json.loads((churned / "fedper" / "seed0" / "data.json").read_text())
    (tmp_path / "report.html").write_text(html(gather([churned])), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        names = page.locator("#client option").all_inner_texts()
        page.locator("#client").select_option(label="0")
        place = names.index("0") - 1
        assert f"{data['sizes']['test'][place]} test" in page.locator("#card").inner_text()
        assert "there from the start, left in round 4" in page.locator("#card").inner_text()


def test_the_head_names_the_folders_and_what_differs(browser, named, tmp_path):
    for name in ("local", "fedper"):
        shutil.copytree(named / name / "seed0", tmp_path / name)
    config = json.loads((tmp_path / "fedper" / "config.json").read_text())
    config["training"] |= {"rounds": 9, "lr": 0.5}
    (tmp_path / "fedper" / "config.json").write_text(json.dumps(config))
    (tmp_path / "report.html").write_text(html(gather([tmp_path / "local", tmp_path / "fedper"])), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri(), SIZES["report-phone"]) as page:
        assert page.locator("header").inner_text().split("\n")[:2] == ["coterie report", "local, fedper"]
        assert "4 to 9 rounds, learning rates 0.1 and 0.5" in page.locator("#facts").inner_text()
        said = page.locator("#callouts li").first.inner_text()
        assert said.startswith("These runs were not trained alike: local with")
        assert page.evaluate("document.documentElement.scrollWidth") == SIZES["report-phone"][0]


def test_a_column_that_ties_is_not_bold(browser, named, tmp_path):
    """All methods share the mean; two of three the worst client; then one of three leads."""
    data = gather([named])
    for m, mean, worst in zip(data["methods"], (0.5, 0.5, 0.5), (0.4, 0.4, 0.3)):
        m["lines"][0] |= {"mean": mean, "worst": worst}
        m["lines"][1] |= {"mean": worst, "worst": 2 * worst - 0.1 * (m is data["methods"][0])}
    (tmp_path / "report.html").write_text(html(data), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        assert page.locator('#methods tr[data-stage="served"] td.best').count() == 0
        assert page.locator('#methods tr[data-stage="adapted"] td.best').all_inner_texts() == ["80.0"]


# -- the metric that decides, and those beside it ----------------------------------------------------------------------


def written(read, path):
    """The page of runs that were read, and its data."""
    data = told(read, [Path("cmp")])
    path.write_text(html(data), encoding="utf-8")
    return data


@pytest.mark.parametrize(
    ("runs", "what", "way"),
    [("balanced", "balanced accuracy in %", "higher is better"), ("huber", "huber", "lower is better")],
)
def test_words_axes_and_the_worst_client_follow_the_metric(browser, request, tmp_path, runs, what, way):
    """The worst client is recomputed from the made-up answers: the mean over seeds, lowest or highest."""
    read = request.getfixturevalue(runs)
    written(read, tmp_path / "report.html")
    scores = np.array([run.at("served").test[run.at("served").metric] for _, run in read if run.method == "fedper"])
    mean = scores.mean(0)
    worst = int(mean.argmin() if runs == "balanced" else mean.argmax())
    value = number(100 * mean[worst], 1) + " %" if runs == "balanced" else number(mean[worst], 3)
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        assert f"judged by {what.removesuffix(' in %')}" in page.locator("#facts").inner_text()
        assert page.locator("#by").inner_text() == f"Test {what}, {way}."
        said = page.locator("#spread .lead").inner_text()
        assert said.startswith(f"Every dot is a client's test {what} ({way})")
        assert said.endswith(f"Served worst by fedper (served): client {SITES[worst]} with {value}.")
        assert f"Mean over clients of the test {what} ({way})" in page.locator("#convergence .lead").inner_text()
        axes = {"clients": what, "spread": f"test {what} of a client", "convergence": f"mean {what}"}
        for section, text in axes.items():
            assert text in page.locator(f"#{section} svg text").all_text_contents(), section
        # the table: the best of a stage first, which is the lowest of an error
        means = [float(text) for stage, text in column(page, "mean") if stage == "served"]
        assert means == sorted(means, reverse=runs == "balanced")
        assert page.locator("#confused option").first.inner_text() == f"{SITES[worst]}: {value}"
        assert page.said == []
        assert page.asked == [(tmp_path / "report.html").as_uri()]


def test_a_watched_metric_is_looked_at_by_keyboard(browser, balanced, tmp_path):
    """The Brier score is 1 minus the balanced accuracy: the same order, and all that is shown turned round."""
    data = written(balanced, tmp_path / "report.html")
    fedper = next(m for m in data["methods"] if m["name"] == "fedper")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        titles = page.locator("#metric option").all_inner_texts()
        assert titles == ["balanced accuracy", "accuracy", "macro F1", "Brier score", "cross entropy"]
        headline, order = page.locator("#headline").inner_text(), page.locator("#confused option").all_inner_texts()
        before = column(page, "mean")
        page.locator("#client").focus()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "metric"
        for key in "Brier":  # a menu is searched by typing
            page.keyboard.press(key)
        assert page.locator("#metric").input_value() == "brier"
        assert page.locator("#by").inner_text() == (
            "Test Brier score, lower is better; balanced accuracy decides the answer and the round."
        )
        assert "test Brier score of a client" in page.locator("#spread svg text").all_text_contents()
        shown = [float(text) for _, text in column(page, "mean")]
        assert shown == pytest.approx([1 - float(text) / 100 for _, text in before], abs=6e-4)
        mean = next(line["mean"] for line in fedper["watched"]["brier"]["lines"] if line["stage"] == "served")
        assert number(mean, 3) in page.locator('#methods tr[data-method="fedper"]').first.inner_text()
        # what was decided stays decided
        assert page.locator("#headline").inner_text() == headline
        assert page.locator("#confused option").all_inner_texts() == order
        page.locator("#client").select_option("7")
        value = fedper["watched"]["brier"]["values"]["served"][7]
        assert number(value, 3) in page.locator("#card").inner_text()
        assert page.said == []


def test_without_watched_metrics_there_is_no_menu(browser, report):
    with opened(browser, report.as_uri()) as page:
        assert page.locator("#metric").is_hidden()
        assert page.locator("#by").inner_text() == "Test accuracy in %, higher is better."


def test_who_is_confused_with_whom(browser, balanced, tmp_path):
    """The worst served client's matrix first, with its numbers; then another's, all together, another method's."""
    written(balanced, tmp_path / "report.html")

    def counts(method):
        return sum(made_up_answers(method, seed) for seed in (0, 1))

    def shown(page):
        rows = page.locator("#confusion tbody tr").all()
        return [[int(cell) for cell in row.locator("td:not(.total)").all_inner_texts()] for row in rows]

    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        assert page.locator("#confused").input_value() == "7"  # 1 of 10 with pneumonia, in both seeds
        assert page.locator("#confusion tbody th").all_inner_texts() == list(DIAGNOSES)
        assert page.locator("#confusion thead th").all_inner_texts()[1:4] == list(DIAGNOSES)
        assert shown(page) == counts("fedper")[7].tolist() == [[18, 0, 2], [0, 2, 18], [2, 0, 16]]
        totals = page.locator("#confusion tbody td.total").all_inner_texts()
        assert totals == ["20", "90 %", "20", "10 %", "18", "89 %"]
        said = page.locator("#confusion .lead").inner_text()
        assert said.startswith(f"Client {SITES[7]}, the worst served by balanced accuracy, fedper (served).")
        assert "Most often confused: pneumonia answered tuberculosis (18 of 20)" in said
        assert page.locator("#confusion caption").inner_text().endswith(SITES[7])
        page.locator("#confused").focus()
        page.keyboard.press("End")
        assert page.locator("#confused").input_value() == "all"
        assert page.evaluate("document.activeElement.id") == "confused"
        assert shown(page) == counts("fedper").sum(0).tolist()
        page.locator("#client").select_option("3")  # chosen anywhere, shown here
        assert shown(page) == counts("fedper")[3].tolist()
        page.keyboard.press("Escape")
        page.locator("#confused").select_option("0")
        page.locator("#method").select_option("local")
        assert shown(page) == counts("local")[0].tolist()
        # recall: pooled, and the lowest of a client
        names = page.locator("#recall tbody th").all_inner_texts()
        assert names == ["local", "fedavg", "fedper"]
        found = counts("fedper")
        for k, cell in enumerate(page.locator("#recall tbody tr").nth(2).locator("td").all()):
            pooled, lowest = cell.inner_text().split()
            assert pooled == number(100 * found[:, k, k].sum() / found[:, k].sum(), 1)
            assert lowest == number(100 * (found[:, k, k] / found[:, k].sum(1)).min(), 0)
        assert page.said == []
        assert page.asked == [(tmp_path / "report.html").as_uri()]


def test_a_cut_is_said(browser, balanced, tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.report.contents.CELLS", 300)  # 50 for each of 3 methods in 2 stages, 9 a client
    written(balanced, tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        assert page.locator("#confused option").count() == 5 + 1
        assert page.locator("#confusion-cut").inner_text() == (
            "Of 12 clients, the 5 served worst have their matrix on this page."
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES.values()), ids=list(SIZES))
def test_metrics_and_matrices_fit_the_screen(browser, balanced, tmp_path, size, scheme):
    """Numbers on their colours are readable, too: the contrast of WCAG's level AA, 4.5, is kept in both themes."""
    written(balanced, tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), size, scheme) as page:
        unfold(page)
        for name in ("balanced_accuracy", "brier"):
            page.locator("#metric").select_option(name)
            assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        wide = page.eval_on_selector_all(
            "main .scroll, main select, main p, main svg",
            "all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length",
        )
        assert wide == 0
        assert min(page.eval_on_selector_all("#confusion td[style], #recall td[style]", CONTRAST)) >= 4.5
        assert page.said == []


CONTRAST = """cells => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return cells.map((cell) => {
    const style = getComputedStyle(cell), both = [light(style.color), light(style.backgroundColor)];
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  });
}"""
"""The contrast ratio of each cell's text and ground, as WCAG defines it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES.values()), ids=list(SIZES))
def test_nothing_overflows_the_screen(browser, report, size, scheme):
    """Tables scroll inside their boxes; the page itself never scrolls sideways, not even with a client's card."""
    with opened(browser, report.as_uri(), size, scheme) as page:
        unfold(page)
        page.locator("#client").select_option("3")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        wide = page.eval_on_selector_all(
            "main svg, main p, main select, main .panel, #card",
            "all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length",
        )
        assert wide == 0
        assert page.said == []


def test_the_screenshots_of_the_readme(browser, report, tmp_path):
    """COTERIE_SCREENSHOTS=FOLDER keeps them; README's are made so from the demo's page, see CONTRIBUTING."""
    made = screenshots(browser, report, Path(os.environ.get("COTERIE_SCREENSHOTS", tmp_path)))
    assert [path.name for path in made] == ["report.png", "report-phone.png"]
    assert all(path.stat().st_size > 30_000 for path in made)  # an empty page of this size is a few kB


def test_a_single_old_run_draws_too(browser, compared, tmp_path):
    """No baseline, no classes, no unseen stage, nothing recorded of the models: every section says what is missing."""
    old = tmp_path / "old"
    shutil.copytree(compared / "ifca" / "seed0", old)
    (old / "data.json").unlink()
    lines = (old / "metrics.jsonl").read_text().splitlines(keepends=True)
    (old / "metrics.jsonl").write_text("".join(x for x in lines if '"kind": "models"' not in x and '"w"' not in x))
    kept = [x for x in (old / "clients.csv").read_text().splitlines(keepends=True) if "unseen" not in x]
    (old / "clients.csv").write_text("".join(kept))
    (tmp_path / "report.html").write_text(html(gather([old])), encoding="utf-8")
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        for section in ("classes", "few", "conflicts", "size", "unseen"):
            assert page.locator(f"#{section} .note").count() >= 1, section
        assert "earlier version" in page.locator("#callouts").inner_text()
        assert page.said == []


def test_watching_follows_the_run(browser, compared, tmp_path):
    """A run of which the first half is there; the page shows the rest when it comes, without being loaded again."""
    run = tmp_path / "run"
    shutil.copytree(compared / "ifca" / "seed0", run)
    whole = {name: (run / name).read_text() for name in ("metrics.jsonl", "clients.csv", "result.json")}
    (run / "result.json").unlink()
    (run / "clients.csv").write_text("".join(x for x in whole["clients.csv"].splitlines(True) if x[0] in "r048"))
    (run / "metrics.jsonl").write_text("".join(whole["metrics.jsonl"].splitlines(True)[:11]))
    with server([run]) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{serving.server_address[1]}/"
        with opened(browser, address, offline=False) as page:
            assert page.locator("#live").inner_text() == "40 %, 0 of 1 run finished"  # 8 of 20 rounds
            page.evaluate("window.still = true")
            for name, text in whole.items():
                (run / name).write_text(text)
            page.wait_for_function("document.getElementById('live').textContent.startsWith('finished')", timeout=20_000)
            assert page.evaluate("window.still")
            assert "model" in page.locator("#few-words").inner_text()
            assert page.said == []
            assert all(url.startswith(address) for url in page.asked)
        serving.shutdown()
