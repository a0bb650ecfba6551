"""The comparison's numbers are checked against values worked out by hand from a few clients."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.contract.metric import Scale
from coterie.errors import CoterieError
from coterie.evaluation.score import Evaluation, Scores, loss_scale
from coterie.report.table import Line, comparison, human_bytes, human_seconds, markdown, rows, to_csv
from coterie.report.verdict import answer, cases, served_worst, verdict, worst_error
from coterie.running.result import Result


def scores(values: Sequence[float], metric: str = "accuracy", steps: int = 0, val: float | None = None) -> Scores:
    test = np.array(values, dtype=np.float64)
    held = np.full(len(test), np.nan if val is None else val)
    tables = [{"loss": t} if metric == "loss" else {"loss": 1 - t, "accuracy": t} for t in (test, held)]
    chosen = loss_scale(0) if metric == "loss" else None
    whole = (np.arange(len(test)), np.full(len(test), 10), np.full(len(test), steps))
    return Scores(*whole, tables[0], tables[1], chosen)


def by(scale: Scale, values: Sequence[float]) -> Scores:
    """Scores that this metric decides; whoever reads accuracy or loss instead reads the opposite."""
    test = np.array(values, dtype=np.float64)
    table = {"accuracy": 1 - test, "loss": -test, scale.name: test}
    return Scores(np.arange(len(test)), np.full(len(test), 10), np.zeros(len(test), int), table, table, scale)


def decided(scale: Scale, values: dict[str, Sequence[float]], seeds: int = 2) -> list[Result]:
    """Runs of methods with these clients' values, alike in both stages and all seeds."""
    return [
        Result(name, seed, (Evaluation(5, {"served": by(scale, own), "adapted": by(scale, own)}),))
        for name, own in values.items() for seed in range(seeds)
    ]


def result(
    method: str, served: Sequence[float], adapted: Sequence[float], seed: int = 0, metric: str = "accuracy",
    steps: int = 0, printed: str = "", unseen: tuple[float, float] | None = None,
) -> Result:
    stages = {"served": scores(served, metric, steps), "adapted": scores(adapted, metric, steps + 5)}
    if unseen is not None:
        stages |= {"unseen_served": scores([unseen[0]], metric), "unseen_adapted": scores([unseen[1]], metric)}
    traffic = {"participants": 3, "down": {"row": 1000}, "up": {"update": 500}}
    return Result(method, seed, (Evaluation(20, stages),), (traffic,), seconds=2.0 + seed, printed=printed)


def line(lines: Sequence[Line], method: str, stage: str) -> Line:
    return next(one for one in lines if (one.method, one.stage) == (method, stage))


def cells(table: Table, header: str) -> list[str]:
    column = next(column for column in table.columns if str(column.header) == header)
    return [cell.markup if isinstance(cell, Text) else str(cell) for cell in column.cells]


def printed(table: Table, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def test_numbers_over_clients_and_seeds() -> None:
    first = result("ditto", [0.5, 0.7, 0.9], [0.6, 0.6, 0.6])
    second = result("ditto", [0.6, 0.8, 1.0], [0.8, 0.8, 0.8], seed=1)
    served = line(rows([first, second]), "ditto", "served")
    # seed means 0.7 and 0.8: their mean is 0.75 and their sample standard deviation 0.1 / sqrt(2)
    assert served.mean == pytest.approx(0.75)
    assert served.mean_spread == pytest.approx(0.1 / math.sqrt(2))
    # both seeds spread their clients by -0.2, 0, 0.2 around the mean: sqrt(0.08 / 3)
    assert served.client_std == pytest.approx(math.sqrt(0.08 / 3))
    assert served.worst == pytest.approx(0.55)
    assert served.lowest == pytest.approx(0.55)  # a tenth of three clients is one client
    assert served.best == pytest.approx(0.95)
    # Jain: 2.1^2 / (3 * 1.55) and 2.4^2 / (3 * 2.0)
    assert served.jain == pytest.approx((4.41 / 4.65 + 5.76 / 6.0) / 2)
    assert (served.seeds, served.rounds, served.seconds, served.bytes_each_round) == (2, (20, 20), 2.5, 1500.0)


def test_one_seed_has_no_spread_over_seeds() -> None:
    lines = rows([result("ditto", [0.5, 0.7], [0.6, 0.8])])
    assert math.isnan(lines[0].mean_spread)
    assert cells(comparison([result("ditto", [0.5, 0.7], [0.6, 0.8])]), "mean ± seeds") == ["60.00", "70.00"]


def test_methods_come_in_the_order_given_stage_by_stage() -> None:
    lines = rows([result("local", [0.5], [0.6]), result("fedavg", [0.5], [0.6]), result("ditto", [0.5], [0.6])])
    assert [one.label for one in lines] == ["local", "fedavg", "ditto", "local", "fedavg + fine-tune", "ditto"]
    assert [one.stage for one in lines] == ["served"] * 3 + ["adapted"] * 3


def test_only_fedavg_adapted_is_fine_tuned_fedavg() -> None:
    names = ["fedavg:server=sgd(lr=0.5)", "fedavg+median", "fedavgft"]
    lines = rows([result(name, [0.5], [0.6]) for name in names])
    assert [one.label for one in lines[3:]] == [
        "fedavg:server=sgd(lr=0.5) + fine-tune", "fedavg+median + fine-tune", "fedavgft"
    ]


def test_chosen_and_last_round() -> None:
    def evaluation(number: int, test: float, val: float) -> Evaluation:
        both = scores([test], val=val)
        return Evaluation(number, {"served": both, "adapted": both})

    run = Result("ditto", 0, (evaluation(0, 0.1, 0.2), evaluation(10, 0.6, 0.9), evaluation(20, 0.7, 0.5)))
    chosen, last = rows([run])[0], rows([run], "last")[0]
    # round 10 is best on validation data, although round 20 is better on test data
    assert (chosen.rounds, chosen.mean) == ((10,), 0.6)
    assert (last.rounds, last.mean) == ((20,), 0.7)


def test_unseen_clients_stand_in_the_line_of_their_stage() -> None:
    lines = rows([result("ditto", [0.5], [0.6], unseen=(0.3, 0.4))])
    assert [one.unseen for one in lines] == [0.3, 0.4]
    assert cells(comparison([result("ditto", [0.5], [0.6], unseen=(0.3, 0.4))]), "unseen") == ["30.0", "40.0"]


def test_without_unseen_clients_there_is_no_such_column() -> None:
    table = comparison([result("ditto", [0.5], [0.6])])
    assert "unseen" not in [column.header for column in table.columns]


def test_the_best_mean_and_the_best_worst_client_of_a_stage_are_bold() -> None:
    fair, strong = result("fair", [0.6, 0.6], [0.6, 0.6]), result("strong", [0.5, 0.9], [0.5, 0.9])
    table = comparison([fair, strong])
    assert cells(table, "mean ± seeds") == ["60.00", "[bold]70.00[/bold]"] * 2
    assert cells(table, "worst") == ["[bold]60.0[/bold]", "50.0"] * 2


@pytest.mark.parametrize(
    ("values", "bold"),
    [
        ([0.5, 0.5, 0.5], [False] * 3),  # all alike: a column in bold tells nobody apart
        ([0.5, 0.5, 0.4], [False] * 3),  # two of three
        ([0.5, 0.5, 0.4, 0.3], [True, True, False, False]),  # half of them
        ([0.500004, 0.5, 0.5], [False] * 3),  # both are printed as 50.00, and a mark would contradict that
        ([0.5, 0.4, 0.3], [True, False, False]),
    ],
)
def test_a_best_value_that_most_methods_share_is_not_bold(values: list[float], bold: list[bool]) -> None:
    runs = [result(f"m{k}", [v, v], [v, v]) for k, v in enumerate(values)]
    table = comparison(runs)
    for column in ("mean ± seeds", "worst"):
        assert [cell.startswith("[bold]") for cell in cells(table, column)] == bold * 2
    assert [line.count("**") // 2 for line in markdown(runs).splitlines() if re.match(r"\| m\d", line)] == [
        2 * one for one in bold
    ] * 2


def test_the_smallest_error_is_the_best_one() -> None:
    low = result("low", [1.0, 2.0], [1.0, 2.0], metric="loss")
    high = result("high", [3.0, 1.0], [3.0, 1.0], metric="loss")
    table = comparison([low, high])
    assert cells(table, "mean ± seeds") == ["[bold]1.500[/bold]", "2.000"] * 2
    assert cells(table, "worst") == ["[bold]2.000[/bold]", "3.000"] * 2  # the worst client has the largest error
    assert "MSE" in str(table.title)
    assert "%" not in str(table.title)


def test_clients_without_test_data_are_left_out_and_nothing_known_is_a_dash() -> None:
    some, none = result("some", [0.4, math.nan, 0.6], [0.5] * 3), result("none", [math.nan], [math.nan])
    assert rows([some])[0].mean == pytest.approx(0.5)
    assert cells(comparison([none]), "worst") == ["-", "-"]
    assert verdict([none]) == "No client has test data, so there is nothing to compare."


def test_marks_for_training_before_use_and_for_the_printed_stage() -> None:
    table = comparison([
        result("fedavgft", [0.5], [0.6], steps=5), result("ditto", [0.5], [0.6], printed="adapted"),
    ])
    # an adapted model always trains, so only the served line says it
    assert cells(table, "method") == ["fedavgft ·t", "ditto", "fedavgft", "ditto †"]
    assert "trains before use" in str(table.caption)
    assert "its paper printed" in str(table.caption)
    plain = comparison([result("ditto", [0.5], [0.6])])
    assert "trains before use" not in str(plain.caption)
    assert "its paper printed" not in str(plain.caption)


def test_brackets_in_a_name_are_not_markup() -> None:
    assert "plugin[bold]" in printed(comparison([result("plugin[bold]", [0.5], [0.6])]), 100)


def test_fits_one_hundred_columns() -> None:
    runs = [
        result(name, [0.5, 1.0], [0.6, 1.0], seed=seed, unseen=(0.3, 0.4))
        for name in ("local", "fedavg", "fedfew:models=5,mu=0.1") for seed in range(3)
    ]
    text = printed(comparison(runs), 100)
    header = next(row for row in text.splitlines() if row.startswith("method"))
    names = ["method", "stage", "mean ± seeds", "std", "worst", "low10", "Jain", "unseen", "bytes", "time", "round"]
    assert header.split() == " ".join(names).split()
    assert "fedavg + fine-tune" in text
    assert "…" not in text


def markdown_cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in text.splitlines() if row.startswith("|")]


def test_markdown_shows_the_cells_of_the_terminal() -> None:
    runs = [
        result(name, [0.5, 1.0], [0.6, 1.0], seed=seed, unseen=(0.3, 0.4), steps=5 * (name == "fedavgft"))
        for name in ("local", "fedavg", "fedavgft") for seed in range(2)
    ]
    found = markdown_cells(markdown(runs))
    heads = ["method", "mean ± seeds", "std", "worst", "low10", "Jain", "unseen", "bytes", "time", "round"]
    assert found[0] == found[5] == heads
    assert [row[0] for row in found] == [
        "method", "---", "local", "fedavg", "fedavgft ·t", "method", "---", "local", "fedavg + fine-tune", "fedavgft",
    ]
    table = comparison(runs)
    for column, head in enumerate(heads):
        shown = [row[column].replace("**", "") for row in found if row[0] not in ("method", "---")]
        assert shown == [cell.replace("[bold]", "").replace("[/bold]", "") for cell in cells(table, head)]


def test_markdown_has_a_table_for_each_stage_between_title_and_legend() -> None:
    text = markdown([result("fair", [0.6, 0.6], [0.6, 0.6], steps=5), result("strong", [0.5, 0.9], [0.5, 0.9])])
    title, served, first, adapted, second, legend = text.split("\n\n")
    assert title.startswith("Test accuracy in %, higher is better")
    assert (served, adapted) == ("**served**", "**adapted**")
    # means 60 and 70, worst clients 60 and 50: one method is best for the mean, the other for the worst client
    for table, mark in ((first, " ·t"), (second, "")):
        rows_ = markdown_cells(table)
        assert [row[:2] for row in rows_] == [
            ["method", "mean"], ["---", "--:"], [f"fair{mark}", "60.00"], ["strong", "**70.00**"],
        ]
        assert [row[3] for row in rows_[2:]] == ["**60.0**", "50.0"]
    assert "·t: trains before use." in legend
    assert legend.endswith("\n")


def test_a_bar_in_a_name_does_not_end_its_cell_in_markdown() -> None:
    assert "| a\\|b |" in markdown([result("a|b", [0.5], [0.6])])


def test_csv_holds_every_line_at_the_chosen_and_the_last_round(tmp_path: Path) -> None:
    runs = [result("fedfew:models=5,mu=0.1", [0.5, 0.7], [0.6, 0.8]), result("local", [0.5, 0.7], [0.6, 0.8])]
    path = to_csv(runs, tmp_path / "comparison.csv")
    with open(path, newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [(row["method"], row["stage"], row["when"]) for row in found] == [
        (one.method, one.stage, one.when) for when in ("chosen", "last") for one in rows(runs, when)
    ]
    assert float(found[0]["mean"]) == pytest.approx(0.6)
    assert found[0]["mean_spread"] == ""  # not known with one seed
    assert found[0]["rounds"] == "20"


def seeded(method: str, means: Sequence[float]) -> list[Result]:
    return [result(method, [mean], [mean], seed) for seed, mean in enumerate(means)]


def test_verdict_tells_differences_from_noise() -> None:
    # each method's seeds differ by 0.02, so its standard error is 0.01 and that of a difference 0.0141; 10 points are
    # far beyond twice that, 1 point is not
    runs = [*seeded("local", [0.70, 0.72]), *seeded("fedavg", [0.79, 0.81]), *seeded("ditto", [0.80, 0.82])]
    said = verdict(runs)
    assert "For the mean over clients, ditto (served) is best with 81.00 %; the runner-up, fedavg (served), is" in said
    assert "fedavg + fine-tune is 1.00 points behind (within noise), local (served) 10.00 points (more than n" in said
    assert "unknown" not in said


def test_verdict_names_the_runner_up_of_another_method() -> None:
    """Of the winner's own two stages one is not its runner-up; Local is named with its stage, also beside itself."""
    runs = [*seeded("fedavg", [0.5, 0.5]), *seeded("ditto", [0.6, 0.6])]
    runs += [result("local", [0.70], [0.75], seed) for seed in (0, 1)]
    said = verdict(runs)
    assert "local (adapted) is best with 75.00 %; the runner-up, ditto (served), is 15.00 points behind" in said
    assert "fedavg + fine-tune is 25.00 and local (served) 5.00 points behind, both more than noise." in said


def test_differences_are_those_of_the_numbers_shown() -> None:
    """0.915749 and 0.866351 are shown as 91.57 and 86.64, 4.93 apart, although 4.9398 would round to 4.94."""
    said = verdict([result("ditto", [0.915749], [0.1]), result("local", [0.866351], [0.1])])
    assert "is best with 91.57 %; the runner-up, local (served), is 4.93 points behind" in said


def test_verdict_with_one_seed_says_that_noise_is_unknown() -> None:
    said = verdict([result("local", [3.0], [3.5], metric="loss"), result("fedavg", [4.0], [2.0], metric="loss")])
    assert "fedavg + fine-tune is best with 2.000; the runner-up, local (served), is 1.000 behind, more than" in said
    assert "With one seed, the noise between seeds is unknown." in said
    assert "%" not in said


def test_verdict_finds_the_best_for_the_mean_and_for_the_worst_client_apart() -> None:
    said = verdict([result("strong", [0.5, 0.9], [0.5, 0.8]), result("fair", [0.6, 0.6], [0.6, 0.5])])
    assert "For the mean over clients, strong (served) is best with 70.00 %" in said
    assert "For the worst client, fair (served) is best with 60.00 %" in said
    assert "fedavg + fine-tune and local were not run." in said


def test_fedavgft_stands_in_for_a_missing_fedavg() -> None:
    said = verdict([result("fedavgft", [0.6], [0.6]), result("local", [0.7], [0.5])])
    assert "local (served) is best with 70.00 %; the runner-up, fedavgft (served), is 10.00 points behind" in said
    assert "not run" not in said


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "there is no result"),
        ([result("ditto", [0.5], [0.6])] * 2, "twice with seed 0"),
        ([result("a", [0.5], [0.6]), result("b", [0.5], [0.6], metric="loss")],
         "accuracy and MSE cannot be compared; give results of one metric only"),
    ],
)
def test_what_cannot_be_compared(runs: list[Result], message: str) -> None:
    with pytest.raises(CoterieError, match=message):
        rows(runs)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (87_960, "88 kB"), (999_600, "1.0 MB"), (2.5e9, "2.5 GB"),
     (3e12, "3.0 TB")],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (12.3, "12 s"), (600, "10 min"), (9000, "2.5 h")])
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_the_clients_served_worst_by_the_best_method() -> None:
    """ditto is best for the mean, 67.5 %; its values are means over seeds, and b, d and a have the lowest."""
    names = ("a", "b [x]", "c", "d")
    values = {"local": [0.9, 0.1, 0.2, 0.3], "fedavg": [0.5, 0.4, 0.3, 0.2], "ditto": [0.75, 0.5, 0.85, 0.6]}
    runs = [
        replace(result(name, [v - 0.1 * (2 * seed - 1) for v in own], [0.0] * 4, seed), names=names)
        for name, own in values.items() for seed in (0, 1)
    ]
    table = served_worst(runs)
    assert table is not None
    assert str(table.title) == "served worst by ditto (served): test accuracy in %"
    assert [str(column.header) for column in table.columns] == [
        "client", "test samples", "ditto (served)", "local (served)", "fedavg (served)",
    ]
    assert cells(table, "client") == ["b \\[x]", "d", "a"]  # a bracket of a name is no markup
    assert cells(table, "test samples") == ["10", "10", "10"]
    assert cells(table, "ditto (served)") == ["50.0", "60.0", "75.0"]
    assert cells(table, "local (served)") == ["10.0", "30.0", "90.0"]
    assert cells(table, "fedavg (served)") == ["40.0", "20.0", "50.0"]


def test_the_largest_error_is_served_worst_and_a_baseline_is_not_shown_twice() -> None:
    values = {"local": [1.0, 3.0], "fedavg": [5.0, 6.0]}
    runs = [result(name, own, [7.0, 7.0], metric="loss") for name, own in values.items()]
    table = served_worst(runs)
    assert table is not None
    assert cells(table, "client") == ["1", "0"]
    assert [str(column.header) for column in table.columns][2:] == ["local (served)", "fedavg (served)"]
    assert cells(table, "fedavg (served)") == ["6.000", "5.000"]


# -- the metric that decides -------------------------------------------------------------------------------------------

BALANCED = Scale("balanced_accuracy", "balanced accuracy", higher=True, percent=True)
HUBER = Scale("loss", "huber", higher=False)
R2 = Scale("r2", "R²", higher=True)
VALUES = {"local": [0.2, 0.4, 0.6], "fedavg": [0.3, 0.5, 0.7], "ditto": [0.6, 0.7, 0.8]}


def test_the_verdict_follows_a_share_that_is_not_accuracy() -> None:
    """ditto has 70 % on average and 60 % for its worst client; leads of 20 and 30 points, the same for both seeds."""
    said = answer(decided(BALANCED, VALUES))
    assert said["headline"] == "ditto (served) is best here, by more than noise."
    assert said["sentences"][0].startswith(
        "For the mean over clients, ditto (served) is best with 70.00 %; the runner-up, fedavg (served), is 20.00 "
        "points behind"
    )
    assert said["sentences"][1].startswith("For the worst client, ditto (served) is best with 60.00 %")
    assert said["mean"] == ["ditto", "served"]
    assert "For balanced accuracy, the noise of the worst client is that between clients" in said["caveat"]
    assert "For balanced accuracy, the noise of the worst client" in verdict(decided(BALANCED, VALUES))


def test_the_verdict_turns_round_where_lower_is_better() -> None:
    """The same numbers as errors: local has the least, 0.4 on average, and its worst client the largest, 0.6."""
    said = answer(decided(HUBER, VALUES))
    assert said["headline"] == "Training alone is as good as anything here: no method does better than local (served)."
    assert said["sentences"][0].startswith(
        "For the mean over clients, local (served) is best with 0.400; the runner-up, fedavg (served), is 0.100 behind"
    )
    assert said["sentences"][1].startswith("For the worst client, local (served) is best with 0.600")
    assert said["worst"] == ["local", "served"]
    assert "%" not in " ".join(said["sentences"])


def test_accuracy_says_nothing_about_clients_only() -> None:
    accuracy = Scale("accuracy", "accuracy", higher=True, percent=True)
    assert "the noise of the worst client is that" not in verdict(decided(accuracy, VALUES))


def test_test_samples_are_drawn_anew_only_where_the_metric_counts_them() -> None:
    """One client with 10 samples: drawing clients moves nothing, so all that is left are its samples.

    60 and 50 % right: sqrt(0.6 * 0.4 / 10 + 0.5 * 0.5 / 10) = 0.22; 400 draws know it to a few per cent.
    """
    def error(scale: Scale) -> float:
        a, b = (case for case in cases(decided(scale, {"a": [0.6], "b": [0.5]})) if case.line.stage == "served")
        return worst_error(a, b)

    for counted in ("accuracy", "top_k(k=3)"):
        assert error(Scale(counted, "", True, True)) == pytest.approx(math.sqrt(0.049), rel=0.15)
    assert error(BALANCED) == error(HUBER) == 0


@pytest.mark.parametrize(
    ("scale", "title", "best", "worst"),
    [
        (BALANCED, "test balanced accuracy in %, higher is better; the round", "[bold]70.00[/bold]", "60.0"),
        (R2, "test R², higher is better; the round", "[bold]0.700[/bold]", "0.600"),
        (HUBER, "test huber, lower is better; the round", "0.700", "0.800"),
    ],
)
def test_the_table_follows_the_metric(scale: Scale, title: str, best: str, worst: str) -> None:
    """ditto's line: its worst client has 0.6 of what is better when higher, 0.8 of an error, where local is bold."""
    runs = decided(scale, VALUES)
    table = comparison(runs)
    assert str(table.title).startswith(title)
    assert cells(table, "mean ± seeds")[2].split(" ±")[0].removesuffix("[/bold]") == best.removesuffix("[/bold]")
    assert cells(table, "worst")[2].replace("[bold]", "").replace("[/bold]", "") == worst
    assert ("[bold]" in cells(table, "worst")[0]) == (not scale.higher)
    assert line(rows(runs), "ditto", "served").worst == (0.6 if scale.higher else 0.8)


@pytest.mark.parametrize(("scale", "order"), [(BALANCED, ["0", "1", "2"]), (HUBER, ["2", "1", "0"])])
def test_the_clients_served_worst_by_the_metric(scale: Scale, order: list[str]) -> None:
    """ditto leads by the share and local by the error; in both, client 0 has the least and client 2 the most."""
    table = served_worst(decided(scale, VALUES))
    assert table is not None
    assert cells(table, "client") == order
    leads = "ditto" if scale.higher else "local"
    assert str(table.title) == f"served worst by {leads} (served): test {scale.title}{' in %' if scale.percent else ''}"


@pytest.mark.parametrize("scale", [BALANCED, HUBER])
def test_csv_names_the_metric_and_its_direction(scale: Scale, tmp_path: Path) -> None:
    with open(to_csv(decided(scale, VALUES), tmp_path / "comparison.csv"), newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert {row["metric"] for row in found} == {scale.name}
    assert {row["higher_is_better"] for row in found} == {str(scale.higher)}
    assert "scale" not in found[0]


def test_losses_of_two_names_cannot_be_compared() -> None:
    """Both are stored as `loss`, but a mean of huber says nothing beside an MSE."""
    with pytest.raises(CoterieError, match="huber and MSE cannot be compared"):
        rows([*decided(HUBER, {"a": [0.1]}, 1), *decided(loss_scale(0), {"b": [0.1]}, 1)])


def test_clients_without_a_value_are_counted_where_the_answer_is_read():
    """Client 1 of three has one class of test samples, of which there is no AUROC: means are over the other two."""
    results = decided(Scale("auroc", "AUROC", True, True), {"local": [0.9, np.nan, 0.7], "fedavg": [0.8, np.nan, 0.8]})
    said = "1 client has no AUROC on test data and is left out of its numbers."
    assert said in verdict(results).splitlines()
    assert said in answer(results)["caveat"]
    assert {(line.left_out, round(line.mean, 9)) for line in rows(results)} == {(1, 0.8)}
    full = decided(Scale("auroc", "AUROC", True, True), {"local": [0.9, 0.7], "fedavg": [0.8, 0.8]})
    assert "left out" not in verdict(full)
