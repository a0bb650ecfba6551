"""Sites read their own files and number classes alike; they use their model of the round chosen on validation data,
whoever was away or killed on the way to it."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
import sites as toy
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError
from coterie.flower import operator
from coterie.flower import site as site_module
from coterie.flower.job import Job, fresh_id
from coterie.flower.loopback import Loopback
from coterie.flower.operator import predict
from coterie.flower.plan import Plan
from coterie.flower.policy import Policy
from coterie.flower.rounds import serve
from coterie.flower.site import Site, site_at
from coterie.flower.wire import PROTOCOL, Failure, Parcel
from coterie.running.chosen import CHOSEN
from coterie.running.folder import Folder
from coterie.running.training import Training
from coterie.serving.portable import read_model

TRAINING = Training(rounds=2, lr=0.05, device="cpu")


def table(path, labels, seed=0):
    rng = np.random.default_rng(seed)
    rows = [f"{rng.normal():.3f},{rng.normal():.3f},{label}" for label in labels]
    path.write_text("\n".join(["a,b,label", *rows]) + "\n")
    return str(path)


def job(**values):
    return Job(**{"experiment": fresh_id(), "method": "fedavg", "model": "linear", "shape": (2,), "classes": 3,
                  "outputs": 3, "training": TRAINING, **values})


def site(folder, name, data):
    return site_at(name, data, folder / name, "cpu", val=0.0, test=0.25, accept="any")


def test_a_site_with_some_of_the_classes_numbers_them_as_the_others_do(tmp_path):
    """1 and 3 of the classes 1, 2, 3 are numbers 0 and 2, and not 0 and 1."""
    agreed = job(class_names=("1", "2", "3"))
    some = site(tmp_path, "berlin", table(tmp_path / "b.csv", [1, 3] * 6)).federation(agreed)
    every = site(tmp_path, "lyon", table(tmp_path / "l.csv", [1, 2, 3] * 4)).federation(agreed)
    assert some.y.unique().tolist() == [0, 2]
    assert every.y.unique().tolist() == [0, 1, 2]
    assert some.classes == every.classes == 3


def test_without_names_a_label_is_its_own_number(tmp_path):
    """So sites agree without a word; a label that has no place is refused with the way out."""
    made = site(tmp_path, "berlin", table(tmp_path / "b.csv", [0, 2] * 6)).federation(job())
    assert made.y.unique().tolist() == [0, 2]
    with pytest.raises(CoterieError, match="berlin has the label 3, which is none of the run's 3 classes: 0, 1, 2"):
        site(tmp_path, "berlin", table(tmp_path / "b.csv", [1, 3] * 6)).federation(job())


def test_names_are_looked_up_and_never_numbered_by_the_site(tmp_path):
    """A site without birds: cat and dog are 1 and 2 of bird, cat, dog."""
    data = table(tmp_path / "b.csv", ["cat", "dog"] * 6)
    named = site(tmp_path, "berlin", data).federation(job(class_names=("bird", "cat", "dog")))
    assert named.y.unique().tolist() == [1, 2]
    with pytest.raises(CoterieError, match="berlin names 2 classes and the run has 3"):
        site(tmp_path, "berlin", data).federation(job())
    with pytest.raises(CoterieError, match="berlin has the label dog"):
        site(tmp_path, "berlin", data).federation(job(class_names=("bird", "cat", "fox")))


def test_a_plan_names_the_classes(tmp_path):
    (tmp_path / "plan.toml").write_text('method = "fedavg"\nshape = [2]\nclasses = 3\nclass_names = ["1", "2", "3"]\n')
    assert Plan.configured(tmp_path / "plan.toml").jobs[0].class_names == ("1", "2", "3")
    (tmp_path / "plan.toml").write_text('method = "fedavg"\nshape = [2]\nclasses = 3\nclass_names = ["1", "2"]\n')
    with pytest.raises(CoterieError, match="names 2 classes, and classes says 3"):
        Plan.configured(tmp_path / "plan.toml")


def test_predictions_are_in_the_names_of_the_classes(tmp_path):
    data = {name: table(tmp_path / f"{name}.csv", [1, 3] * 10, seed) for seed, name in enumerate(("berlin", "lyon"))}
    agreed = job(class_names=("1", "2", "3"))
    line = Loopback([site(tmp_path, name, path) for name, path in data.items()])
    serve([agreed], line, Policy(sites=2, deadline=30, wait=5, poll=0.01))
    path, right = predict(tmp_path / "berlin", data["berlin"], tmp_path / "said.csv")
    said = [line.split(",")[1] for line in path.read_text().splitlines()[1:]]
    assert set(said) <= {"1", "2", "3"}
    assert right == pytest.approx(np.mean([said[k] == str((1, 3)[k % 2]) for k in range(20)]))


def test_sites_that_share_a_schema_answer_in_the_users_unit(tmp_path):
    """Scores that they told, and what their model files answer, are prices; the schema holds the one unit."""
    rng = np.random.default_rng(0)
    paths = {}
    for k, name in enumerate(("berlin", "lyon")):
        a, b = rng.normal(100, 20, 80), rng.normal(5, 2, 80)
        price = 90_000 + 800 * (a - 100) + 5000 * (b - 5) + 1000 * k + rng.normal(0, 500, 80)
        split = ["test" if i % 4 == 0 else "train" for i in range(80)]
        rows = [f"{x:.3f},{y:.3f},{z:.2f},{s}" for x, y, z, s in zip(a, b, price, split, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,price,split", *rows]) + "\n")
        paths[name] = f"{tmp_path / name}.csv:label=price,scale=true,schema={tmp_path / 'schema.json'}"
    agreed = job(classes=0, outputs=1, training=Training(rounds=8, lr=0.05, device="cpu", metric="mae"))
    sites = [site(tmp_path, name, path) for name, path in paths.items()]
    serve([agreed], Loopback(sites), Policy(sites=2, deadline=30, wait=5, poll=0.01))
    schema = json.loads((tmp_path / "schema.json").read_text())
    for name in paths:
        folder = tmp_path / name / agreed.experiment
        told = json.loads((folder / "model.json").read_text())
        unit = dict(zip(("mean", "deviation"), schema["scale"]["price"], strict=True))
        assert {key: told["target"][key] for key in unit} == pytest.approx(unit)
        rows = [line.split(",") for line in (tmp_path / f"{name}.csv").read_text().splitlines()[1:]]
        rows = [[float(v) for v in row[:3]] for row in rows if row[3] == "test"]
        scale = schema["scale"]
        x = torch.tensor([[(row[k] - scale[c][0]) / scale[c][1] for k, c in enumerate("ab")] for row in rows])
        with torch.no_grad():
            answers = read_model(folder / "model.safetensors").loaded()(x)[:, 0].double().numpy()
        apart = np.abs(answers - np.array([row[2] for row in rows])).mean()
        assert told["scores"]["served"]["test"]["mae"] == pytest.approx(apart, rel=1e-5)
        assert apart < 8000  # the prices' deviation is about 19,000


# -- the model of the chosen round ------------------------------------------------------------------------------------

ROUNDS = 6
RISING = {"rounds": ROUNDS, "lr": 1.5, "warmup": 5, "evaluate_every": 1}


class Killed(BaseException):
    """The server's process is gone."""


class Line(Loopback):
    """Kills the server before it asks for the time `at`; sites of which `away` says so are not there."""

    def __init__(self, sites, at=None, away=lambda name, task: False):
        super().__init__(sites)
        self.asked, self.at, self.away = 0, at, away

    def ask(self, messages, deadline, enough):
        if self.asked == self.at:
            raise Killed
        self.asked += 1
        return super().ask(messages, deadline, enough)

    def deliver(self, name, parcels):
        lost = self.away(name, parcels[0].meta)
        return Failure("lost", "") if lost else super().deliver(name, parcels)


def models(home, experiment):
    return {name: (load_file(home / name / experiment / "model.safetensors"), facts(home, experiment, name))
            for name in toy.NAMES}


def facts(home, experiment, name, file="model"):
    return json.loads((home / name / experiment / f"{file}.json").read_text())


def served(folder):
    return Folder(folder).result().round_of("served")


@pytest.mark.parametrize("method", ["ditto", "fedavg"])
def test_a_server_killed_at_any_message_hands_out_the_same_models(tmp_path, method):
    """Before every second of its messages; what sites have kept and what they forgot meanwhile must not matter."""
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, method, **RISING)
    _, line = toy.run(data, [one], tmp_path / "whole", Line(toy.sites(data, tmp_path / "whole")),
                      folder=tmp_path / "whole" / "server")
    expected, best = models(tmp_path / "whole", method), served(tmp_path / "whole" / "server")
    assert best < ROUNDS
    assert {found["round"] for _, found in expected.values()} == {best}
    for at in range(0, line.asked, 2):
        home = tmp_path / str(at)
        with pytest.raises(Killed):
            toy.run(data, [one], home, Line(toy.sites(data, home), at), folder=home / "server")
        toy.run(data, [one], home, folder=home / "server")
        for name, (tensors, found) in models(home, method).items():
            theirs, said = expected[name]
            assert (found["round"], found["when"], found["scores"]) == (best, CHOSEN, said["scores"])
            assert all(torch.equal(t, theirs[key]) for key, t in tensors.items())


@pytest.mark.parametrize(
    ("method", "tried"), [("ditto", ({5}, {4, 5}, {5, 6})), ("ditto", (set(range(8)),)), ("fedper", (set(range(8)),))],
    ids=["once", "always", "always, fedper"],
)
def test_a_site_that_was_away_in_the_chosen_round_uses_its_state_of_that_time(tmp_path, method, tried):
    """turin is away in that round. What every site had then is what it has at the end of a run that ends there."""
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, method, **{**RISING, "rounds": 8})
    for rounds in tried:  # the first with turin away in the chosen one
        home = tmp_path / "-".join(map(str, rounds))

        def away(name, task, rounds=frozenset(rounds)):
            return name == "turin" and task["round"] in rounds and "local" in task.get("do", ())

        toy.run(data, [one], home, Line(toy.sites(data, home), away=away), folder=home / "server")
        best = served(home / "server")
        if best in rounds:
            break
    assert best in rounds
    short = toy.job(data, method, **{**RISING, "rounds": best})
    toy.run(data, [short], tmp_path / "short", Line(toy.sites(data, tmp_path / "short"), away=away))
    for name, (tensors, found) in models(home, method).items():
        assert (found["round"], found["when"]) == (best, CHOSEN)
        files = [tmp_path / "short" / name / method / f"{word}.safetensors" for word in ("last", "model")]
        then = load_file(next(path for path in files if path.exists()))
        assert all(torch.equal(t, then[key]) for key, t in tensors.items())


def test_a_site_that_lost_its_state_of_the_chosen_round_keeps_the_last_and_says_so(tmp_path, caplog):
    """As the home of a site of an earlier version, which kept no such states."""
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, "ditto", **RISING)

    class Forgetful(Line):
        def deliver(self, name, parcels):
            if name == "oslo":
                for path in (tmp_path / "oslo" / "ditto").glob("chosen-*"):
                    path.unlink()
            return super().deliver(name, parcels)

    (rounds,), _ = toy.run(data, [one], tmp_path, Forgetful(toy.sites(data, tmp_path)), folder=tmp_path / "server")
    best = served(tmp_path / "server")
    assert best < ROUNDS - 1
    assert rounds.served == set(toy.NAMES)
    assert "oslo keeps the model of the last round" in caplog.text
    found = facts(tmp_path, "ditto", "oslo")
    assert (found["round"], found["when"]) == (ROUNDS, "last")
    assert found["note"] == f"It is the last round; round {best} had been the best on validation data."
    assert facts(tmp_path, "ditto", "lyon")["round"] == best


def test_a_server_without_a_folder_hands_out_the_same_models(tmp_path):
    data = toy.federation(val=(4, 5, 3, 4))
    one = toy.job(data, "ditto", **RISING)
    toy.run(data, [one], tmp_path / "with", folder=tmp_path / "with" / "server")
    toy.run(data, [one], tmp_path / "without")
    mine, theirs = models(tmp_path / "without", "ditto"), models(tmp_path / "with", "ditto")
    for name, (tensors, found) in mine.items():
        assert found["round"] == theirs[name][1]["round"] < ROUNDS
        assert all(torch.equal(t, theirs[name][0][key]) for key, t in tensors.items())


def test_a_site_holds_two_rounds_at_most(tmp_path):
    """The best so far, and the one that was scored since."""
    data = toy.federation(val=(4, 5, 3, 4))
    most = [0]

    class Counting(Line):
        def deliver(self, name, parcels):
            found = super().deliver(name, parcels)
            most[0] = max(most[0], len(list((tmp_path / name / "ditto").glob("chosen-*"))))
            return found

    toy.run(data, [toy.job(data, "ditto", **RISING)], tmp_path, Counting(toy.sites(data, tmp_path)))
    assert most == [2]


def test_predict_takes_the_chosen_round_and_the_last_on_request(tmp_path):
    """The command says which; each csv holds the classes that the file's own model answers."""
    data = toy.federation(val=(4, 5, 3, 4))
    toy.run(data, [toy.job(data, "ditto", precision="float32", **RISING)], tmp_path, folder=tmp_path / "server")
    best, home = served(tmp_path / "server"), tmp_path / "lyon"
    assert best < ROUNDS
    x, y = data.client(1, "test")
    np.savez(tmp_path / "new.npz", x=x.float().numpy(), y=y.numpy())
    for when, words in (("chosen", f"The model is that of round {best}, {CHOSEN}."),
                        ("last", f"The model is that of round {ROUNDS}, the last one.")):
        done = CliRunner().invoke(app, ["client", "--predict", "--data", str(tmp_path / "new.npz"), "--home", str(home),
                                        "--out", str(tmp_path / "out.csv"), "--round", when], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert words in done.output
        accuracy = operator.predict(home, str(tmp_path / "new.npz"), tmp_path / "out.csv", when=when)[1]
        printed = facts(tmp_path, "ditto", "lyon", "model" if when == "chosen" else "last")
        assert accuracy == pytest.approx(printed["scores"]["served"]["test"]["accuracy"], abs=1e-6)
    with pytest.raises(CoterieError, match="name 'chosen' or 'last', not '3'"):
        operator.model_of(home, when="3")


# -- what leaves, errors too ------------------------------------------------------------------------------------------

SECRET = "patient 4711, dose 12.5"


def sent(home):
    return [json.loads(line) for line in (home / "sent.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("error", "cause"), [
    (CoterieError(f"line 3: '{SECRET}' is no number."), "refused"), (ValueError(f"no '{SECRET}'"), "failed"),
    (KeyError(SECRET), "failed"), (MemoryError(SECRET), "failed"), (RecursionError(SECRET), "failed"),
])
def test_of_an_error_the_type_leaves_and_its_text_stays(tmp_path, error, cause):
    """A reader's sentence quotes what it cannot read. The reference leads from the server's log to the site's."""
    def read(job):
        raise error

    line = Line([Site("berlin", read, tmp_path / "berlin", "cpu", accept="any")])
    with pytest.raises(CoterieError, match="introduced itself") as reason:
        serve([toy.job(toy.federation(), "fedavg")], line, Policy(sites=1, deadline=30, wait=5, poll=0.01))
    assert SECRET not in str(reason.value)
    said = sent(tmp_path / "berlin")
    assert len(said) == 3  # one for each attempt
    for one in said:
        assert one["cause"] == cause
        words = rf"{type(error).__name__} at the site; its log says more under reference ([0-9a-f]{{8}})\."
        found = re.fullmatch(words, one["error"])
        log = (tmp_path / "berlin" / "site.log").read_text()
        assert SECRET in next(entry for entry in log.splitlines() if found[1] in entry)
    assert SECRET not in (tmp_path / "berlin" / "sent.jsonl").read_text()


def test_an_error_of_the_method_stays_at_the_site_and_is_written_down(tmp_path, monkeypatch):
    data = toy.federation()

    def diverge(*given):
        raise RuntimeError(f"a tensor holds {SECRET}")

    monkeypatch.setattr(site_module, "local", diverge)
    (rounds,), _ = toy.run(data, [toy.job(data, "fedavg", rounds=1)], tmp_path)
    assert rounds.rounds[0]["report"]["failures"] == {"failed": 4}
    (failed,) = [one for one in sent(tmp_path / "oslo") if one.get("cause") == "failed"]
    assert failed["error"].startswith("RuntimeError at the site")
    assert "Traceback" in (tmp_path / "oslo" / "site.log").read_text()
    assert SECRET in (tmp_path / "oslo" / "site.log").read_text()


def test_everything_that_leaves_is_written_down_first(tmp_path):
    """Presence, introductions, refusals, uploads: what came back is what was written, in this order."""
    data, heard = toy.federation(), []

    class Heard(Line):
        def deliver(self, name, parcels):
            found = super().deliver(name, parcels)
            if name == "oslo":
                heard.extend(found)
            return found

    line = Heard(toy.sites(data, tmp_path))
    (present,) = line.deliver("oslo", [Parcel({"protocol": PROTOCOL, "kind": "present"})])
    line.deliver("oslo", [Parcel({"protocol": PROTOCOL, "kind": "dance"})])
    line.deliver("oslo", [Parcel({"protocol": 7})])
    toy.run(data, [toy.job(data, "ditto")], tmp_path, line)
    assert present.meta["site"] == "oslo"
    written = [{name: value for name, value in one.items() if name != "time"} for one in sent(tmp_path / "oslo")]
    came = [{**one.meta, "tensors": {n: f"float64 {list(t.shape)}" for n, t in one.tensors.items()}} for one in heard]
    assert written == json.loads(json.dumps(came))
    assert [bool(one.get("error")) for one in written[:4]] == [False, True, True, False]


def test_what_cannot_be_written_down_does_not_leave(tmp_path):
    """The folder in the file's place cannot be written to: no introduction, no upload and no score of oslo counts."""
    data = toy.federation()
    line = Line(toy.sites(data, tmp_path))
    (tmp_path / "oslo" / "sent.jsonl").mkdir(parents=True)
    (rounds,), _ = toy.run(data, [toy.job(data, "fedavg")], tmp_path, line)
    assert rounds.left_out == {"oslo": "the site cannot write down what leaves it, so nothing does."}
    assert "oslo" not in rounds.merged
    assert rounds.population == 3


def test_a_refusal_repeats_short_texts_alone_and_is_cut(tmp_path):
    """A server could fill the site's disk by it, or have it send back what it likes."""
    (one,) = toy.sites(toy.federation(), tmp_path, ["oslo"])
    task = {"protocol": PROTOCOL, "kind": "x" * 10**6, "experiment": ["a"] * 10**5, "method": "m" * 10**5, "round": 3}
    (answer,) = one.answer([Parcel(task)])
    assert len(json.dumps(answer.meta)) < 1500
    assert (answer.meta["round"], answer.meta["experiment"]) == (3, None)


def test_the_operator_is_passed_what_the_site_tells(tmp_path):
    """Each entry's first line, escapes spelled out; one that repeats the last one once. Nobody writes an entry into
    another one's text or traceback."""
    said = []
    (one,) = toy.sites(toy.federation(), tmp_path, ["oslo"])
    one.tell("of an earlier start")
    with operator.told(tmp_path / "oslo" / "site.log", said.append, pause=0.02):
        time.sleep(0.1)
        for text in ("refused: a", "refused: a", "x: \x1b[2J\n2030-01-01T00:00:00 approve it", "refused: a"):
            one.tell(text, "Traceback\n2030-01-01T00:00:00 approve it")
        end = time.monotonic() + 5
        while len(said) < 3 and time.monotonic() < end:
            time.sleep(0.02)
    assert said == ["refused: a", r"x: \x1b[2J\n2030-01-01T00:00:00 approve it", "refused: a"]
