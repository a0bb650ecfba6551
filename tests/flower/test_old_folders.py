"""A server's folder and its sites' homes, written by version 0.1.0, go on (tests/end_to_end/old_runs/README.md)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import sites as toy
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coterie.cli import app
from coterie.flower.job import Job

OLD = Path(__file__).parents[1] / "end_to_end" / "old_runs"


def test_the_last_round_gives_what_the_old_version_reached(tmp_path):
    """Two of three rounds were done by 0.1.0, which without the stop ended with the rows in `whole`."""
    home = shutil.copytree(OLD / "flower", tmp_path / "flower")
    job = Job.of(json.loads((home / "server" / "plan.json").read_text())["jobs"][0])
    toy.run(toy.federation(), [job], home / "sites", folder=home / "server")
    found = load_file(home / "server" / "checkpoint.safetensors")
    expected = load_file(OLD / "whole" / "flower.safetensors")
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["server.row"], expected["server.row"], rtol=1e-9, atol=1e-12)


def test_the_servers_folder_is_shown_and_reported(tmp_path):
    """It stopped after two of three rounds; all four sites were there and merged in the second one."""
    folder = shutil.copytree(OLD / "flower" / "server", tmp_path / "server")

    def said(*words):
        done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert "ditto" in said("show", folder)
    assert "2 of 3 rounds done" in said("status", folder)
    assert all(name in said("status", folder) for name in toy.NAMES)
    said("report", folder, "-o", tmp_path / "page.html")
    assert "ditto" in (tmp_path / "page.html").read_text()
