"""Deliberately bad experiments through the real command line, each with a labelled answer or a sentence at its end.

None calls a method best that diverged or is no better than a constant answer. The labels are worked out a second time
here, from the table that was written and from clients.csv alone. Case k is always the same one.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from commands import FILES

from coterie import cli

CASES = 300
NORMAL = range(0, CASES, 7)  # in every run of the tests; all of them are `long`
RATES = [float(f"1e{power}") for power in range(-6, 7)]
PLUGS = ("", "", "", "+median", "+krum", "+geometricmedian", "+trimmedmean", "+normclip", "+multikrum")
TROUBLES = ("plain", "constant features", "one class", "one sample", "duplicated columns", "huge scale", "tiny scale",
            "NaN after round 3", "huge targets", "one bad client", "unequal scales", "own loss")
OWN_LOSS = """
def brittle(outputs, y):
    '''A squared error, or cross entropy, that is no number once an output has gone far.'''
    import torch
    far = outputs.detach().flatten(1).abs().amax(1)
    if y.is_floating_point():
        cost = (outputs.flatten(1) - y.reshape(len(y), -1)).square().mean(1)
    else:
        cost = torch.nn.functional.cross_entropy(outputs, y, reduction="none")
    return cost / (far < 2.0)
"""


@dataclass(frozen=True)
class Case:
    """One experiment: what is typed, and the table that it reads."""

    number: int
    trouble: str
    kind: str  # classes or numbers
    rows: tuple  # (client, split, features, label)
    words: tuple  # of the command line, without data and folder
    own_loss: bool
    metric: str  # as it is called in clients.csv

    @property
    def several(self):
        return self.words[0] == "compare"


def case(number):
    rng = np.random.default_rng([15, number])
    kind = ("classes", "numbers")[number % 2]
    trouble = TROUBLES[number // 2 % len(TROUBLES)]
    lr = RATES[int(rng.integers(len(RATES)))] if rng.random() < 0.8 else 0.1
    width, clients, each = 3, int(rng.integers(3, 6)), int(rng.integers(8, 20))
    x = rng.standard_normal((clients, each, width))
    truth = rng.standard_normal((clients, width)) * 0.3 + rng.standard_normal(width)
    signal = np.einsum("cnw,cw->cn", x, truth)
    y = (signal > 0).astype(int) if kind == "classes" else signal + 0.1 * rng.standard_normal(signal.shape) + 0.123
    extra, model = ["--set", "batch=8"], "mlp:hidden=4"
    if trouble == "constant features":
        x[:] = 1.5
    elif trouble == "one class":
        y = np.repeat(np.arange(clients) % 2, each).reshape(clients, each) if kind == "classes" else np.full_like(
            y, 0.5) + np.arange(clients)[:, None]
    elif trouble == "duplicated columns":
        x[..., 1:] = x[..., :1]
    elif trouble == "huge scale":
        x = x * 10.0 ** int(rng.integers(3, 25))
    elif trouble == "tiny scale":
        x = x * 10.0 ** -int(rng.integers(3, 25))
        y = y if kind == "classes" else y * 10.0 ** -int(rng.integers(1, 8))
    elif trouble == "huge targets" and kind == "numbers":
        y = y * 10.0 ** int(rng.integers(2, 22))
    elif trouble == "one bad client":
        x[0] *= 1e15
    elif trouble == "unequal scales":
        x = x * 10.0 ** np.arange(0, 3 * width, 3)
    elif trouble == "NaN after round 3":  # a linear model whose error grows by 10^4 a round
        curve = float(np.linalg.eigvalsh(2 * np.einsum("cnw,cnv->wv", x, x) / (clients * each)).max())
        lr, model, extra = 1e4 / curve, "linear", ["--set", "batch=0"]
    own = trouble == "own loss"
    metrics = ("accuracy", "accuracy", "loss", "balanced_accuracy", "nll")
    metrics = metrics if kind == "classes" else ("loss", "loss", "mae", "r2", "mse")
    metric = metrics[int(rng.integers(5))]
    names = [str(name) for name in rng.choice(FILES, 1 + int(rng.integers(2)), replace=False)]
    method = names[0] + PLUGS[int(rng.integers(len(PLUGS)))]
    compare = rng.random() < 0.5
    words = ["compare", method, *names[1:]] if compare else ["run", method]
    words += ["--model", model, "--metric", metric, "--rounds", "6", "--set", f"lr={lr:g}", "--set",
              f"evaluate_every={int(rng.integers(1, 3))}", "--set", "device=cpu", *extra]
    words += ["--seeds", "2"] if compare and rng.random() < 0.3 else []
    words += ["--loss", "brittle.py:brittle"] if own else []
    splits = ["train", "val", "test"] if trouble != "one sample" else None
    rows = []
    for c in range(clients):
        for n in range(each if splits else (1 if c % 2 else each)):
            # the first three of a client, and every later one by turns: every split has some of every client
            split = ("train", "val", "test", "train", "test")[n % 5]
            label = float(y[c, n]) if kind == "numbers" else int(y[c, n])
            rows.append((f"c{c}", split, tuple(x[c, n].tolist()), label))
    return Case(number, trouble, kind, tuple(rows), tuple(words), own, metric)


def write(one, place):
    """table.csv; numbers have a fraction, so that nobody takes them for classes, and classes are words."""
    with (place / "table.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["client", "split", "a", "b", "c", "label"])
        for client, split, features, label in one.rows:
            said = ("no", "yes")[label] if one.kind == "classes" else repr(label)
            lines.writerow([client, split, *map(repr, features), said])
    (place / "brittle.py").write_text(OWN_LOSS)


# -- a second computation of what is said ------------------------------------------------------------------------------


def constant(one, scored="test"):
    """What each client's own constant answer scores; None where nobody can know, NaN where a client has no data."""
    metric = "mse" if one.metric == "loss" and one.kind == "numbers" else one.metric
    if (one.metric == "loss" and one.own_loss) or metric not in ("accuracy", "mse", "mae", "r2"):
        return None
    found = {}
    for client in dict.fromkeys(row[0] for row in one.rows):
        mine = [row for row in one.rows if row[0] == client]
        known = [row[3] for row in mine if row[1] not in ("test", scored)]
        seen = np.array([row[3] for row in mine if row[1] == scored])
        if not len(seen) or (not known and one.kind == "numbers"):
            found[client] = math.nan
        elif metric == "accuracy":
            count = Counter(known)
            most = min(count, key=lambda k: (-count[k], k)) if known else 0
            found[client] = float((seen == most).mean())
        else:
            seen = seen.astype(np.float32).astype(float)  # as it is read
            known = np.array(known, dtype=np.float32).astype(float)
            apart = seen - (np.median(known) if metric == "mae" else known.mean())
            spread = ((seen - seen.mean()) ** 2).sum()
            whole = spread > 1e-12 * (seen**2).sum()
            found[client] = float({
                "mse": (apart**2).mean(), "mae": np.abs(apart).mean(),
                "r2": 1 - (apart**2).sum() / spread if whole else math.nan,
            }[metric])
    return found


def number(text):
    return math.nan if text == "" else float(text)


def seeds_of(folder):
    """Method -> one list of rows of clients.csv for each seed."""
    found = {}
    for config in sorted([folder / "config.json", *folder.glob("*/seed*/config.json")]):
        if config.is_file():
            with (config.parent / "clients.csv").open() as file:
                method = json.loads(config.read_text())["method"]
                found.setdefault(method, []).append(list(csv.DictReader(file)))
    return found


def infinite(rows, metric):
    """Whether some client's loss or metric is not a finite number although it has data."""
    def bad(row):
        values = [number(row[name]) for name in ("loss", "val_loss", metric, f"val_{metric}") if name in row]
        return any(math.isinf(v) for v in values) or (int(row["samples"]) > 0 and math.isnan(number(row["loss"])))

    return any(bad(row) for row in rows)


HIGHER = {"accuracy": True, "balanced_accuracy": True, "r2": True}


def expected(one, line, seeds):
    """The labels that a line of comparison.csv may have, and its mean over clients as it is counted."""
    metric, sign = one.metric, 1 if HIGHER.get(one.metric) else -1
    rounds = [int(t) for t in line["rounds"].split()]
    shown = [[row for row in rows if row["stage"] == line["stage"] and int(row["round"]) == t]
             for rows, t in zip(seeds, rounds, strict=True)]
    last = [[row for row in rows if row["stage"] == line["stage"] and row["round"] == rows[-1]["round"]]
            for rows in seeds]
    now, later = [infinite(rows, metric) for rows in shown], [infinite(rows, metric) for rows in last]
    if any(now) or (any(later) and 0 in rounds):
        return {"diverged"}
    steps = [any(int(row["steps"]) for row in rows) for rows in shown]
    if all(t == 0 and not trained for t, trained in zip(rounds, steps)):
        return {"learned nothing"}
    guess = constant(one)
    if guess is None:
        return {"", "learned nothing", "worse than a constant answer"} if metric in ("nll", "balanced_accuracy") or (
            metric == "loss" and not one.own_loss) else {""}
    ahead, level, values = [], [], []
    for client, value in guess.items():
        mine = [number(row[metric]) for rows in shown for row in rows if row["name"] == client]
        mine = [v for v in mine if not math.isnan(v)]
        if mine and math.isfinite(value):
            ahead.append(sign * (np.mean(mine) - value))
            level.append(abs(value))
            values.append(np.mean(mine))
    if not ahead:
        return {""}
    slack = 1e-6 if metric in ("accuracy", "r2") else 1e-5 * float(np.mean(level))
    lead = float(np.mean(ahead))
    if abs(abs(lead) - slack) < 0.5 * slack:  # too near to say which side of rounding it is on
        return {"", "learned nothing", "worse than a constant answer"}
    if lead < -slack:
        return {"worse than a constant answer"}
    perfect = metric == "accuracy" and all(len({row[3] for row in one.rows if row[:2] == (client, "test")}) < 2
                                           for client in guess)
    if lead <= slack:
        return {"", "learned nothing"} if perfect else {"learned nothing"}
    return {"", "learned nothing"} if metric == "accuracy" else {""}  # one answer for everybody may beat constants


def called(line):
    """How sentences call a line of comparison.csv."""
    plain = line["stage"] == "adapted" and line["method"].partition("+")[0].partition(":")[0] == "fedavg"
    return line["label"] if plain else f"{line['label']} ({line['stage']})"


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """Run a command here: its exit code and what it printed. Anything but a sentence is raised."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err + shown.out
        if code:
            assert shown.err.strip(), "a failure without a word"
        return code, shown.out, shown.err

    return run


def check(one, folder, said, page=""):
    """Labels, the winner that is named, and the numbers that are not marked."""
    with (folder / "comparison.csv").open() as file:
        lines = list(csv.DictReader(file))
    runs, sound = seeds_of(folder), set()
    for line in lines:
        may = expected(one, line, runs[line["method"]])
        assert line["outcome"] in may, (line["method"], line["stage"], line["when"], line["outcome"], line["why"], may)
        if not line["outcome"]:
            assert line["mean"] == "" or math.isfinite(float(line["mean"]))
            if line["when"] == "chosen":
                sound.add(called(line))
    after = " is best with "
    for before in ("For the mean over clients, ", "For the worst client, "):
        for text in said.splitlines():
            if before in text and after in text:
                name = text.partition(before)[2].partition(after)[0]
                assert name in sound, (name, sound, text)
                for other in (x.partition(", is ")[0] for x in text.split("the runner-up, ")[1:]):
                    assert other in sound, (other, sound, text)
    if not sound:
        for winning in (" is best with", " leads", "is best here", "as good as anything"):
            assert winning not in said, said
            assert winning not in page, winning
    marked = [line for line in lines if line["when"] == "chosen" and line["outcome"]]
    if one.several or marked:
        assert all(line["outcome"].split()[0] in said for line in marked)


@pytest.mark.parametrize("number", [
    pytest.param(k, id=f"{k}", marks=() if k in NORMAL else pytest.mark.long) for k in range(CASES)
])
def test_a_bad_experiment_ends_in_a_labelled_answer_or_a_sentence(number, typed, tmp_path):
    one = case(number)
    write(one, tmp_path)
    data = "table.csv:label=label,client=client,split=split" + (",regression=true" if one.kind == "numbers" else "")
    if number % 10 == 9:
        advised(one, typed, tmp_path, data)
        return
    code, out, _ = typed(*one.words, "--data", data, "--out", "out")
    if code:
        return
    check(one, tmp_path / "out", out)
    code, shown, _ = typed("show", "out")
    assert code == 0
    check(one, tmp_path / "out", shown)
    if number % 30 == 0:
        code, _, err = typed("report", "out")
        assert code == 0, err
        page = (tmp_path / "out" / "report.html").read_text()
        check(one, tmp_path / "out", shown, re.search(r'"headline":\s*"([^"]*)"', page)[1])
    if number % 3 == 0 and not one.several:
        with (tmp_path / "out" / "comparison.csv").open() as file:
            line = next(x for x in csv.DictReader(file) if x["stage"] == "served" and x["when"] == "chosen")
        code, written, err = typed("export", "out", "--client", "c0", "-o", "model.safetensors")
        assert code == 0, err
        assert ("Of the run:" in written) == bool(line["outcome"] or "diverged" in line["why"])


def advised(one, typed, place, data):
    """Advice names a method only where one beats the constant answers on validation data."""
    words = [w for k, w in enumerate(one.words[2:], 2) if not w.startswith("--seeds") and one.words[k - 1] != "--seeds"]
    first = words.index("--model")
    words = [w for k, w in enumerate(words[first:]) if w != "--rounds" and words[first + k - 1] != "--rounds"]
    code, out, _ = typed("advise", *words, "--data", data, "--rounds", "2", "--seeds", "1", "--out", "advice")
    if code:
        return
    advice = json.loads((place / "advice" / "advice.json").read_text())
    assert ("Take " in out) == advice["learned"]
    assert (advice["method"] is not None) == advice["learned"]
    guess = constant(one, "val")
    if not advice["learned"] or guess is None:
        return
    sign = 1 if HIGHER.get(one.metric) else -1
    by_method = {(c["method"], c["stage"]): np.array(c["validation"], dtype=float) for c in advice["candidates"]}
    top = max(by_method.values(), key=lambda scores: np.nanmean(scores))
    own = np.array([sign * v for v in list(guess.values())[: top.shape[1]]])
    both = ~np.isnan(top).any(0) & np.isfinite(own)
    assert np.mean(top.mean(0)[both] - own[both]) > 0
