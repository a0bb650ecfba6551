"""`coterie dissect` as a person types it: the files, the answer, going on after a kill, and bad input."""

import csv
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from commands import SMALL, coterie, exit_code, in_process

from coterie.running.folder import Folder

TINY = [*SMALL, "--adapter", "lora:rank=2,base=trains", "--ranks", "1", "--rounds", 2]
"""Points of the MLP 64 -> 8 -> 10; 6 clients train and 2 are unseen."""
POINTS = ["nothing", "biases and scales", "head", "B of base.1", "B of all layers and head", "adapters of rank 1",
          "adapters of rank 2", "adapters and head", "everything"]


@pytest.fixture(scope="module")
def dissected(tmp_path_factory):
    place = tmp_path_factory.mktemp("dissected")
    done = coterie("dissect", *TINY, "--seeds", 2, "--out", "out", cwd=place)
    assert done.returncode == 0, done.stderr
    return place, done


def lines_of(folder):
    with (folder / "dissect.csv").open() as file:
        return list(csv.DictReader(file))


def record_of(folder):
    return json.loads((folder / "dissect.json").read_text())


def test_the_answer_comes_last_and_is_written_down(dissected):
    place, done = dissected
    found = record_of(place / "out")["found"]
    assert " ".join(done.stdout.split()).endswith(found["sentence"])
    assert "B of all layers is left out: it is the same as B of base.1 here." in done.stderr
    for said in found["notes"]:
        assert " ".join(said.split()) in " ".join(done.stdout.split())
    assert (place / "out" / "dissect.png").stat().st_size > 10_000
    drawn = (place / "out" / "dissect.svg").read_text()
    assert "adapters of rank 1, 288 B" in drawn  # names are text, and 288 is 4 (64 + 8)


def test_every_point_has_every_stage_and_its_bytes(dissected):
    """Up and down a client sends 4 bytes a number of what is not personal, and nothing where all is: of the 754 numbers
    of rank 2 (520 + 144 + 90) the head is 90."""
    lines = lines_of(dissected[0] / "out")
    stages = ["served", "adapted", "unseen_served", "unseen_adapted"]
    assert [(one["stage"], one["keeps"]) for one in lines] == [(s, name) for s in stages for name in POINTS]
    by = {one["keeps"]: one for one in lines if one["stage"] == "served"}
    assert {name: int(by[name]["personal_bytes"]) for name in ("nothing", "head", "everything")} == {
        "nothing": 0, "head": 360, "everything": 4 * 754}
    assert {name: float(by[name]["bytes_each_round"]) for name in ("nothing", "head", "everything")} == {
        "nothing": 2 * 4 * 754, "head": 2 * 4 * 664, "everything": 0}
    assert by["adapters of rank 1"]["adapter"] == "lora:rank=1,base=trains"
    assert float(by["adapters of rank 1"]["bytes_each_round"]) == 2 * 4 * (520 + 90)


def test_points_are_ordinary_runs(dissected):
    """The head's is the run of `fedper` in a comparison with the same clients and seeds, to the last digit."""
    place, _ = dissected
    words = [word for word in TINY if word not in ("--ranks", "1")]
    done = coterie("compare", "fedper", *words, "--seeds", 2, "--out", "compared", cwd=place)
    assert done.returncode == 0, done.stderr
    for seed in range(2):
        one, other = (Folder(place / name / "fedper" / f"seed{seed}").result() for name in ("out", "compared"))
        assert one.at("served").test["accuracy"].tolist() == other.at("served").test["accuracy"].tolist()
    mean = np.mean([Folder(place / "compared" / "fedper" / f"seed{s}").result().at().test["accuracy"] for s in (0, 1)])
    lines = lines_of(place / "out")
    assert float(next(x for x in lines if x["keeps"] == "head")["mean"]) == pytest.approx(mean)


def test_show_report_and_resume_take_the_folder(dissected, monkeypatch, capsys):
    place, _ = dissected
    monkeypatch.chdir(place)
    before = record_of(place / "out")["found"]
    assert exit_code(monkeypatch, "show", "out") == 0
    assert "unfinished" not in capsys.readouterr().out
    assert exit_code(monkeypatch, "report", "out") == 0
    assert (place / "out" / "report.html").is_file()
    assert exit_code(monkeypatch, "resume", "out") == 0  # nothing is left to run
    assert before["sentence"] in " ".join(capsys.readouterr().out.split())
    assert record_of(place / "out")["found"] == before


@pytest.mark.long
def test_a_killed_dissection_goes_on_to_the_same_numbers(dissected, tmp_path):
    """Killed when the first run of another rank has begun; the finished runs are not trained again."""
    whole, _ = dissected
    words = ["dissect", *TINY, "--seeds", 2, "--out", "cut"]
    running = subprocess.Popen([sys.executable, "-m", "coterie", *map(str, words)], cwd=tmp_path,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(2400):
        if (tmp_path / "cut" / "rank-1" / "experiment.json").exists():
            break
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait()
    first = tmp_path / "cut" / "fedavg" / "seed0" / "result.json"
    written = first.stat().st_mtime_ns
    assert "found" not in record_of(tmp_path / "cut")
    done = coterie("dissect", "cut", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == written
    assert record_of(tmp_path / "cut")["found"]["table"] == record_of(whole / "out")["found"]["table"]


def test_a_run_gives_data_model_and_training(tmp_path, monkeypatch, capsys):
    """Without adapters four points are left; the clients are those of the run."""
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "run", "fedprox", *SMALL, "--rounds", 2, "--set", "lr=0.2", "--out", "run") == 0
    assert exit_code(monkeypatch, "dissect", "run", "--rounds", 1, "--part", "base.1", "--out", "out") == 0
    lines = lines_of(tmp_path / "out")
    names = ["nothing", "biases and scales", "head", "base.1", "everything"]
    assert [one["keeps"] for one in lines if one["stage"] == "served"] == names
    assert {one["lr"] for one in lines} == {"0.2"}
    configs = [Folder(tmp_path / place).config() for place in ("run", "out/fedavg/seed0")]
    assert configs[0]["clients"] == configs[1]["clients"]
    assert configs[1]["training"]["rounds"] == 1
    assert "adapters are left out: the model has none" in " ".join(capsys.readouterr().err.split())


def test_each_point_takes_the_rate_that_is_best_on_validation_data(tmp_path, monkeypatch, capsys):
    """One step of 1e-6 teaches nothing, so 0.2 is taken; it is recorded, and the end of the grid is said."""
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--rounds", 3, "--rates", "1e-6,0.2", "--stage", "adapted", "--out", "out"]
    assert exit_code(monkeypatch, "dissect", *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The best learning rate lay at an end of the grid for nothing, biases and scales, head, everything" in shown
    lines = lines_of(tmp_path / "out")
    assert {one["lr"] for one in lines} == {"0.2"}
    assert {one["method"] for one in lines} >= {"fedavg:lr=0.2", "local:lr=0.2"}
    assert "adapted, the mean over clients" in record_of(tmp_path / "out")["found"]["sentence"]
    assert len(list((tmp_path / "out" / "rates").glob("*/seed*/result.json"))) == 8
    assert {path.parent.name for path in (tmp_path / "out").glob("*/seed0")} == {
        "fedavg-lr-0.2", "local-lr-0.2", "fedper-lr-0.2", "fedper-personal-biases-lr-0.2"}  # no further baselines


def test_regression_is_answered_in_its_own_unit(tmp_path, monkeypatch, capsys):
    """Each client's targets have an offset of its own, which its bias can say and a shared model cannot. The
    gain is the variance of offsets from -3 to 3, which is 4."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(7), 60)
    x = rng.standard_normal((420, 3)).astype(np.float32)
    np.savez(tmp_path / "offsets.npz", x=x, y=(x[:, 0] + client - 3).astype(np.float32), client=client)
    monkeypatch.chdir(tmp_path)
    words = ["--data", "offsets.npz", "--model", "linear", "--rounds", 30, "--set", "lr=0.1", "--set", "device=cpu"]
    assert exit_code(monkeypatch, "dissect", *words, "--out", "out") == 0
    found = record_of(tmp_path / "out")["found"]["answers"]["served"]["mean"]
    assert found["enough"] == "biases and scales"
    assert found["personal"] == 4
    assert 3.5 < found["gain"] < 4.5
    assert found["sentence"].startswith("4 bytes a client (biases and scales) give ")
    assert "points" not in found["sentence"]
    assert {one["metric"] for one in lines_of(tmp_path / "out")} == {"loss"}


@pytest.mark.parametrize(("words", "sentence"), [
    (["nowhere"], "nowhere is not a run folder: it does not exist."),
    (["empty"], "empty is not a run folder: it has no experiment.json."),
    (["empty", "--data", "digits"], "empty names the data already; leave out --data, --config and --preset."),
    (["--ranks", "1,2"], "--ranks are those of adapters, and the model has none; add --adapter lora:rank=8."),
    (["--ranks", "one"], "--ranks takes numbers joined by commas, such as 1,2,4,8, not 'one'."),
    (["--ranks", "0", "--adapter", "lora"], "--ranks are whole numbers of at least 1, such as 1,2,4,8."),
    (["--rates", "0.1,0.1"], "--rates are different learning rates above 0, such as 0.01,0.03,0.1."),
    (["--stage", "severed"], "unknown stage 'severed'; did you mean 'served'?"),
    (["--stage", "unseen_served", "--clients", "4"], "no client is kept out of training, so there is no stage "
                                                     "unseen_served; add --unseen 2."),
    (["--adapter", "lora:targets=nolayer"], "unknown target of the adapter 'nolayer'"),
    (["--out", "full"], "full already holds a run; `coterie resume full` goes on, or choose another --out."),
    (["begun", "--rounds", "3"], "begun is a dissection that was begun; `coterie dissect begun` goes on"),
    (["begun"], "begun/dissect.json is damaged"),
])
def test_bad_input_is_a_sentence_before_anything_is_written(words, sentence, tmp_path, monkeypatch, capsys):
    for name in ("empty", "full", "begun"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    (tmp_path / "begun" / "dissect.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    code, said = in_process(["dissect", *words], monkeypatch, capsys)
    assert code == 2, said
    assert sentence in " ".join(said.split())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["begun", "config.json", "dissect.json", "empty",
                                                                "full"]
