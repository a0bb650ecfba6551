"""What a person types, in a process of its own or in this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coterie import cli, methods

FILES = sorted(p.stem for p in Path(methods.__file__).parent.glob("*.py") if p.stem != "__init__")  # one per method
ON_ADAPTERS = (
    "fedalt", "feddpa", "fedexlora", "fedplora", "fedsvd", "ffalora", "flexlora", "flora", "hetlora", "hilora",
    "lorafair", "raflora", "rolora",
)
OF_ANY_MODEL = [name for name in FILES if name not in ON_ADAPTERS]
SMALL = ["--clients", "6", "--unseen", "2", "--model", "mlp:hidden=8", "--partition", "iid", "--set", "device=cpu"]


def as_before(path, change):
    """Edit the settings of a run as an earlier version wrote them, without a digest of what they say."""
    values = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    change(values)
    path.write_text(json.dumps(values))


def coterie(*words, cwd, **options):
    """Run `python -m coterie` and return the finished process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "coterie", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options)


def in_process(words, monkeypatch, capsys):
    """The command's entry point without a new interpreter: starting PyTorch for every bad word would take minutes."""
    monkeypatch.setattr(sys, "argv", ["coterie", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().err


def in_process_shown(words, monkeypatch, capsys):
    """What a command that succeeds prints, without a new interpreter."""
    monkeypatch.setattr(sys, "argv", ["coterie", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    return capsys.readouterr()


def exit_code(monkeypatch, *words):
    """The command's entry point in this process, for words that may be right: its exit code."""
    monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0
