"""Training options of one method: `fedper:lr=0.1` trains FedPer alone as a run with lr=0.1 would."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import SMALL, coterie
from torch import nn

import coterie as library
from coterie import models, registry
from coterie.contract.cohort import LocalTraining
from coterie.contract.local import LocalOptions
from coterie.errors import CoterieError
from coterie.methods.fedper import FedPer
from coterie.options import options
from coterie.running import together
from coterie.running.experiment import Experiment, renamed, with_settings
from coterie.running.folder import Folder
from coterie.running.saved import Saved
from coterie.running.training import Training
from coterie.serving import newcomers

OWN = {
    "lr": 0.02, "epochs": 3, "steps": 2, "batch": 5, "schedule": "decay", "decay": 0.5, "server": "adam(lr=0.1)",
    "optimizer": "sgd(momentum=0.9)", "clip": 0.1, "warmup": 2, "class_weights": "balanced", "label_smoothing": 0.2,
    "augment": "flip+crop(pad=1)",
}
"""A value for each that is not the tests' default; `decay` shows under its schedule alone, `augment` with images."""


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def test_there_is_a_value_here_for_every_local_option():
    """Add one where an option is added: what follows tries each of them."""
    assert set(OWN) == set(options(LocalOptions))


# -- the same run, however it is asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "ifca"])
def test_an_option_of_the_method_is_the_runs_option_for_it(tiny, method, name):
    """Bit for bit, states and scores: whatever reads training options reads the same ones."""
    with_schedule = {"schedule": "decay"} if name == "decay" else {}
    spelled = f"{method}:training.{name}={OWN[name]}"
    data = tiny.federation()
    images = replace(data, x=data.x.view(-1, 1, 2, 2))
    own, run, plain = (
        tiny.simulation(spec, model=flat, data=images, rounds=4, **with_schedule, **more)
        for spec, more in ((spelled, {}), (method, {name: OWN[name]}), (method, {}))
    )
    for sim in (own, run, plain):
        sim.round()
        sim.round()
    tiny.same(tiny.state(own), tiny.state(run))
    assert any(not torch.equal(t, tiny.state(plain)[n]) for n, t in tiny.state(own).items() if n in tiny.state(plain))
    one, other = own.evaluate(), run.evaluate()
    for stage, scores in one.stages.items():
        for metric, values in scores.test.items():
            np.testing.assert_array_equal(values, other.stages[stage].test[metric])


def test_epochs_of_the_method_replace_the_runs_steps(tiny):
    """steps=1 of the run would silently win over `fedavg:epochs=2` otherwise."""
    own, run = tiny.simulation("fedavg:epochs=2", steps=1), tiny.simulation("fedavg", epochs=2)
    own.round()
    run.round()
    tiny.same(tiny.state(own), tiny.state(run))
    both = registry.method("fedavg:epochs=2,steps=4").training_in(Training(steps=1))
    assert (both.epochs, both.steps) == (2, 4)


def test_what_the_run_asked_for_is_kept_beside_it(tiny):
    sim = tiny.simulation("fedavg:lr=0.02,batch=7")
    assert (sim.training.lr, sim.training.batch, sim.asked.lr, sim.asked.batch) == (0.02, 7, 0.1, 3)
    assert sim.cohort(np.arange(2)).members.local == LocalTraining(batch=7, epochs=1, steps=None, lr=0.02)
    assert sim.server.training == sim.training


# -- spellings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "written"), [
    ("fedper:lr=0.1", "fedper:lr=0.1"),
    ("fedavg:batch=20,epochs=5", "fedavg:epochs=5,batch=20"),  # in the order of the options
    ("fedavg:server=adam(lr=0.010)", "fedavg:server=adam"),  # which is the server's default
    ("fedfew:official,models=2,lr=0.2", "fedfew:official,models=2,lr=0.2"),
    ("fedavg:server=sgd(lr=0.5,momentum=0.9)+confree:c=0.3", "fedavg:server=sgd(lr=0.5,momentum=0.9)+confree:c=0.3"),
    ("ditto:epochs=3", "ditto:personal_epochs=3"),
    ("ditto:training.epochs=3", "ditto:training.epochs=3"),
    ("ditto:epochs=3,training.epochs=5", "ditto:personal_epochs=3,training.epochs=5"),
    ("fedavg:training.lr=0.1", "fedavg:lr=0.1"),
    ("fedavg:steps=none", "fedavg:steps=none"),
])
def test_spellings_round_trip(given, written):
    made = registry.method(given)
    assert registry.spelling(made) == registry.respelled(given) == written
    assert registry.method(written) == made


def test_a_method_built_by_hand_is_the_same():
    made = FedPer(personal="none", training=(("lr", 0.1),))
    assert made == registry.method("fedper:personal=none,lr=0.1") == registry.method("fedper", personal="none", lr=0.1)
    assert registry.spelling(made) == "fedper:personal=none,lr=0.1"
    assert hash(made) != hash(FedPer(personal="none"))


@pytest.mark.parametrize(("given", "said"), [
    ("fedper:lr=-1", "fedper: lr must be above 0, not -1.0"),
    ("fedper:steps=0", "fedper: steps must be at least 1 or none, not 0"),
    ("fedper:epochs=many", "fedper's epochs must be a whole number, not 'many'"),
    ("fedper:schedule=linear", "unknown value of fedper's schedule 'linear'"),
    ("fedper:learning_rate=1", "unknown option of fedper 'learning_rate'; did you mean 'lr'"),
    ("fedper:persnal=head", "did you mean 'personal'"),
    ("fedper:rounds=3", "unknown option of fedper 'rounds'; all methods of a run share it: write --rounds 3"),
    ("fedper:training.rounds=3", "unknown option of fedper 'training.rounds'"),
    ("fedper:training=3", "unknown option of fedper 'training'"),
    ("fedper:server=adm", "fedper: unknown optimizer 'adm'; did you mean 'adam'"),
])
def test_bad_options_end_in_the_runs_sentence_with_the_methods_name(given, said):
    with pytest.raises(CoterieError, match=said):
        registry.method(given)


@pytest.mark.parametrize("own", [(("lr", -1.0),), (("rounds", 3),)])
def test_bad_options_given_by_hand_are_refused_before_round_1(tiny, own):
    with pytest.raises(CoterieError, match="fedper"):
        tiny.simulation(FedPer(training=own))


# -- former names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [
    ("fedavgft:lr=0.01,epochs=2", "fedavgft:finetune_epochs=2,finetune_lr=0.01"),
    ("ditto:epochs=3,lam=0.5", "ditto:lam=0.5,personal_epochs=3"),
    ("perfedavg:steps=none", "perfedavg:adapt_steps=none"),
    ("feddyn:clip=none", "feddyn:gradient_clip=none"),
    ("pfedhn:clip=3,momentum=0.5,decay=0.1,server_lr=0.3",
     "pfedhn:hyper_lr=0.3,hyper_momentum=0.5,hyper_decay=0.1,hyper_clip=3.0"),
    ("cfl:warmup=3", "cfl:split_after=3"), ("fesem:warmup=3", "fesem:common_rounds=3"),
    ("fedavg:server_lr=0.5", "fedavg:server=sgd(lr=0.5)"), ("fedfew:server_lr=3", "fedfew:server=sgd(lr=3.0)"),
    ("scaffold:server_lr=0.5,weighted=True", "scaffold:weighted=true,server=sgd(lr=0.5)"),
])
def test_former_names_mean_what_they_meant(old, new):
    assert registry.method(old) == registry.method(new)
    assert registry.respelled(old) == new
    assert registry.renamed(new) == []
    assert len(registry.renamed(old)) == old.partition(":")[2].count("=") - ("lam" in old) - ("weighted" in old)


def test_a_former_name_that_a_training_option_has_is_told_apart_from_it(tiny):
    """From Python in a warning, as by the command in a line."""
    data, short = tiny.federation(), {"rounds": 1, "device": "cpu"}
    with pytest.warns(UserWarning, match="ditto's epochs is personal_epochs now and was read as that"):
        library.run("ditto:epochs=3", lambda: nn.Linear(4, 3), data, **short)
    with pytest.warns(UserWarning, match="perfedavg's steps is adapt_steps now"):
        library.compare(["perfedavg:steps=2"], lambda: nn.Linear(4, 3), data, **short)
    with pytest.warns(UserWarning, match="pfedhn's decay is hyper_decay now"):
        Experiment(clients=3, methods=("pfedhn:decay=0.9",), training=Training(**short)).run()
    assert registry.renamed("ditto:epochs=3") == [
        "ditto's epochs is personal_epochs now and was read as that; to set the run's epochs for ditto alone, write "
        "training.epochs=3."
    ]
    assert registry.renamed("fedavg:server_lr=0.5") == [
        "fedavg's server_lr is server=sgd(lr=0.5) now and was read as that."
    ]


def test_a_users_option_of_a_former_name_is_the_users(tmp_path):
    """Who wrote `server_lr` or `lr` into a class of their own goes on with it."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom coterie.methods.fedavg import FedAvg\n\n@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n    server_lr: float = 2.0\n    lr: float = 3.0\n"
    )
    made = registry.method(f"{tmp_path}/mine.py:Mine:server_lr=0.5,lr=7,training.lr=0.2")
    assert (made.server_lr, made.lr, made.training) == (0.5, 7.0, (("lr", 0.2),))
    assert registry.spelling(made).endswith("mine.py:Mine:server_lr=0.5,lr=7.0,training.lr=0.2")


# -- --set -------------------------------------------------------------------------------------------------------------


def test_settings_reach_one_method_or_the_run():
    asked = Experiment(methods=("fedper", "ditto", "fedavg"))
    made = with_settings(asked, ["fedper.lr=0.1", "lr=0.3", "ditto.training.epochs=2", "ditto.epochs=4"])
    assert made.methods == ("fedper:lr=0.1", "ditto:personal_epochs=4,training.epochs=2", "fedavg")
    assert made.training.lr == 0.3
    assert with_settings(asked, ["server_lr=0.5"]).methods == (
        "fedper", "ditto:server=sgd(lr=0.5)", "fedavg:server=sgd(lr=0.5)"
    )
    assert with_settings(asked, ["server=adam"]).training.server == "adam"
    with pytest.raises(CoterieError, match="fedper: lr must be above 0"):
        with_settings(asked, ["fedper.lr=0"])
    with pytest.raises(CoterieError, match="unknown option of fedper 'rounds'; all methods of a run share it"):
        with_settings(asked, ["fedper.rounds=3"])


def test_notes_on_former_names_come_from_methods_and_settings():
    assert renamed(["all"], ["lr=0.1"]) == []
    said = renamed(["ditto:epochs=3", "fedavg"], ["fedavg.server_lr=0.5"])
    assert [note.partition(" is ")[0] for note in said] == ["ditto's epochs", "fedavg's server_lr"]


# -- runs and folders --------------------------------------------------------------------------------------------------


def clients(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in range(12, 12 + count)]


def model():
    return nn.Linear(4, 3)


def test_a_comparison_says_which_method_had_options_of_its_own_and_goes_on_with_them(tmp_path):
    """Folders, config.json and results carry the spelling; config.json's training is the run's."""
    federation = library.Federation.from_clients(clients())
    specs, whole = ["fedper:lr=0.2", "fedavg:server=adam(lr=0.1)"], {"rounds": 4, "device": "cpu", "lr": 0.1}
    first = library.compare(specs, model, federation, folder=tmp_path, **whole)
    names = ["local", "fedavg", "fedper:lr=0.2", "fedavg:server=adam(lr=0.1)"]
    assert [result.method for result in first] == names
    place = tmp_path / "fedper-lr-0.2" / "seed0"
    config = json.loads((place / "config.json").read_text())
    assert (config["method"], config["training"]["lr"]) == ("fedper:lr=0.2", 0.1)
    saved = Saved.open(place, "linear")
    assert saved.method == registry.method("fedper:lr=0.2")

    digest = json.loads((place / "result.json").read_text())["rows_sha256"]
    (place / "result.json").unlink()
    again = library.compare(specs, model, federation, folder=tmp_path, resume=True, **whole)
    assert json.loads((place / "result.json").read_text())["rows_sha256"] == digest
    assert [result.method for result in again] == names
    alone = library.run("fedper", model, federation, rounds=4, device="cpu", lr=0.2)
    joined = Folder(place).result()
    np.testing.assert_array_equal(alone.at("served", "last").test["loss"], joined.at("served", "last").test["loss"])


def test_a_comparison_with_a_former_spelling_goes_on_in_its_folder(tmp_path):
    """A folder of the version before: `ditto:epochs=2` in its name and its config."""
    federation, whole = library.Federation.from_clients(clients()), {"rounds": 2, "device": "cpu"}
    library.compare(["ditto:personal_epochs=2"], model, federation, folder=tmp_path, **whole)
    old = tmp_path / "ditto-epochs-2"
    (tmp_path / "ditto-personal_epochs-2").rename(old)
    config = old / "seed0" / "config.json"
    config.write_text(config.read_text().replace("personal_epochs=2", "epochs=2").replace('"server": "sgd",', ""))
    kept = (old / "seed0" / "result.json").stat().st_mtime_ns
    again = library.compare(["ditto:epochs=2"], model, federation, folder=tmp_path, resume=True, **whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ditto-epochs-2", "fedavg", "local"]
    assert (old / "seed0" / "result.json").stat().st_mtime_ns == kept
    assert again[-1].method == "ditto:personal_epochs=2"


def test_methods_whose_clients_train_otherwise_are_not_kin():
    """What differs at the server alone, an aggregator or its optimizer, never decides what clients compute."""
    def kin(spec):
        return together.kin(registry.method(spec))

    assert kin("fedavg:lr=0.1") == kin("fedavg:lr=0.1+median")
    assert kin("fedavg:server=adam") == kin("fedavg") == kin("fedavg:server=sgd(lr=0.5)")
    for own in ("lr=0.1", "epochs=2", "batch=5"):
        assert kin(f"fedavg:{own}") != kin("fedavg")


def test_joined_runs_with_options_of_their_own_are_the_runs_alone(tiny):
    specs = ["fedavg:lr=0.02", "fedavg:lr=0.02,server=adam(lr=0.1)", "fedavg:lr=0.02+median"]
    apart, joined, stack = tiny.side_by_side(specs)
    tiny.agree(apart, joined)
    assert not stack.apart


def test_a_newcomer_adapts_by_the_methods_own_epochs(tmp_path):
    """personalize trains GENTLE times the method's local work, whatever the run's is."""
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    federation = library.Federation.from_clients(clients())
    steps = {}
    for spec, epochs in (("fedavg:epochs=3", 1), ("fedavg", 3), ("fedavg", 1)):
        folder = tmp_path / f"{spec.replace(':', '-')}{epochs}"
        made = models.model("linear", (4,), 3)
        library.run(spec, made, federation, folder=folder, rounds=1, epochs=epochs, device="cpu")
        opened = newcomers.Desk(Saved.open(folder, "linear"))
        clients_ = opened.clients(opened.federation(x, y, [(np.arange(40), np.arange(0))], ["new"]))
        came, cohort = opened.arrive(clients_)
        newcomers.adapted(cohort, came.rows, clients_.training)
        steps[spec, epochs] = int(cohort.spent[0])
    assert steps["fedavg:epochs=3", 1] == steps["fedavg", 3] == 3 * steps["fedavg", 1]


def test_on_the_command_line(tmp_path):
    """The table's rows are labelled by the spelling; a former name is read with one note."""
    words = ["fedper:lr=0.2", "ditto:epochs=1", *SMALL, "--rounds", 1, "--set", "fedper.batch=20", "--out", "out"]
    done = coterie("compare", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedper:batch=20,lr=0.2" in done.stdout
    assert "ditto:personal_epochs=1" in done.stdout
    note = "coterie: ditto's epochs is personal_epochs now and was read as that; to set the run's epochs"
    assert " ".join(done.stderr.split()).count(note) == 1
    again = coterie("resume", "out", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    refused = coterie("run", "feddyn", *SMALL, "--rounds", 1, "--set", "server=adam", "--out", "no", cwd=tmp_path)
    assert refused.returncode == 2
    assert "server=adam does not fit feddyn" in " ".join(refused.stderr.split())
    assert not (tmp_path / "no").exists()
