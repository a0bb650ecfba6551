"""Help, bad input and exit codes of the whole command line."""

from pathlib import Path

import numpy as np
import pytest
from commands import coterie, in_process, in_process_shown

from coterie.cli import run as training
from coterie.running.experiment import DEFAULT_PARTITION, Experiment

BAD = {
    "unknown command": (["runn", "fedfew"], "unknown command 'runn'; did you mean 'run'? `coterie --help`"),
    "unknown method": (["run", "fedfwe"], "did you mean 'fedfew'"),
    "unknown preset": (["run", "fedfew:oficial"], "did you mean 'official'"),
    "unknown page": (["methods", "fedfwe"], "unknown method, aggregator or optimizer 'fedfwe'; did you"),
    "unknown aggregator's page": (["methods", "cnfree"], "did you mean 'confree'"),
    "unknown option of an aggregator": (["methods", "confree:d=1"], "option of confree"),
    "unknown dataset": (["run", "fedavg", "--data", "digit"], "did you mean 'digits'"),
    "unknown partition": (["run", "fedavg", "--partition", "dirchlet:alpha=1"], "did you mean 'dirichlet'"),
    "unknown model": (["run", "fedavg", "--model", "mpl"], "did you mean 'mlp'"),
    "unknown option": (["run", "fedavg", "--set", "rouds=3"], "did you mean 'rounds'"),
    "another word for it": (["run", "fedavg", "--set", "learningrate=1"], "did you mean 'lr'? `coterie options`"),
    "and with a line": (["run", "fedavg", "--set", "learning_rate=1"], "did you mean 'lr'?"),
    "its former name": (["run", "fedavg", "--set", "join=on"], "did you mean 'together'?"),
    "nothing like an option": (["run", "fedfew", "--set", "zzz=1"], "unknown option 'zzz'; `coterie options` lists"),
    "a setting is no option": (["run", "fedavg", "--set", "val=0.2"], "a setting of the experiment"),
    "unknown method option": (["run", "fedfew:model=3"], "did you mean 'models'"),
    "option of another method": (["run", "fedfew", "--set", "fedprox.mu=1"], "unknown option 'fedprox.mu'"),
    "neither a metric nor a method": (
        ["run", "--data", "h.csv", "--watch", "r2", "rmse", "fedavg"], "unknown metric or method 'rmse'; did you mean"),
    "a method behind metrics": (["compare", "--watch", "f1", "fedperr"], "did you mean 'fedper'?"),
    "not a number": (["run", "fedavg", "--set", "lr=fast"], "must be a number, not 'fast'"),
    "outside its range": (["run", "fedsoft", "--set", "sigma=0"], "fedsoft's sigma must be above 0 and at most 1, not"),
    "negative": (["run", "fedavg", "--set", "rounds=-1"], "rounds must be at least 0"),
    "zero seeds": (["compare", "fedavg", "--seeds", "0"], "seeds"),
    "missing alpha": (["run", "fedavg", "--partition", "dirichlet"], "needs a value for alpha"),
    "more models than clients": (["run", "fedfew:models=9", "--clients", "5", "--partition", "iid"], "there are 5"),
    "more, compared": (["compare", "ifca:models=9", "--clients", "5", "--partition", "iid"], "there are 5"),
    "head not found": (["run", "fedper", "--head", "haed", "--partition", "iid"], "did you mean 'head'"),
    "no such part": (["run", "fedper:personal=haed", "--partition", "iid"], "did you mean 'head'"),
    "an option given twice": (["run", "fedavg", "--rounds", "3", "--rounds", "5"], "--rounds is given twice"),
    "and by its letter": (["report", "-o", "a.html", "--out=b.html", "run"], "--out is given twice, and it takes one"),
    "two whole numbers for one": (["compare", "fedavg", "--seeds", "2", "--seeds", "2"], "--seeds is given twice"),
    "nothing to export": (["export", "missing/run", "-o", "m.onnx"], "no run folder or model file missing/run."),
    "missing file": (["run", "fedavg", "--data", "no.npz"], "no.npz"),
    "missing config": (["run", "--config", "no.toml"], "no.toml"),
    "a file without its class": (["run", "mine.py"], "Write mine.py:NAME"),
    "missing method file": (["run", "no.py:Mine"], "no.py"),
    "not a run": (["show", "nowhere"], "not a run folder: it does not exist"),
    "a report of a file": (["report", __file__], "is not a run folder: it is a file"),
    "resume nothing": (["resume", "nowhere"], "not a run folder"),
    "two methods": (["run"], "run trains one method"),
    "no device": (["run", "fedavg", "--set", "device=tpu9000"], "device"),
    "a client without data": (
        ["run", "fedavg", "--clients", "60", "--partition", "dirichlet:alpha=0.01,minimum=0"], "has no samples"
    ),
    "impossible partition": (["run", "fedavg", "--clients", "3000", "--partition", "dirichlet:alpha=1"], "client"),
}


def bad_npz(place: Path) -> dict[str, tuple[list[str], str]]:
    """Data files with one fault each."""
    rng = np.random.default_rng(0)
    x, y, client = rng.standard_normal((40, 3)).astype(np.float32), rng.integers(0, 2, 40), np.repeat(np.arange(4), 10)
    holed = x.copy()
    holed[13, 1] = np.nan
    below = y.copy()
    below[25] = -3
    np.savez(place / "nan.npz", x=holed, y=y, client=client)
    np.savez(place / "own.npz", x=x, y=y, client=client)
    np.savez(place / "label.npz", x=x, y=below, client=client)
    np.savez(place / "short.npz", x=x, y=y[:-1], client=client)
    np.savez(place / "empty.npz", x=x[:0], y=y[:0], client=client[:0])
    (place / "text.npz").write_text("this is no archive")
    (place / "broken.toml").write_text("rounds = = 3")
    (place / "unknown.toml").write_text("cleints = 3")
    return {
        "NaN in data": (["run", "fedavg", "--data", "nan.npz", "--model", "linear"], "client 1"),
        "label out of range": (["run", "fedavg", "--data", "label.npz", "--model", "linear"], "client 2"),
        "x and y differ": (["run", "fedavg", "--data", "short.npz", "--model", "linear"], "39"),
        "no samples": (["run", "fedavg", "--data", "empty.npz", "--model", "linear"], "no"),
        "not an archive": (["run", "fedavg", "--data", "text.npz"], "text.npz"),
        "clients of their own": (["data", "own.npz", "--clients", "50"], "the data bring 4 clients of their own"),
        "and in a run": (["run", "fedavg", "--data", "own.npz", "--clients", "50"], "so --clients does not apply"),
        "and in a pilot": (["advise", "own.npz", "--clients", "50"], "--partition dirichlet:alpha=0.5 would deal them"),
        "data named twice": (["data", "own.npz", "--data", "nan.npz"], "both name the data"),
        "broken toml": (["run", "fedavg", "--config", "broken.toml"], "broken.toml is not valid TOML"),
        "unknown setting": (["run", "fedavg", "--config", "unknown.toml"], "did you mean 'clients'"),
    }


def shown_at_80(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    return in_process_shown([*words, "--help"], monkeypatch, capsys).out


def test_help_lists_the_commands_in_the_order_of_use_and_cuts_nothing_off(monkeypatch, capsys):
    lines = shown_at_80([], monkeypatch, capsys).partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == [
        "run", "compare", "show", "report", "watch", "resume", "advise", "dissect", "data", "methods", "check",
        "options", "presets", "personalize", "export", "keys", "server", "client", "status", "bench", "textbook",
    ]
    assert not [line for line in lines if "..." in line]


def test_help_says_the_defaults_that_hold(monkeypatch, capsys):
    """Taken from the dataclasses that the commands fill in, so they are what happens without the option."""
    shown = " ".join(shown_at_80(["compare"], monkeypatch, capsys).split())
    one = Experiment()
    for flag, value in {"clients": one.clients, "unseen": one.unseen, "rounds": one.training.rounds,
                        "seeds": one.seeds, "model": one.model, "data": one.data}.items():
        said = shown.partition(f" --{flag} ")[2].partition(" --")[0]
        assert f"[default: {value}]" in said, flag
    assert f"else {DEFAULT_PARTITION}]" in shown
    assert "a new one under runs/]" in shown
    assert f"[default: {' '.join(training.DEFAULT_METHODS)}]" in shown


@pytest.mark.parametrize("name", ["run", "compare", "report", "advise", "methods", "keys"])
def test_help_explains_the_arguments_and_has_no_stray_marks(name, monkeypatch, capsys):
    """An argument's line has more than its name; a default is set in plain brackets."""
    shown = shown_at_80([name], monkeypatch, capsys)
    assert shown.lower().count("arguments:\n") == 1  # one list of them
    arguments = shown.partition("Arguments:\n")[2].partition("\n\n")[0].splitlines()
    assert all(len(line.split()) > 2 for line in arguments)
    assert "\\" not in shown


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, sentence = BAD[name]
    code, said = in_process(words, monkeypatch, capsys)
    assert code == 2, said
    assert sentence in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists(), "bad input must not leave a run folder behind"


def test_bad_files_are_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, (words, sentence) in bad_npz(tmp_path).items():
        code, said = in_process(words, monkeypatch, capsys)
        assert code == 2, (name, said)
        assert sentence in said, (name, said)
        assert len(said.strip().splitlines()) == 1, (name, said)


def test_the_exit_code_is_that_of_the_process(tmp_path):
    done = coterie("run", "fedfwe", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "coterie: unknown method 'fedfwe'; did you mean 'fedfew'?"


def test_a_misspelt_flag_is_refused_too(tmp_path):
    done = coterie("run", "fedavg", "--rouds", 3, cwd=tmp_path)
    assert done.returncode == 2
    assert "--rounds" in done.stderr
