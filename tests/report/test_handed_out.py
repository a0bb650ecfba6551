"""The line below the table says which round's models export and personalize take."""

from __future__ import annotations

import pytest
from commands import exit_code, in_process

from coterie.report import handed_out
from coterie.running.folder import Folder

WORDS = ["--clients", 4, "--model", "mlp:hidden=4", "--rounds", 4, "--set", "evaluate_every=1", "--set", "lr=2.0",
         "--set", "warmup=3", "--set", "device=cpu"]


def test_run_and_show_say_which_round_will_be_taken(tmp_path, monkeypatch, capsys):
    """By the rounds that the folder's records choose; the last one is named where another one was chosen."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "run", "ditto", *WORDS, "--out", "run") == 0
    printed = " ".join(capsys.readouterr().out.split())  # however wide the terminal is
    result = Folder("run").result()
    served, adapted = (result.round_of(stage) for stage in ("served", "adapted"))
    (line,) = handed_out.lines([result])
    assert line in printed
    assert f"round {served}" in line
    assert f"round {adapted}" in line
    assert ("round 4" in line) == (4 in (served, adapted) or "--round last" in line)
    assert exit_code(monkeypatch, "show", "run") == 0
    assert line in " ".join(capsys.readouterr().out.split())
    code, error = in_process(["export", "run", "--client", "0", "-o", "m.pt", "--round", "3"], monkeypatch, capsys)
    assert code == 2
    assert "name 'chosen' or 'last', not '3'" in error


def test_a_damaged_checkpoint_is_said_and_the_table_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "run", "fedavg", *WORDS, "--out", "run") == 0
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"nothing")
    capsys.readouterr()
    assert exit_code(monkeypatch, "show", "run") == 0
    assert "Models cannot be handed out" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--round", "last"]])
def test_a_single_models_file_has_no_other_rounds(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "run", "fedavg", *WORDS, "--out", "run") == 0
    assert exit_code(monkeypatch, "export", "run", "--model", "0", "-o", "a.safetensors") == 0
    code = exit_code(monkeypatch, "export", "a.safetensors", *words, "-o", "a.pt")
    assert code == (2 if words else 0), capsys.readouterr().err
