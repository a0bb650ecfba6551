"""Every name that others choose is hostile, and every command that prints names is typed: text stays text.

What is read of the output: nothing in it steers a terminal, no name begins a line of its own, and no command ends in
anything but its result or a sentence.
"""

import csv
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import exit_code

import coterie
from coterie.data import Federation
from coterie.flower import operator
from coterie.flower.loopback import Loopback
from coterie.flower.plan import PLAN, Plan
from coterie.flower.rounds import serve
from coterie.flower.site import site_at
from coterie.models import model
from coterie.report.table import to_csv
from coterie.running.folder import Folder, inside

TITLE, CSI = "\x1b]0;owned\x07", "\x9b31m"
HOSTILE = [
    "[/x]", "[red]", f"a{TITLE}", f"b{CSI}", "c\u202egnp.exe", "d\ncoterie: all is well", "$\\frac", "<script>alert(1)",
    "e" * 10_000, "=cmd()|'/c calc'!A0", "g|h*i*`j`\\", "\x1b[2Jk", "l\r\x08m", "\u2028n", "[link=file:///o]p",
]
"""Markup, titles, colours, changes of direction, lines, formulas, tags, length, spreadsheets, tables."""
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MINE = """from dataclasses import dataclass
from coterie.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    '''theta <- mean, [/x] and [red].'''
    family = "one model"
"""
WRITABLE = [name for name in HOSTILE if "/" not in name and len(name) < 200]
"""Those that can name a file."""


def clean(text):
    """Nothing steers, and no line begins as the name with a line break in it would like."""
    assert not STEERING.search(text), ascii(STEERING.search(text)[0])
    assert "\ncoterie: all is well" not in text
    return text


@pytest.fixture
def typed(monkeypatch, capsys):
    """Type a command and read what it prints; it may refuse, in a sentence."""
    def type_(*words, refuses=False):
        code = exit_code(monkeypatch, *words)
        said = capsys.readouterr()
        clean(said.err)
        assert (code == 2 and said.err.splitlines()[-1].startswith("coterie: ")) if refuses else code == 0, said.err
        return clean(said.out) + said.err
    return type_


@pytest.fixture(scope="module")
def federation():
    """A client of each name, and a class of each name."""
    parts, classes = [], len(HOSTILE)
    for i in range(len(HOSTILE)):
        draw = torch.Generator().manual_seed(i)
        y = torch.cat([torch.arange(classes), torch.randint(0, classes, (8,), generator=draw)])
        parts.append((torch.randn(len(y), 3, generator=draw), y))
    return Federation.from_clients(parts, names=HOSTILE, classes=classes, recipe={"classes": HOSTILE})


@pytest.fixture(scope="module")
def runs(federation, tmp_path_factory):
    """The folder of a comparison with a hostile name and a method in a file with one."""
    place = tmp_path_factory.mktemp("runs")
    mine = place / f"[red]{TITLE}\u202e.py"
    mine.write_text(MINE)
    folder = place / f"[bold]{CSI}"
    options = {"rounds": 2, "lr": 0.1, "device": "cpu", "evaluate_every": 1, "watch": "f1"}
    coterie.compare([f"{mine}:Mine"], model("linear", (3,), federation.classes), federation, seeds=(0,), folder=folder,
                    **options)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A csv file whose columns, clients, classes and categories are named like this."""
    path = tmp_path_factory.mktemp("table") / f"[/x]{TITLE}.csv".replace("/", "")
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([*(f"{name} column" for name in HOSTILE), "client", "label"])
        for k in range(12 * len(HOSTILE)):
            cells = [HOSTILE[(k + j) % 3] if j == 1 else f"{(k * (j + 3)) % 7}.5" for j in range(len(HOSTILE))]
            lines.writerow([*cells, HOSTILE[2 + k % 4], HOSTILE[(k // 4) % 3]])
    return path


# -- runs --------------------------------------------------------------------------------------------------------------


def test_show(runs, typed):
    said = typed("show", runs)
    assert "\\x1b]0;owned\\x07\\u202e.py:Mine" in said.replace("\n", "").replace(" ", "")


def test_show_markdown(runs, typed):
    """A cell's name neither ends the cell nor starts a tag, a link or an emphasis."""
    said = typed("show", runs, "--markdown")
    assert "\\[red\\]\\\\x1b\\]0;owned" in said


def test_show_on_a_terminal(runs, monkeypatch, capsys):
    """rich's own colours are there; the titles and colours of names are not."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert exit_code(monkeypatch, "show", runs) == 0
    said = capsys.readouterr().out
    assert "\x1b[1m" in said
    assert not STEERING.search(re.sub(r"\x1b\[[0-9;]*m", "", said))


def test_report(runs, typed, tmp_path):
    """The page, and the figures: the names reach matplotlib, which takes none for a formula."""
    typed("report", runs, "-o", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert not STEERING.search(text.replace("\t", ""))
    drawn = sorted(path.name for path in (tmp_path / "report-figures").iterdir())
    assert {"classes.svg", "clients.svg", "distribution.svg"} <= set(drawn)
    for path in (tmp_path / "report-figures").glob("*.svg"):
        clean(path.read_text(encoding="utf-8").replace("\t", ""))
    assert "$\\frac" in (tmp_path / "report-figures" / "classes.svg").read_text(encoding="utf-8")


def test_watch(runs, typed, monkeypatch):
    from coterie.report import watch

    monkeypatch.setattr(watch.ThreadingHTTPServer, "serve_forever", lambda server: None)
    assert "watching" in typed("watch", runs)


def test_comparison_csv(runs, tmp_path):
    """A method whose name a spreadsheet would compute has an apostrophe before it."""
    results = [folder.result() for folder in inside(runs)]
    results[0] = replace(results[0], method="=cmd()")
    with to_csv(results, tmp_path / "comparison.csv").open(newline="", encoding="utf-8") as file:
        assert next(csv.DictReader(file))["method"] == "'=cmd()"


def test_every_client_is_read_back(runs, federation):
    """One name has a carriage return in it, which cut its line of clients.csv in two: it was lost."""
    for path in runs.rglob("clients.csv"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            clean(line)
        results = Folder(path.parent).history()
        assert all(len(scores.clients) == federation.clients for one in results for scores in one.stages.values())


def test_what_is_no_run(runs, typed, tmp_path):
    typed("show", tmp_path / f"none{TITLE}", refuses=True)
    typed("resume", next(runs.rglob("config.json")).parent, refuses=True)


# -- data --------------------------------------------------------------------------------------------------------------


def test_data(table, typed, tmp_path):
    said = typed("data", table, "--each", "--picture", tmp_path / f"[/x]{CSI}.png".replace("/", ""))
    assert "\\x1b]0;owned\\x07" in said
    assert "[red]" in said
    assert "d\\ncoterie: all is well" in said


def test_run_resume_personalize_export_and_advise(table, typed, tmp_path):
    options = ["--data", str(table), "--model", "linear", "--set", "device=cpu", "--rounds", "2"]
    out = tmp_path / f"out{TITLE}[red]"
    typed("run", "fedavg", *options, "--out", out)
    typed("resume", out)
    typed("show", out)
    typed("compare", "fedper", *options, "--out", tmp_path / f"both{TITLE}")
    typed("personalize", out, "--data", table, "--client", HOSTILE[2], "-o", tmp_path / f"a{CSI}.safetensors")
    typed("export", out, "-o", tmp_path / f"b{CSI}.safetensors", "--client", HOSTILE[2])
    assert "\\x1b" in typed("export", out, "-o", tmp_path / "c.safetensors", "--client", f"none{TITLE}", refuses=True)
    said = typed("advise", str(table), "--model", "linear", "--set", "device=cpu", "--rounds", "2", "--seeds", "1",
                 "--out", tmp_path / f"advice{CSI}")
    assert "\\x9b31m" in said


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_no_data(name, typed, tmp_path):
    typed("data", tmp_path / name, refuses=True)
    typed("data", "--data", f"digits:{name}=1", refuses=True)
    (tmp_path / f"{name}.csv").write_text(f"\"{name}\",label\n1,2\n3\n", encoding="utf-8")
    typed("data", tmp_path / f"{name}.csv", refuses=True)


def test_folders_of_images(typed, tmp_path):
    """Clients and classes are folders, and one file is no image."""
    from PIL import Image

    for i, client in enumerate(WRITABLE):
        for j, kind in enumerate(WRITABLE[:2]):
            place = tmp_path / "photos" / client / kind
            place.mkdir(parents=True)
            for k in range(4):
                Image.fromarray(np.full((4, 4), 10 * i + 3 * j + k, np.uint8)).save(place / f"{k}.png")
    typed("data", tmp_path / "photos")
    (tmp_path / "photos" / WRITABLE[1] / WRITABLE[0] / f"{TITLE}.png").write_bytes(b"none")
    assert "\\x1b]0;owned\\x07.png (no image)" in typed("data", tmp_path / "photos", refuses=True)


# -- methods and the rest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITABLE)
def test_methods_and_presets(name, typed, tmp_path):
    typed("methods", name, refuses=True)
    typed("presets", name, refuses=True)
    typed("run", name, "--data", "digits", refuses=True)
    file = tmp_path / f"{name.replace(chr(10), '')}.py"
    file.write_text(MINE)
    typed("methods", f"{file}:Mine")
    assert exit_code(pytest.MonkeyPatch(), "check", f"{file}:Nobody") == 2


def test_check(typed, tmp_path):
    file = tmp_path / f"mine{TITLE}.py"
    file.write_text(MINE)
    typed("check", f"{file}:Mine")


def test_bench_on_a_terminal(monkeypatch, capsys, tmp_path):
    """The spinner's text is no markup: `[/x]` in a method's file would end the command."""
    from coterie.presets import bench

    (tmp_path / "[").mkdir()
    file = tmp_path / "[" / "x].py"
    file.write_text(MINE)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(bench, "ceilings", lambda device: (1.0, 1.0))  # timing itself takes long, and prints nothing
    monkeypatch.setattr(bench, "measure", lambda *words, **options: [
        bench.Timing(f"{file}:Mine{TITLE}", "float32", *[1.0] * (len(bench.Timing.__dataclass_fields__) - 2))])
    assert exit_code(monkeypatch, "bench", f"{file}:Mine", "--set", "device=cpu", "--clients", "4") == 0
    assert "\x1b]0;owned" not in capsys.readouterr().out


# -- sites -------------------------------------------------------------------------------------------------------------

CONFIG = """method = "fedavg"
model = "linear"
shape = [3]
classes = 3
class_names = ["[/x]", "=cmd()", "<script>"]
[training]
rounds = 1
device = "cpu"
[policy]
sites = 2
"""


@pytest.fixture
def served(tmp_path):
    """A server's folder after a round with hostile words in all that it writes down, and one site's home and data."""
    (tmp_path / "server.toml").write_text(CONFIG)
    plan, sites = Plan.configured(tmp_path / "server.toml"), []
    for k, name in enumerate(("lyon", "oslo")):
        rng = np.random.default_rng(k)
        y = np.array(["[/x]", "=cmd()", "<script>"])[np.arange(30) % 3]
        np.savez(tmp_path / f"{name}.npz", x=rng.standard_normal((30, 3)).astype(np.float32), y=y)
        sites.append(site_at(name, str(tmp_path / f"{name}.npz"), tmp_path / name, accept="any"))
    folder = tmp_path / f"[/x]{TITLE}".replace("/", "")
    serve(plan.jobs, Loopback(sites), plan.policy, folder)
    plan.write(folder / PLAN)
    now = {"time": 0, "doing": HOSTILE[0] + TITLE, "there": HOSTILE[:4], "asked": HOSTILE}
    (folder / operator.STATUS).write_text(json.dumps(now))
    kept = {"held": {name: HOSTILE[(k + 3) % len(HOSTILE)] for k, name in enumerate(HOSTILE)}}
    (folder / operator.KEPT).write_text(json.dumps(kept))
    return tmp_path, folder


def test_status(served, typed):
    """The first of these names ended `coterie status` with a MarkupError."""
    said = typed("status", served[1])
    assert "[/x]" in said
    assert "\\x9b31m" in said
    assert "is not quarantined" in typed("status", served[1], "--lift", f"none{CSI}", refuses=True)


@pytest.mark.parametrize(
    "line", ['method = "[/x]\\u001b]0;owned"', 'surprise = "[/x]\\u009b31m"', 'model = "\\u202e[/x]"']
)
def test_server(line, typed, tmp_path):
    """It refuses what the file asks for before it starts anything."""
    kept = [one for one in CONFIG.splitlines() if one.partition(" ")[0] != line.partition(" ")[0]]
    config = tmp_path / f"server{TITLE}.toml"
    config.write_text("\n".join([line, *kept]))
    typed("server", config, "--out", tmp_path / "out", "--insecure", refuses=True)


def test_client(served, typed):
    place, _ = served
    typed("client", "--data", place / "lyon.npz", "--dry-run", place / "server.toml")
    typed("client", "--data", place / "lyon.npz", "--dry-run", place / "server.toml", "--name", f"x{TITLE}",
          refuses=True)
    typed("client", "--data", place / "lyon.npz", "--home", place / "lyon", "--predict", "--out", place / "p.csv")
    with (place / "p.csv").open(newline="", encoding="utf-8") as file:
        assert {row["class"] for row in csv.DictReader(file)} <= {"[/x]", "'=cmd()", "<script>"}
    typed("client", "--data", place / f"none{TITLE}.npz", "--server", "127.0.0.1:1", "--insecure", "--name", "x",
          refuses=True)


def test_keys(typed, tmp_path):
    for name in (name for name in WRITABLE if not name.strip().isalnum()):
        typed("keys", tmp_path / "keys", "--server", "localhost", "--clients", name, refuses=True)
    shutil.rmtree(tmp_path / "keys", ignore_errors=True)
    assert "\\x1b" in typed("keys", tmp_path / f"k{TITLE}", "--server", "localhost", "--clients", "lyon")


def test_lines_of_sites_and_of_flower(capsys):
    """What `coterie server` passes on is one line a line."""
    from coterie.flower import processes

    for name in HOSTILE:
        processes.say(name)
    said = capsys.readouterr().err
    assert len(clean(said).splitlines()) == len(HOSTILE)
