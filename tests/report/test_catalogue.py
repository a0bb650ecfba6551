"""The catalogue says of every method, aggregator and optimizer what its class says, in each of its forms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

import pytest
import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from torch import nn

from coterie import registry
from coterie.aggregators.confree import ConFREE
from coterie.contract.aggregator import Aggregator
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.models.lora import adapted
from coterie.optimizers.sgd import SGD
from coterie.options import options
from coterie.report import catalogue
from coterie.running.simulation import Simulation
from coterie.running.training import Training

METHODS, AGGREGATORS, OPTIMIZERS = registry.methods(), registry.aggregators(), registry.optimizers()


@dataclass(frozen=True)
class Above(Aggregator):
    """One."""

    a: int = 1
    """What a is,
    over two lines."""
    b: Literal["x", "y"] = "x"
    c: float = 0.5
    """What c was."""


@dataclass(frozen=True)
class Below(Above):
    """Two."""

    c: float = 0.25
    """What c is."""
    d: bool = False


def cells(listed: RenderableType) -> list[str]:
    assert isinstance(listed, Group)
    tables = [part for part in listed.renderables if isinstance(part, Table)]
    return [str(cell).strip() for table in tables for column in table.columns for cell in column.cells]


def printed(shown: RenderableType, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width).print(shown)
    return text.getvalue()


def test_the_list_has_every_fact_of_every_class() -> None:
    found = cells(catalogue.listing(118))
    for name, cls in METHODS.items():
        assert found.count(name) == 2  # what it shares, and its defaults with the citation
        assert {cls.shared, cls.keeps, cls.down, cls.up, cls.newcomer, cls.cite or "-"} <= set(found)
    for name, plug in AGGREGATORS.items():
        assert found.count(name) == 1
        assert {catalogue.headline(plug)[1].rstrip("."), str(plug().minimum), plug.cite} <= set(found)
    for name, step in OPTIMIZERS.items():
        assert found.count(name) == 1
        assert {catalogue.headline(step)[1].rstrip("."), catalogue.at_server(step), step.cite} <= set(found)
    assert "mu=1.0, tau=0.5, projection_head=0" in found  # MOON's
    assert "faulty=1, chosen=none" in found  # Multi-Krum's, as the command line spells them


def test_every_option_but_those_of_all_methods_is_listed_with_its_default() -> None:
    found = cells(catalogue.listing(118))
    for cls in [*METHODS.values(), *AGGREGATORS.values(), *OPTIMIZERS.values()]:
        names = [name for name in options(cls) if name not in ("aggregator", "validation", "printed")]
        assert ", ".join(names) in [", ".join(x.split("=")[0] for x in cell.split(", ")) for cell in found] or not names


@pytest.mark.parametrize("width", [80, 118, 200])
def test_the_list_and_every_page_fit_and_nothing_is_cut_off(width: int) -> None:
    pages = [catalogue.page(cls(), width) for cls in [*METHODS.values(), *AGGREGATORS.values(), *OPTIMIZERS.values()]]
    for text in [printed(shown, width) for shown in [catalogue.listing(width), *pages]]:
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text


def test_every_file_begins_with_its_name_and_a_line() -> None:
    for cls in [*METHODS.values(), *AGGREGATORS.values(), *OPTIMIZERS.values()]:
        title, line = catalogue.headline(cls)
        letters = "".join(filter(str.isalpha, title.lower()))
        assert letters[:5] == cls.name[:5]  # as in LG-FedAvg and lgfedavg, Norm clipping and normclip
        assert line.endswith(".")


def test_the_string_under_a_field_explains_the_option() -> None:
    assert catalogue.explained(Above) == {"a": "What a is, over two lines.", "c": "What c was."}
    # inherited words stay, new ones replace them, and what has none is left out
    assert catalogue.explained(Below) == {"a": "What a is, over two lines.", "c": "What c is."}


def test_every_option_of_an_aggregator_and_an_optimizer_is_explained() -> None:
    for cls in [*AGGREGATORS.values(), *OPTIMIZERS.values()]:
        assert set(catalogue.explained(cls)) == set(options(cls))


def test_a_page_shows_values_choices_and_meaning() -> None:
    text = printed(catalogue.page(Below(b="y"), 100), 100)
    assert [line.split() for line in text.splitlines() if line.startswith("  ")][-4:] == [
        ["a", "1", "What", "a", "is,", "over", "two", "lines."], ["b", "y", "x", "|", "y"],
        ["c", "0.25", "What", "c", "is."], ["d", "false"],
    ]


def test_a_page_has_the_values_of_its_spelling() -> None:
    text = " ".join(printed(catalogue.page(catalogue.find("fedfew:official,models=5"), 118), 118).split())
    assert "models 5" in text
    assert "loss_at running" in text
    assert "printed adapted" in text
    # the preset's description gives what it changes, whatever is set besides
    assert "Sets validation=false, start_from=same, loss_at=running." in text
    plugged = printed(catalogue.page(catalogue.find("fedavg+confree:c=0.3"), 118), 118)
    assert "confree:c=0.3" in plugged


def test_a_method_that_averages_nothing_offers_no_aggregator() -> None:
    assert "averages nothing" in printed(catalogue.page(METHODS["local"](), 118), 118)
    assert "fedrep+confree" in printed(catalogue.page(METHODS["fedrep"](), 118), 118)
    assert "the mean and robust ones, as in fedmtl+median" in printed(catalogue.page(METHODS["fedmtl"](), 118), 118)


def test_the_example_on_every_methods_page_is_taken_and_what_is_ruled_out_is_refused() -> None:
    """`as in fedavg+confree` must run, and each method on an aggregator's page under "not for" must refuse it."""
    federation = Federation.from_clients([(torch.randn(6, 4), torch.arange(6) % 2) for _ in range(4)], classes=2)

    def runs(spelled: str) -> bool:
        adapted_model = adapted(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "lora:rank=1")
        try:
            Simulation(registry.method(spelled), adapted_model, federation, Training(rounds=1, device="cpu"))
        except CoterieError:
            return False
        return True

    for name in ("flexlora", "lorafair", "fedmtl", "fedavg", "fedfew"):
        example = re.search(r"as in (\S+\+\w+)", printed(catalogue.page(METHODS[name](), 300), 300))
        assert example is not None, name
        assert runs(example[1]), name
    for plugged in ("confree", "mgda", "fedmgdaplus"):
        found = re.search(r"not for\s+([a-z, ]+?)(?:  |\n)", printed(catalogue.page(catalogue.find(plugged), 300), 300))
        assert found is not None
        for name in found[1].strip().split(", "):
            assert not runs(f"{name}+{plugged}"), name


def test_a_page_says_what_a_server_optimizer_and_options_of_the_run_are_to_a_method() -> None:
    page = " ".join(printed(catalogue.page(catalogue.find("fedper:lr=0.125,server=adam"), 118), 118).split())
    assert "by any, as in fedper:server=adam" in page
    assert "lr 0.125 above 0 Learning rate of local training." in page
    assert "Training options may stand among a method's, for it alone: epochs, steps, batch, lr" in page
    assert "by none, for its models split as it goes" in printed(catalogue.page(METHODS["cfl"](), 200), 200)
    adam = " ".join(printed(catalogue.page(catalogue.find("adam"), 118), 118).split())
    assert "at the server lr=0.01, beta2=0.99, eps=0.001, corrected=false" in adam


def test_names_of_all_kinds_are_found() -> None:
    assert catalogue.find("FedRep") == METHODS["fedrep"]()
    assert catalogue.find("confree:official,c=0.2") == ConFREE(
        c=0.2, scope="per_tensor", projection="sequential_raw", solver="slsqp", rescale="square"
    )
    assert catalogue.find("sgd(momentum=0.9)") == SGD(momentum=0.9)
    names = [*METHODS, *AGGREGATORS, *OPTIMIZERS]
    assert len(set(names)) == len(names)  # else one would hide the other


@pytest.mark.parametrize(("given", "nearest"), [("fedfwe", "fedfew"), ("multikrm", "multikrum"), ("medain", "median"),
                                                 ("adamx", "adam")])
def test_an_unknown_name_suggests_the_nearest_of_all_kinds(given: str, nearest: str) -> None:
    said = f"unknown method, aggregator or optimizer '{given}'; did you mean '{nearest}'"
    with pytest.raises(CoterieError, match=said):
        catalogue.find(given)


def test_markdown_has_a_row_and_a_section_for_each() -> None:
    lines = catalogue.markdown().splitlines()
    for name in [*METHODS, *AGGREGATORS, *OPTIMIZERS]:
        assert len([line for line in lines if line.startswith(f"| [{name}](#{name}) |")]) == 1
        assert lines.count(f"### {name}") == 1
    families = {cls.family for cls in METHODS.values()}
    more = ["## Method by method", "## Aggregators", "## Optimizers"]
    assert len([line for line in lines if line.startswith("## ")]) == len(families) + len(more)


@pytest.mark.parametrize("name", [*METHODS, *AGGREGATORS, *OPTIMIZERS])
def test_a_section_has_equation_defaults_presets_and_citation(name: str) -> None:
    cls: type[Any] = {**METHODS, **AGGREGATORS, **OPTIMIZERS}[name]
    text = catalogue.section(cls)
    equation = (cls.__doc__ or "").strip().splitlines()[0].strip()
    assert f"```text\n{equation}\n" in text
    for option, value in catalogue.own_options(cls()).items():
        assert f"`{option}={value}`" in text
    for preset in getattr(cls, "presets", ()):
        assert f"`{name}:{preset}`" in text
    assert f"Citation: {cls.cite}." in text or not cls.cite


def test_formulas_are_not_taken_for_markup() -> None:
    given = "w <- a * b, <u, v>, pi~ and _x of sum_i; `a * <b>` stays\n- c"
    wanted = r"w &lt;- a \* b, &lt;u, v>, pi&#126; and \_x of sum_i; `a * <b>` stays" + "\n\\- c"
    assert catalogue._prose(given) == wanted
