"""One writer at a time, and who it is: also after kill -9, and from another machine."""

import json
import os
import platform
import signal
import subprocess
import sys
import time

import pytest

import coterie
from coterie.errors import CoterieError
from coterie.models import model
from coterie.running.lock import FILE, Lock

HOLD = """
import sys, time
from pathlib import Path
from coterie.running.lock import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """A process that writes to the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_writer_is_told_who_the_first_is(other, tmp_path):
    with pytest.raises(CoterieError, match=rf"is being written by process {other.pid} on .+ since \d{{4}}-"):
        Lock(tmp_path)
    said = json.loads((tmp_path / FILE).read_text())
    assert (said["pid"], said["host"]) == (other.pid, platform.node())
    assert abs(time.mktime(time.strptime(said["since"][:19], "%Y-%m-%d %H:%M:%S")) - time.time()) < 60


def test_a_killed_writers_lock_is_taken_over_with_a_line(other, tmp_path, capsys):
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    lock = Lock(tmp_path)
    assert f"was being written by process {other.pid}" in capsys.readouterr().err
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_of_another_machine_is_left_to_people(tmp_path):
    """Whether that process lives cannot be known from here."""
    (tmp_path / FILE).write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-01-01 10:00:00 +0000"}))
    with pytest.raises(CoterieError, match=r"process 7 on elsewhere since 2026-01-01 .* If that has ended, remove"):
        Lock(tmp_path)
    (tmp_path / FILE).unlink()
    Lock(tmp_path).release()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "\\u001b[2J"}', "x" * 100_000, "[" * 4090])
def test_whatever_lies_there_is_no_crash_and_no_escape(tmp_path, content, capsys):
    (tmp_path / FILE).write_text(content)
    said = ""
    try:
        Lock(tmp_path).release()
    except CoterieError as sentence:
        said = str(sentence)
    assert "\x1b" not in said + capsys.readouterr().err


def test_a_lock_that_is_somebody_elses_file_too_is_not_written(tmp_path):
    """A hard link in a folder that was received: the owner's name would have taken the place of the file's content."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    os.link(tmp_path / "precious", tmp_path / "run" / FILE)
    with pytest.raises(CoterieError, match=r"has another name elsewhere; nothing is written to it"):
        Lock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "precious"


def test_two_runs_in_one_folder_are_one_after_the_other(tmp_path):
    """From within the first, while it trains: the second is refused and touches nothing; afterwards it may."""
    x = [[float(k), 1.0] for k in range(20)]
    data = coterie.Federation.from_clients([(x, [k % 2 for k in range(20)])] * 3)
    given = {"folder": tmp_path / "run", "rounds": 4, "evaluate_every": 1, "device": "cpu"}
    refused = []

    def watch(progress):
        if progress.round == 2 and not refused:
            with pytest.raises(CoterieError, match=f"is being written by process {os.getpid()}") as sentence:
                coterie.run("fedavg", model("linear", (2,), 2), data, resume=True, **given)
            refused.append(sentence)

    coterie.run("fedavg", model("linear", (2,), 2), data, watch=watch, **given)
    assert refused
    records = (tmp_path / "run" / "metrics.jsonl").read_text()
    rounds = [json.loads(line)["round"] for line in records.splitlines() if json.loads(line)["kind"] == "round"]
    assert rounds == [0, 1, 2, 3]
    assert not (tmp_path / "run" / FILE).exists()
    coterie.run("fedavg", model("linear", (2,), 2), data, resume=True, **given)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"kind": "round"') == 4
