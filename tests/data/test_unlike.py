"""A training client in other units than the others is pointed out by name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from coterie.running.experiment import Experiment

SITES = ("ams", "ber", "cph", "dub", "edi")


def table(folder, site, times=1.0, money=1.0, scale=True, clients=SITES):
    """Five sites with the same radius and price, but for one site's factors; its notes."""
    rng = np.random.default_rng(0)
    lines = ["radius,age,sex,ward,client,label"]
    for name in clients:
        for k in range(41):
            radius, price = 14 + 3.5 * rng.normal(), 200_000 + 50_000 * rng.normal()
            here = name == site
            end = f"{price * (money if here else 1):.2f}" if money != 1 else ("benign", "malignant")[k % 2]
            lines.append(f"{radius * (times if here else 1):.5g},{rng.integers(20, 80)},{k % 3 % 2},"
                         f"{'en'[k % 2]},{name},{end}")
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    made = Experiment(data=f"{folder / 't.csv'}:scale={str(scale).lower()}").federation()
    return made.recipe.get("notes", [])


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("times", [1000, 100, 0.001])
def test_a_column_in_other_units_at_one_site(times, scale, tmp_path):
    """A thousand times as much is 1000 deviations and more away from the others; a thousandth lies together near 0."""
    (said,) = (note for note in table(tmp_path, "cph", times, scale=scale) if "other units?" in note)
    assert re.search(r"column 'radius' is [0-9.]+ ± [0-9.]+ at client cph and 1[34]\.\d ± 3", said)
    assert "ignore=radius" in said


@pytest.mark.parametrize("gaps", [1, 3, 12])
@pytest.mark.parametrize("scale", [True, False])
def test_filled_gaps_hide_no_unit(scale, gaps, tmp_path):
    """Creatinine of 90 ± 20 at three sites and a hundredth of it at the fourth, of whose 40 values some are missing.

    fill=mean puts the run's mean, about 68, in their place: a single one makes the fourth site's 0.9 ± 0.2 a
    2.6 ± 10.4, which is as wide as half of all.
    """
    rng = np.random.default_rng(0)
    lines = ["crea,age,client,label"]
    for name in SITES[:4]:
        for k in range(40):
            value = rng.normal(90, 20) / (100 if name == "dub" else 1)
            gap = name == "dub" and k < gaps
            lines.append(f"{'' if gap else f'{value:.4f}'},{rng.integers(20, 80)},{name},{k % 2}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    notes = Experiment(data=f"{tmp_path / 't.csv'}:fill=mean,scale={str(scale).lower()}").federation().recipe["notes"]
    (said,) = (note for note in notes if "other units?" in note)
    assert re.search(r"column 'crea' is 0\.\d+ ± 0\.\d+ at client dub and [89]\d\.\d ± [12]\d", said)


def test_a_column_without_any_value_at_a_client_has_no_unit(tmp_path):
    lines = ["crea,age,client,label", *(f"{'' if name == 'b' else 80 + k},{30 + k},{name},{k % 2}"
                                        for name in "abc" for k in range(20))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    notes = Experiment(data=f"{tmp_path / 't.csv'}:fill=mean,scale=true").federation().recipe["notes"]
    assert [note for note in notes if "units" in note] == []


def test_two_clients_are_enough(tmp_path):
    (said,) = (note for note in table(tmp_path, "ber", 1000, clients=SITES[:2]) if "other units?" in note)
    assert "at client ber and 1" in said


def test_a_target_in_thousands_at_one_clinic(tmp_path):
    (said,) = (note for note in table(tmp_path, "dub", money=0.001) if "other units?" in note)
    here, there = re.search(r"'label', is (\d+) ± .* at client dub and (\d+) ±", said).groups()
    assert 900 < int(there) / int(here) < 1100
    assert "ignore=" not in said


def test_clients_that_differ_as_clients_do_are_left_alone(tmp_path):
    """The same rows in one unit: no note at all but that on large numbers where nothing is scaled."""
    assert table(tmp_path, None) == []
    assert [note for note in table(tmp_path, None, scale=False) if "large numbers" not in note] == []


@pytest.mark.parametrize("seed", range(3))
def test_children_years_counts_and_heavy_tails_are_no_units(seed, tmp_path):
    """Ages of a ward for children, a year for each site, rare counts, and incomes whose means differ fivefold."""
    rng = np.random.default_rng(seed)
    lines = ["age,year,visits,income,stay,client,label"]
    for i, name in enumerate(SITES):
        for k in range(60):
            age = rng.integers(0, 15) if i == 0 else rng.integers(20, 90)
            lines.append(f"{age},{2010 + i},{rng.poisson(0.1 * i)},{np.exp(9 + 0.4 * i + rng.normal()):.0f},"
                         f"{rng.exponential(3 + i):.2f},{name},{k % 2}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    said = Experiment(data=f"{tmp_path / 't.csv'}:scale=true").federation().recipe.get("notes", ())
    assert [note for note in said if "units" in note] == []
