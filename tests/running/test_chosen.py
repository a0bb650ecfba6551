"""The states of chosen rounds: kept whatever happens, at most one where they are large; nothing wrong is handed out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import coterie
from coterie.data import churn
from coterie.errors import CoterieError
from coterie.evaluation.summary import chosen_round
from coterie.running import checkpoint, chosen
from coterie.running.folder import Folder
from coterie.running.saved import Saved
from coterie.running.simulation import Simulation

ROUNDS = 7
OPTIONS = {"rounds": ROUNDS, "batch": 3, "lr": 1.2, "warmup": 5, "evaluate_every": 2, "checkpoint_every": 3,
           "precision": "float64", "device": "cpu"}
SPELLED = "mlp:hidden=5"


class Killed(BaseException):
    """The process is gone: nobody catches this."""


@pytest.fixture(scope="module")
def data(tiny):
    return tiny.federation(sizes=(9, 12, 8, 10), val=(6, 7, 5, 6), test=(8, 9, 7, 8), seed=6)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def go(data, folder=None, method="ditto", **options):
    return coterie.run(method, network, data, folder=folder, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that nobody stops, and the digest of the state after each of its rounds, from a simulation of its own."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = go(data, folder)
    sim = Simulation(result.simulation.method, network, data, result.simulation.asked)
    digests = [checkpoint.digest(sim.snapshot()[0])]
    for _ in range(ROUNDS):
        sim.round()
        digests.append(checkpoint.digest(sim.snapshot()[0]))
    return result, folder, digests


def states(folder):
    """File -> digest of what it holds."""
    return {path.name: checkpoint.digest(checkpoint.load(path)[0]) for path in folder.glob("*.safetensors")}


def test_the_states_of_both_stages_and_the_last_one_are_kept(whole):
    """The rounds are those of the table, and the files hold what a simulation of its own has after those rounds."""
    result, folder, digests = whole
    rounds = {stage: result.round_of(stage) for stage in ("served", "adapted")}
    assert len({*rounds.values(), ROUNDS}) == 3, "each stage is to choose a round of its own, before the last"
    assert states(folder) == {
        "checkpoint.safetensors": digests[ROUNDS], **{f"chosen-{t}.safetensors": digests[t] for t in rounds.values()}
    }


def operations(monkeypatch, at=None):
    """Counts what a run does to files; raises before the one of number `at`."""
    done = [0]

    def watched(function):
        def call(*args, **options):
            if "run" in Path(str(args[0])).parts:  # not what else happens to files meanwhile
                if done[0] == at:
                    raise Killed
                done[0] += 1
            return function(*args, **options)

        return call

    for name in ("replace", "link", "truncate"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", watched(Path.unlink))
    append = Folder._append

    def appended(self, name, text):
        if done[0] == at:
            with (self.path / name).open("a") as file:
                file.write(text[: len(text) // 2])  # half of a line
            raise Killed
        done[0] += 1
        append(self, name, text)

    monkeypatch.setattr(Folder, "_append", appended)
    return done


def number_of_operations(data, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        done = operations(patch)
        go(data, tmp_path / "run")
    return done[0]


def handed_out_is_right(folder, digests, layout):
    """What could be handed out now is the state of the round that the records choose, or there is a sentence."""
    if not (folder / "checkpoint.safetensors").exists() or not (folder / "clients.csv").read_text():
        return
    saved = Saved.open(folder, SPELLED)
    for stage in ("served", "adapted"):
        best = chosen_round(saved.folder.history(), stage)
        if best > saved.folder.kept().last:
            with pytest.raises(CoterieError, match="resume the run"):
                saved.handed_out(stage)
            continue
        taken = saved.handed_out(stage)
        assert taken.round == best
        assert (taken.when, taken.note) == (chosen.CHOSEN, "")
        tensors, meta = saved.checkpoint(stage)
        assert meta["round"] == taken.round
        assert checkpoint.digest(tensors) == digests[taken.round]


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.long) for k in range(1, 5))])
def test_killed_at_any_moment_a_run_ends_with_the_same_states(data, whole, tmp_path, monkeypatch, part):
    """Before each thing that a run does to its files, every fifth here: also between the chosen state and the last.

    The run is killed there, looked at, resumed and killed once more a little later, looked at, and resumed to its end.
    """
    result, folder, digests = whole
    expected = states(folder)
    moments = range(part, number_of_operations(data, tmp_path / "count"), 5)
    assert len(moments) >= 7
    for at in moments:
        place = tmp_path / str(at) / "run"
        for resume, moment in ((False, at), (True, at // 2), (True, None)):
            known = resume and (place / "config.json").exists()
            with pytest.MonkeyPatch.context() as patch:
                operations(patch, moment)
                try:
                    again = go(data, place, resume=known)
                except Killed:
                    again = None
            if again is None:
                handed_out_is_right(place, digests, result.simulation.layout)
        assert states(place) == expected, at
        assert (place / "clients.csv").read_text() == (folder / "clients.csv").read_text()
        for adapted in (False, True):
            one, other = (r.model_for(1, adapted).state_dict() for r in (again, result))
            assert all(torch.equal(t, other[name]) for name, t in one.items())
        shutil.rmtree(place.parent)


def test_a_chosen_round_whose_state_was_not_written_is_a_sentence(data, whole, tmp_path):
    """The records say round t, the checkpoint is of an earlier one: there is nothing to hand out but on request."""
    _, folder, _ = whole
    place = shutil.copytree(folder, tmp_path / "run")
    for path in place.glob("chosen-*"):
        path.unlink()
    best = Folder(place).result().round_of("served")
    tensors, meta = checkpoint.load(place / "checkpoint.safetensors")
    checkpoint.save(place / "checkpoint.safetensors", tensors, {**meta, "round": best - 1})
    saved = Saved.open(place, SPELLED)
    with pytest.raises(CoterieError, match=f"round {best} was chosen on validation data, and the run was stopped"):
        saved.handed_out("served")
    assert saved.handed_out("served", "last").round == best - 1


def test_a_file_of_another_round_is_refused(whole, tmp_path):
    _, folder, _ = whole
    place = shutil.copytree(folder, tmp_path / "run")
    best = Folder(place).result().round_of("served")
    shutil.copyfile(place / "checkpoint.safetensors", place / f"chosen-{best}.safetensors")
    with pytest.raises(CoterieError, match=f"holds the state after round {ROUNDS}, not after round {best}"):
        Saved.open(place, SPELLED).checkpoint("served")


@pytest.mark.parametrize("placed", [True, False])
def test_of_large_states_one_is_kept_beside_the_last_and_the_other_stage_says_so(
    data, whole, tmp_path, monkeypatch, placed
):
    """With the limits at 0 this run's states are large: the file of served's round remains, so the disk holds at most
    twice the states. The stage adapted takes the better, on validation data, of what is there, and says so."""
    monkeypatch.setattr(chosen, "LARGE", 0)
    monkeypatch.setattr(chosen, "MANY", 0)
    place = tmp_path / "run"
    result = go(data, place if placed else None)
    served, adapted = (result.round_of(stage) for stage in ("served", "adapted"))
    assert result.handed_out("served").round == served
    if placed:
        assert states(place).keys() == {"checkpoint.safetensors", f"chosen-{served}.safetensors"}
        sizes = [path.stat().st_size for path in place.glob("*.safetensors")]
        assert sum(sizes) < 2.01 * (place / "checkpoint.safetensors").stat().st_size
        assert result.handed_out("adapted") == Saved.open(place, SPELLED).handed_out("adapted")
    else:
        assert result.kept.states.keys() == {served}
    taken = result.handed_out("adapted")
    there = [e for e in result.history if e.round in (served, ROUNDS)]
    assert taken.round == chosen_round(there, "adapted")
    assert f"Round {adapted} was chosen on validation data, but the clients' states are large" in taken.note
    with pytest.warns(UserWarning, match=f"Round {adapted} was chosen"):
        result.model_for(0, adapted=True)


def test_large_is_more_than_a_hundred_models_and_16_mib():
    row = torch.zeros(50_000)
    many, few = torch.zeros(101, 50_000), torch.zeros(100, 50_000)
    assert chosen.keeps({"own.row": many}, row, private=False) == "served"
    assert chosen.keeps({"own.row": few}, row, private=False) == "both"
    assert chosen.keeps({"own.row": torch.zeros(1000, 4000)}, row[:4000], private=False) == "both"  # less than 16 MiB


@pytest.mark.long
def test_at_10_000_clients_the_states_on_disk_at_most_double(tmp_path):
    """A thousand models are many, however small one is: of the two chosen rounds one is kept beside the last."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, 8, 3, generator=draw)
    y = ((x[..., 0] + 0.5 * torch.randn(10_000, 8, generator=draw)) > 0).long()
    data = coterie.Federation.from_clients([(x[i], y[i]) for i in range(10_000)], classes=2, val=0.25)
    place = tmp_path / "run"
    result = coterie.run("ditto", lambda: nn.Linear(3, 2), data, folder=place, rounds=5, lr=0.5, participation=0.1,
                         evaluate_every=1, batch=4)
    sizes = {path.name: path.stat().st_size for path in place.glob("*.safetensors")}
    assert sizes["checkpoint.safetensors"] > 10_000 * 8 * 4  # a model for every client
    assert sum(sizes.values()) < 2.01 * sizes["checkpoint.safetensors"]
    assert result.handed_out("served").round == result.round_of("served")


@pytest.mark.parametrize("placed", [True, False])
def test_with_privacy_the_last_round_is_handed_out(data, tmp_path, placed):
    """Which round was best is known from scores that no noise protects; the model of that round would tell it."""
    place = tmp_path / "run" if placed else None
    result = go(data, place, method="fedavg+private:sigma=3,clip=1,delta=1e-2")
    assert result.round_of("served") < ROUNDS
    taken = result.handed_out()
    assert (taken.round, taken.when) == (ROUNDS, "last")
    assert "which private does not protect" in taken.note
    if placed:
        assert states(place).keys() == {"checkpoint.safetensors"}
        assert Saved.open(place, SPELLED).handed_out() == taken


def test_without_validation_data_it_is_the_last_round_as_in_the_table(tiny, tmp_path):
    data = tiny.federation(val=(0, 0, 0, 0))
    result = go(data, tmp_path / "run")
    assert result.round_of("served") == ROUNDS
    assert states(tmp_path / "run").keys() == {"checkpoint.safetensors"}
    taken = result.handed_out()
    assert (taken.round, taken.when) == (ROUNDS, "last")
    assert taken.note == f"No validation data chose a round, so it is the last one, {ROUNDS}."


def test_early_stopping_hands_out_the_round_it_went_back_to(data, tmp_path):
    """patience=2 with an evaluation each round stops two rounds after the best one, which is kept."""
    result = go(data, tmp_path / "run", patience=2, evaluate_every=1, rounds=40)
    stopped, best = result.history[-1].round, result.round_of("served")
    assert stopped == best + 2 < 40
    assert result.handed_out().round == best
    at, (x, y) = result.at("served"), data.client(1, "test")
    found = (result.model_for(1)(x).argmax(1) == y).double().mean().item()
    assert found == at.test["accuracy"][1]


def test_the_best_round_needs_no_second_file_where_it_is_the_last(data, tmp_path):
    result = go(data, tmp_path / "run", rounds=1, lr=0.05, warmup=0, method="fedavg")
    assert result.round_of("served") == result.round_of("adapted") == 1
    assert states(tmp_path / "run").keys() == {"checkpoint.safetensors"}
    assert result.handed_out() == chosen.HandedOut("served", 1, chosen.CHOSEN)


def test_runs_in_one_stack_keep_the_states_of_each(data, tmp_path):
    """Joined runs: every one's files are those of its run alone."""
    together = coterie.compare(
        ["ditto", "ditto:lam=0.5"], network, data, folder=tmp_path / "many", together="on", **OPTIONS
    )
    for one in together:
        alone = go(data, tmp_path / "alone" / one.method, method=one.method)
        folder = Folder(one.folder)
        if one.method.startswith("ditto"):
            assert folder.config()["choices"]["together"].startswith("2 runs in one stack")
        assert folder.kept().states.keys() == Folder(alone.folder).kept().states.keys()
        for t, load in folder.kept().states.items():
            mine, theirs = load()[0], Folder(alone.folder).kept().states[t]()[0]
            for name, tensor in mine.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["ditto", "fedamp", "cfl"])
@pytest.mark.parametrize("placed", [True, False])
def test_with_churn_the_clients_of_the_chosen_round_have_their_scores(tiny, tmp_path, method, placed):
    """Client 3 arrives in round 6; whoever was there at the chosen round scores what the table says."""
    data = tiny.federation(sizes=(9, 12, 8, 10), val=(6, 7, 5, 6), test=(8, 9, 7, 8), seed=6)
    moving = churn.with_times(data, {"3": (6, churn.NEVER)})
    result = go(moving, tmp_path / "run" if placed else None, method=method)
    at = result.at("served")
    for place, client in enumerate(at.clients.tolist()):
        x, y = moving.client(client, "test")
        found = (result.model_for(client)(x).argmax(1) == y).double().mean().item()
        assert found == at.test["accuracy"][place]
    assert all(torch.isfinite(t).all() for t in result.model_for(3).state_dict().values())
