"""What the commands of an operator do without Flower's processes: settings, rehearsals, predictions, the live table."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sites as toy
import torch
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError
from coterie.flower import operator
from coterie.flower.checks import Inspector, Limits
from coterie.flower.loopback import Loopback
from coterie.flower.plan import Plan
from coterie.flower.rounds import serve
from coterie.flower.site import site_at

CONFIG = """method = "fedper"
model = "mlp:hidden=5"
shape = [4]
classes = 3
[training]
rounds = 2
lr = 0.1
device = "cpu"
[policy]
sites = 3
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "server.toml").write_text(CONFIG)
    return tmp_path / "server.toml"


@pytest.fixture
def files(tmp_path):
    rng, found = np.random.default_rng(0), {}
    for name in ("lyon", "oslo", "turin"):
        y = rng.integers(0, 3, 60)
        found[name] = tmp_path / f"{name}.npz"
        np.savez(found[name], x=(rng.standard_normal((60, 4)) + 2 * np.eye(4)[y]).astype(np.float32), y=y)
    return found


def test_a_file_is_a_plan(config):
    plan = Plan.configured(config)
    (job,) = plan.jobs
    assert (job.method, job.model, job.shape, job.classes, job.outputs) == ("fedper", "mlp:hidden=5", (4,), 3, 3)
    assert (job.training.rounds, plan.policy.sites, plan.limits.norm) == (2, 3, 10.0)
    assert Plan.configured(config).jobs[0].experiment != job.experiment  # each has an id of its own


@pytest.mark.parametrize(("line", "replacement", "sentence"), [
    ('method = "fedper"', 'method = "fedpur"', "did you mean 'fedper'"),
    ('method = "fedper"', 'metod = "fedper"', "did you mean 'method'"),
    ('method = "fedper"', "", "lacks method"),
    ("shape = [4]", "shape = 4", "shape in .* is that of one sample"),
    ("shape = [4]", "shape = [4, -1]", "shape in .* is that of one sample"),
    ("classes = 3", "classes = true", "classes in .* is a whole number"),
    ("classes = 3", 'classes = 3\nlinger = "x"', "linger in .* is a number of seconds of at least 0, not x"),
    ("classes = 3", "classes = 3\nlinger = [1]", "linger in .* is a number of seconds"),
    ("classes = 3", "classes = 3\nlinger = inf", "linger in .* is a number of seconds"),
    ("rounds = 2", "round = 2", "did you mean 'rounds'"),
    ("rounds = 2", "dropouts = 0.3", "real sites fail by themselves"),
    ("sites = 3", "sites = 0", "sites must be at least 1"),
    ("sites = 3", "sites = 3\n[limits]\nnorm = 0.5", "a factor above 1"),
    ("sites = 3", "sites = 3\n[limit]\nnorm = 5", "did you mean 'limits'"),
    ("sites = 3", "sites = 3\n[gate]\nbody = \"300 MiB\"", "body of the gate is a size"),
    ("sites = 3", "sites = 3\n[gate]\nrate = 0", "rate of the gate must be a positive number"),
    ("sites = 3", "sites = 3\n[gate]\nconections = 5", "did you mean 'connections'"),
    ("[policy]", "[policy", "is not valid TOML"),
    ("[training]", "training = 3\n[x]", "unknown setting|must be a table"),
])
def test_a_wrong_file_is_a_sentence(config, line, replacement, sentence):
    config.write_text(CONFIG.replace(line, replacement))
    with pytest.raises(CoterieError, match=sentence):
        Plan.configured(config)


@pytest.mark.parametrize(("content", "said"), [
    (None, "no regular file"), ("a = " + "[" * 5000, "not valid TOML"), ("linger = " + "9" * 5000, "not valid TOML"),
    (1 << 33, "too large to be read"), (b"\xff", "not valid TOML"),
], ids=["a pipe", "brackets", "digits", "8 GB", "bytes"])
def test_whatever_lies_in_place_of_a_configuration_is_a_sentence(tmp_path, content, said):
    """It comes from the server's operator, whom a site does not trust before it has seen what is asked of it."""
    path = tmp_path / "server.toml"
    if content is None:
        os.mkfifo(path)
    elif isinstance(content, int):
        path.touch()
        os.truncate(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CoterieError, match=said):
        Plan.configured(path)


def test_a_dry_run_plays_few_of_many_sites(config, files, tmp_path):
    config.write_text(CONFIG.replace("sites = 3", "sites = 200000"))
    _, parcels = operator.rehearse(config, str(files["oslo"]), tmp_path / "home", "oslo", {"device": "cpu"})
    assert len(list((tmp_path / "home").iterdir())) <= operator.MOST_PLAYED
    assert [parcel.meta["kind"] for parcel in parcels][-1] == "round"


def test_limits_can_be_switched_off(config):
    config.write_text(CONFIG + '[limits]\nnorm = "none"\nsamples = 5\n')
    assert Plan.configured(config).limits == Limits(norm=None, samples=5.0)


def test_the_gate_is_as_wide_as_the_model_asks_or_the_operator_says(config, tmp_path):
    """43 numbers of 4 bytes in the server's row, as many in the model: 4 * (172 + 172) above 64 MB."""
    config.write_text(CONFIG.replace("fedper", "fedavg"))
    plan = Plan.configured(config)
    assert plan.gate.largest(operator._answer_bytes(plan)) == 64_000_000 + 4 * (172 + 172)
    config.write_text(CONFIG + '[gate]\nbody = "1.5 GB"\nper_address = 7\n')
    placed = Plan.configured(config).placed(tmp_path / "run")
    assert placed.gate.largest(0) == 1_500_000_000
    assert Plan.read(tmp_path / "run" / "plan.json").gate.per_address == 7


def test_a_server_is_reached_from_elsewhere_only_when_it_is_told_so(config, tmp_path, monkeypatch):
    """Without --listen it is loopback; without keys nothing else will do, on either side."""
    pytest.importorskip("flwr")
    given = []
    monkeypatch.setattr(operator, "serve", lambda *words: given.append(words[2]))
    CliRunner().invoke(app, ["server", str(config), "--out", str(tmp_path / "run"), "--insecure"])
    assert given == ["127.0.0.1:8000"]
    monkeypatch.undo()
    for address in ("0.0.0.0:8000", "[::]:8000", "10.0.0.3:8000", "hub.example.org:8000"):
        words = ["server", str(config), "--out", str(tmp_path / "run"), "--insecure", "--listen", address]
        assert "listens on loopback alone" in str(CliRunner().invoke(app, words).exception)


def test_a_folder_keeps_its_experiment(config, tmp_path):
    """The id is made once; patience may change, the experiment may not."""
    first = Plan.configured(config).placed(tmp_path / "run")
    config.write_text(CONFIG.replace("sites = 3", "sites = 3\ndeadline = 5"))
    second = Plan.configured(config).placed(tmp_path / "run")
    assert second.jobs == first.jobs
    assert second.policy.deadline == 5
    config.write_text(CONFIG.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(CoterieError, match="holds an experiment with other settings"):
        Plan.configured(config).placed(tmp_path / "run")


@pytest.mark.parametrize(("words", "sentence"), [
    (["client", "--data", "x.npz"], "where is the server"),
    (["client", "--data", "x.npz", "--server", "hub:80"], "needs its keys"),
    (["client", "--data", "x.npz", "--server", "hub:80", "--insecure"], "needs a name"),
    (["client", "--data", "x.npz", "--server", "hub"], "is no address"),
    (["client", "--data", "gone.npz", "--server", "hub:80", "--insecure", "--name", "a"], "there is no file"),
    (["client", "--data", "x.npz", "--predict"], "holds no model yet"),
    (["server", "gone.toml", "--out", "run", "--insecure"], "gone.toml cannot be read"),
    (["server", "gone.toml", "--out", "run"], "needs its keys"),
    (["server", "gone.toml", "--out", "run", "--insecure", "--keys", "x"], "exclude each other"),
    (["status", "nowhere"], "is not the folder of a server"),
    (["status", ".", "--lift", "oslo"], "oslo is not quarantined; quarantined are: none"),
])
def test_wrong_words_are_a_sentence(tmp_path, monkeypatch, words, sentence):
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, CoterieError)
    assert sentence in str(result.exception)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"fedper": "fedavg+private:sigma=1", "rounds = 2": 'rounds = 2\nsampling = "poisson"'}, "sites' scores"),
    ({"fedper": "fedavg+krum:faulty=1", "sites = 3": "sites = 2"}, "needs at least"),
])
def test_what_cannot_run_is_refused_before_the_server_starts(config, tmp_path, changes, sentence):
    """Nothing is left behind: neither a process nor a folder."""
    pytest.importorskip("flwr")
    text = CONFIG
    for old, new in changes.items():
        text = text.replace(old, new)
    config.write_text(text)
    result = CliRunner().invoke(app, ["server", str(config), "--out", str(tmp_path / "run"), "--insecure"])
    assert isinstance(result.exception, CoterieError)
    assert sentence in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("method", "introduces", "uploads"), [
    ("fedper", set(), {"update"}), ("pacfl", {"basis"}, {"update"}), ("fedfew", set(), {"update", "loss"}),
])
def test_a_rehearsal_shows_what_leaves_and_sends_nothing(config, files, tmp_path, method, introduces, uploads):
    """FedPer's head, 5 * 3 + 3 of 43 columns, stays at home; n is 60 less a quarter, less a tenth of the rest."""
    config.write_text(CONFIG.replace("fedper", method))
    _, parcels = operator.rehearse(config, str(files["oslo"]), tmp_path / "home", "oslo", {"device": "cpu"})
    told = [parcel for parcel in parcels if parcel.meta["kind"] == "introduce"]
    trained = [parcel for parcel in parcels if "n" in parcel.meta and parcel.meta["kind"] == "round"]
    assert set().union(*(parcel.tensors for parcel in told)) == introduces
    assert [set(parcel.tensors) for parcel in trained] == [uploads]
    assert trained[0].meta["n"] == 41
    if method == "fedper":
        assert tuple(trained[0].tensors["update"].shape) == (1, 25)
    shown = operator.sending(parcels)
    cells = list(shown.columns[1].cells)
    assert {"n", "scores", *introduces, *uploads} <= set(cells)


def test_a_rehearsal_of_a_private_run_needs_no_secret(config, files, tmp_path, monkeypatch):
    """The secret is the server's. The update is all that leaves: no count, no score."""
    monkeypatch.delenv("COTERIE_SECRET", raising=False)
    private = CONFIG.replace('"fedper"', '"fedavg+private:sigma=1"\nscores = false')
    config.write_text(private.replace("rounds = 2", 'rounds = 2\nsampling = "poisson"'))
    _, parcels = operator.rehearse(config, str(files["oslo"]), tmp_path / "home", "oslo", {"device": "cpu"})
    assert set().union(*(parcel.tensors for parcel in parcels)) == {"update"}
    assert all({"n", "scores"}.isdisjoint(parcel.meta) for parcel in parcels)


def test_the_command_of_a_rehearsal(config, files, tmp_path):
    """It ends with the line that approves the experiment."""
    home = str(tmp_path / "home")
    words = ["client", "--data", str(files["oslo"]), "--dry-run", str(config), "--home", home]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "float32 [1, 25]" in result.output
    digest = Plan.configured(config).jobs[0].digest
    assert result.output.splitlines()[-1] == f"approve it with: coterie client --accept {digest} --home {home}"


@pytest.fixture
def trained(config, files, tmp_path):
    """A finished run of three sites in this process: its folder and the sites' homes."""
    plan = Plan.configured(config).placed(tmp_path / "run")
    sites = [site_at(name, path, tmp_path / name, "cpu", accept="any") for name, path in files.items()]
    serve(plan.jobs, Loopback(sites), plan.policy, tmp_path / "run", Inspector(plan.limits, tmp_path / "run"))
    return tmp_path / "run"


def test_a_site_predicts_with_its_model(trained, files, tmp_path):
    """The csv agrees with the labels as often as is said, and as the model's own file gives."""
    out = tmp_path / "said.csv"
    path, accuracy = operator.predict(tmp_path / "oslo", str(files["oslo"]), out)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    y = np.load(files["oslo"])["y"]
    assert [int(row["sample"]) for row in rows] == list(range(60))
    assert accuracy == pytest.approx(np.mean([int(row["class"]) == label for row, label in zip(rows, y, strict=True)]))
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 5), np.float32), y=np.zeros(3, np.int64))
    with pytest.raises(CoterieError, match=r"samples of \[4\]; .* has \[5\]"):
        operator.predict(tmp_path / "oslo", str(tmp_path / "wide.npz"), None)


def test_a_site_writes_down_what_left_it(trained, tmp_path):
    lines = [json.loads(line) for line in (tmp_path / "oslo" / "sent.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["introduce", "round", "round", "round", "round"]
    assert [line["tensors"] for line in lines] == [{}, *[{"update": "float32 [1, 25]"}] * 2, {}, {}]
    assert ["scores" in line for line in lines[3:]] == [True, False]  # the last round's; the chosen model tells nothing
    assert lines[1]["n"] == 41


def test_the_table_of_a_run(trained):
    table = operator.status(trained)
    assert str(table.title).startswith("fedper: finished")
    assert "2 of 2 rounds" in str(table.title)
    assert list(table.columns[0].cells) == ["lyon", "oslo", "turin"]
    assert list(table.columns[3].cells) == ["2", "2", "2"]
    assert list(table.columns[6].cells) == ["has its model"] * 3
    assert CliRunner().invoke(app, ["status", str(trained)]).exit_code == 0


def test_a_late_site_gets_a_model_from_the_finished_folder(trained, files, tmp_path, config):
    """The same command on the same folder serves whoever came since, by the method's rule for unseen clients."""
    np.savez(tmp_path / "zurich.npz", **np.load(files["lyon"]))
    late = [site_at("zurich", tmp_path / "zurich.npz", tmp_path / "zurich", "cpu", accept="any")]
    plan = Plan.configured(config).placed(tmp_path / "run")
    serve(plan.jobs, Loopback(late), plan.policy, tmp_path / "run")
    (facts,) = (tmp_path / "zurich").glob("*/model.json")
    assert json.loads(facts.read_text())["newcomer"] is True
    assert operator.predict(tmp_path / "zurich", str(files["lyon"]), tmp_path / "z.csv")[1] is not None


def test_made_up_samples_fit_the_job():
    data = toy.federation()
    made = toy.job(data, "fedavg").made_up(2)
    assert made.population == 2
    assert made.x.shape[1:] == data.x.shape[1:]
    assert torch.equal(made.y.unique(), torch.arange(3))


@pytest.mark.flower
def test_a_site_takes_part_once_its_operator_has_approved(files, tmp_path):
    """Real commands with TLS and keys. oslo's first tasks are refused, in its operator's words too; then it is approved
    while it runs, and trains to the end. Everything that left it, the refusals among it, is in sent.jsonl."""
    pytest.importorskip("flwr")
    from coterie.flower import keys

    (tmp_path / "server.toml").write_text(CONFIG.replace("sites = 3", "sites = 1\ndeadline = 120"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    keys.make(tmp_path / "keys", ["127.0.0.1"], ["oslo"])
    home, running = tmp_path / "home", []
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(toy.__file__).resolve().parents[2])}

    def start(name, *words):
        with (tmp_path / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen([sys.executable, "-m", "coterie", *map(str, words)], stdout=log, stderr=log,
                                            env=variables))
        return running[-1]

    def said(name):
        return (tmp_path / f"{name}.log").read_text()

    def until(done, seconds):
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"{said('server')}\n{said('client')}"
            time.sleep(0.2)

    try:
        server = start("server", "server", tmp_path / "server.toml", "--out", tmp_path / "run", "--listen", address,
                       "--keys", tmp_path / "keys" / "server")
        start("client", "client", "--server", address, "--data", files["oslo"], "--home", home, "--device", "cpu",
              "--keys", tmp_path / "keys" / "clients" / "oslo")
        digest = Plan.configured(tmp_path / "server.toml").jobs[0].digest
        until(lambda: f"refused: the experiment {digest} (fedper, mlp:hidden=5) is not approved" in said("client"), 120)
        assert "no experiment is approved in" in said("client")
        assert sorted(path.name for path in home.iterdir() if path.is_dir()) == ["flwr"]
        assert CliRunner().invoke(app, ["client", "--accept", digest, "--home", str(home)]).exit_code == 0
        until(lambda: server.poll() is not None, 240)
        assert server.returncode == 0, said("server")
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)
    lines = [json.loads(line) for line in (home / "sent.jsonl").read_text().splitlines()]
    refused = [one for one in lines if "error" in one]
    assert refused
    assert all(digest in one["error"] for one in refused)
    assert [one["kind"] for one in lines if "error" not in one] == ["introduce", "round", "round", "round", "round"]
    (experiment,) = [path.parent for path in home.glob("*/job.json")]
    assert (experiment / "model.safetensors").exists()
    assert (experiment / "former.safetensors").exists()


BAD = (None, 5, -1, 1e308, "x", [], {}, [["x"]], True, 10**400, {"a": {"b": []}})


def leaves(value, path=()):
    """The place of every value in a record, one entry of each list."""
    yield path
    for key, one in (value.items() if isinstance(value, dict) else list(enumerate(value))[:1]
                     if isinstance(value, list) else ()):
        yield from leaves(one, (*path, key))


def edited(values, path, bad):
    made = json.loads(json.dumps(values))
    if not path:
        return bad
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = bad
    return made


@pytest.mark.parametrize("name", ["status.json", "checks.json", "plan.json"])
def test_a_servers_folder_that_somebody_edited_is_a_table_or_a_sentence(config, tmp_path, name):
    """Any value of what a server writes down, replaced by any other; `status` and `--lift` read them."""
    run = tmp_path / "run"
    Plan.configured(config).placed(run)
    records = {
        "status.json": {"time": 1.0, "pid": 1, "doing": "round 1 of 2", "there": ["oslo", "lyon"], "asked": ["oslo"]},
        "checks.json": {"strikes": {"oslo": 3}, "held": {"oslo": "too long"}, "samples": {"oslo": 40, "lyon": 30}},
        "plan.json": json.loads((run / "plan.json").read_text()),
    }
    for other, values in records.items():
        (run / other).write_text(json.dumps(values))
    said = CliRunner().invoke(app, ["status", str(run)])
    assert said.exit_code == 0
    assert "quarantined: too long" in said.output
    for path in leaves(records[name]):
        for bad in BAD:
            (run / name).write_text(json.dumps(edited(records[name], path, bad)))
            for more in ([], ["--lift", "lyon"]):
                found = CliRunner().invoke(app, ["status", str(run), *more]).exception
                assert found is None or isinstance(found, SystemExit | CoterieError), (path, bad, found)


def test_a_quarantine_is_not_lifted_through_a_link(config, tmp_path):
    """In a folder of somebody else's the file of that name may lead to one of the user's, or be a pipe."""
    run = tmp_path / "run"
    Plan.configured(config).placed(run)
    (run / "checks.json").write_text(json.dumps({"strikes": {}, "held": {"oslo": "too long"}, "samples": {}}))
    own = tmp_path / "precious"
    own.write_text("precious\n")
    for make in (lambda path: path.symlink_to(own), lambda path: path.hardlink_to(own), os.mkfifo):
        make(run / "lift")
        with pytest.raises(CoterieError, match=r"lift (is a symbolic link|has another name|cannot be written)"):
            operator.lift(run, "oslo")
        (run / "lift").unlink()
    assert own.read_text() == "precious\n"
    operator.lift(run, "oslo")
    assert (run / "lift").read_text() == "oslo\n"
