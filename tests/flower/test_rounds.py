"""What happens across sites when things go wrong, and what leaves a site."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import sites as toy
import torch

from coterie import streams
from coterie.errors import CoterieError
from coterie.flower import wire
from coterie.flower.checks import Inspector, Limits, Received, ask_to_lift
from coterie.flower.job import Job
from coterie.flower.loopback import Loopback, through
from coterie.flower.policy import Policy
from coterie.flower.rounds import refuse_early
from coterie.flower.site import Site, site_at
from coterie.flower.task import Refusal
from coterie.flower.wire import Failure, Parcel
from coterie.privacy.noise import Streams
from coterie.running import checkpoint
from coterie.running.simulation import Simulation
from coterie.streams import chance


class Line(Loopback):
    """Keeps every message and answer, and lets `spoil(name, task, answer)` change what comes back."""

    def __init__(self, sites, spoil=None):
        super().__init__(sites)
        self.spoil, self.log = spoil, []

    def deliver(self, name, parcels):
        answer = super().deliver(name, parcels)
        self.log.append((name, parcels, answer))
        changed = self.spoil(name, parcels[0], answer) if self.spoil is not None else None
        return answer if changed is None else changed


def trained(data, home, spoil, method="ditto", policy=toy.POLICY, check=None, **training):
    line = Line(toy.sites(data, home), spoil)
    one = toy.job(data, method, **training)
    (rounds,), _ = toy.run(data, [one], home, line, policy=policy, check=check)
    return rounds, line, one


def in_round(task, t):
    return task.meta["round"] == t and "local" in task.meta.get("do", ())


# -- what leaves a site -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "uploads", "introduction"), [
    ("fedavg", {"update"}, set()), ("fedper", {"update"}, set()), ("ditto", {"update"}, set()),
    ("fednh", {"update", "means", "counts"}, set()),  # the counts are the histogram, which its equation needs
    ("cwfedavg", {"update"}, {"mix"}),
])
def test_n_and_what_the_method_uploads_is_all_that_leaves(tmp_path, method, uploads, introduction):
    data = toy.federation()
    line = Line(toy.sites(data, tmp_path))
    one = replace(toy.job(data, method), scores=False)
    toy.run(data, [one], tmp_path, line)
    sizes = dict(zip(data.names, toy.SIZES, strict=True))
    for name, (task,), (answer,) in line.log:
        trains = "local" in task.meta.get("do", ())
        expected = introduction if task.meta["kind"] == "introduce" else uploads if trains else set()
        assert set(answer.tensors) == expected
        counts = trains or task.meta["kind"] == "introduce"
        assert set(answer.meta) == {*wire.ECHOED, "site"} | ({"n"} if counts else set())
        if counts:
            assert answer.meta["n"] == sizes[name]


def test_what_is_personal_is_in_no_upload(tmp_path):
    """FedPer's head stays: an upload has as many columns as the rest of the model, 4 * 5 + 5 of 43 with 5 hidden."""
    data = toy.federation()
    rounds, line, _ = trained(data, tmp_path, None, "fedper")
    assert rounds.server.layout.size == 43
    sent = [a.tensors["update"] for _, _, (a,) in line.log if "update" in a.tensors]
    assert len(sent) == 12
    assert {tuple(t.shape) for t in sent} == {(1, 25)}


def test_a_site_refuses_to_tell_scores_that_were_not_agreed_on(tmp_path):
    data = toy.federation()
    line = Line(toy.sites(data, tmp_path))
    toy.run(data, [replace(toy.job(data, "fedavg"), scores=False)], tmp_path, line)
    name, (task,), _ = line.log[-1]
    (answer,) = line.by_name[name].answer(through([Parcel({**task.meta, "do": ["score"]}, task.tensors)]))
    assert "without scores" in answer.meta["error"]


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_task_that_arrives_twice_is_answered_twice_alike(tmp_path):
    """Training starts from the state before the round, whatever the first answer did to the state after it."""
    data, again = toy.federation(), []

    def twice(name, task, answer):
        if in_round(task, 1):
            path = tmp_path / name / "ditto" / "state.safetensors"
            before = path.read_bytes()
            again.append((answer, through(line_of[0].by_name[name].answer([task])), before == path.read_bytes()))

    line = Line(toy.sites(data, tmp_path), twice)
    line_of = [line]
    toy.run(data, [toy.job(data, "ditto")], tmp_path, line)
    assert len(again) == 4
    for (first,), (second,), same_file in again:
        assert first.meta == second.meta
        assert all(torch.equal(first.tensors[k], second.tensors[k]) for k in first.tensors)
        assert same_file


FAULTS = {
    "raises": (lambda a: [Parcel({**a[0].meta, "error": "RuntimeError: no", "cause": "failed"})], "failed"),
    "hangs": (lambda a: Failure("late", "no answer."), "late"),
    "old round": (lambda a: [Parcel({**a[0].meta, "round": 0}, a[0].tensors)], "late"),
    "wrong layout": (lambda a: [Parcel({**a[0].meta, "layout": "0" * 16}, a[0].tensors)], "mismatch"),
    "other protocol": (lambda a: [Parcel({**a[0].meta, "protocol": 0}, a[0].tensors)], "mismatch"),
    "another's name": (lambda a: [Parcel({**a[0].meta, "site": "oslo"}, a[0].tensors)], "mismatch"),
    "two answers": (lambda a: [a[0], a[0]], "mismatch"),
    "wrong shape": (lambda a: [Parcel(a[0].meta, {k: t[..., :-1] for k, t in a[0].tensors.items()})], "rejected"),
    "wrong type": (lambda a: [Parcel(a[0].meta, {k: t.float() for k, t in a[0].tensors.items()})], "rejected"),
    "not a number": (lambda a: [Parcel(a[0].meta, {k: t * torch.nan for k, t in a[0].tensors.items()})], "rejected"),
    "far too long": (lambda a: [Parcel(a[0].meta, {k: t * 1000 for k, t in a[0].tensors.items()})], "unusual"),
    "no samples": (lambda a: [Parcel({**a[0].meta, "n": 0}, a[0].tensors)], "rejected"),
    "samples as text": (lambda a: [Parcel({**a[0].meta, "n": "7"}, a[0].tensors)], "rejected"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_answer_is_counted_by_cause_and_the_round_goes_on(tmp_path, fault):
    """lyon is faulty in round 1. All that follows is as if it had not taken part: the others' mean is the new model."""
    spoil, cause = FAULTS[fault]
    data = toy.federation()
    rounds, _, _ = trained(
        data, tmp_path / "faulty", lambda n, t, a: spoil(a) if n == "lyon" and in_round(t, 1) else None,
        check=Inspector(),
    )
    expected, _, _ = trained(
        data, tmp_path / "absent", lambda n, t, a: Failure("lost", "") if n == "lyon" and in_round(t, 1) else None
    )
    assert [r["participants"] for r in rounds.rounds] == [4, 3, 4]
    assert rounds.rounds[1]["report"]["failures"] == {cause: 1}
    assert torch.equal(rounds.server.state.row, expected.server.state.row)


def test_the_runs_check_sees_uploads_before_they_are_merged(tmp_path):
    """The place where bad uploads are kept out: whoever it names is left out, and whoever it bars is not asked."""

    class Check:
        seen: list[Received] = []  # noqa: RUF012

        def __call__(self, received):
            self.seen.append(received)
            far = Failure("rejected", "too far away.", "update")
            return {"turin": far} if received.round == 0 and received.kind == "round" else {}

        def barred(self):
            return ["turin"] if len(self.seen) > 1 else []

    data, check = toy.federation(), Check()
    rounds, line, _ = trained(data, tmp_path, None, check=check)
    assert [r["participants"] for r in rounds.rounds] == [3, 3, 3]
    assert [r["report"]["failures"] for r in rounds.rounds] == [{"rejected": 1}, {"barred": 1}, {"barred": 1}]
    assert [(one.kind, one.round) for one in check.seen] == [("introduce", 0), ("round", 0), ("round", 1), ("round", 2)]
    assert check.seen[1].n == dict(zip(data.names, toy.SIZES, strict=True))
    assert not [name for name, (task,), _ in line.log if name == "turin" and task.meta["round"] > 0]


def test_a_site_that_keeps_failing_is_quarantined_until_it_is_lifted(tmp_path):
    """Three rejected uploads in a row, of different kinds, bar lyon; one that is unlike the others' changes nothing."""
    kinds = {0: "not a number", 1: "far too long", 2: "wrong layout", 3: "no samples"}

    def spoil(name, task, answer):
        if name == "oslo" and in_round(task, 5):
            ask_to_lift(tmp_path, "lyon")  # the operator, while round 5 is on
        if name == "lyon" and "local" in task.meta.get("do", ()) and task.meta["round"] in kinds:
            return FAULTS[kinds[task.meta["round"]]][0](answer)
        return None

    inspector = Inspector(Limits(strikes=3), tmp_path)
    rounds, _, _ = trained(toy.federation(), tmp_path, spoil, check=inspector, rounds=8)
    assert [r["report"].get("failures", {}) for r in rounds.rounds] == [
        {"rejected": 1}, {"unusual": 1}, {"mismatch": 1}, {"rejected": 1}, {"barred": 1}, {"barred": 1}, {}, {}
    ]
    assert inspector.quarantine.state() == {"limit": 3, "strikes": {}, "held": {}}


@pytest.mark.parametrize("method", ["fedfew:models=2", "ditto", "scaffold", "fedavg+median"])
def test_random_drop_outs_are_those_of_the_simulation(tmp_path, method):
    """Ten rounds in which 30 % of the answers are lost: the clients that the stacked engine drops are dropped here."""
    data = toy.federation()
    one = toy.job(data, method, rounds=10)
    names = streams.integers("client", data.names)
    drops = [chance(one.training.seed, names, t, "dropout") < 0.3 for t in range(10)]
    assert 5 < sum(map(sum, drops)) < 20  # of 40 answers; expected are 12

    def lose(name, task, answer):
        t = task.meta["round"]
        lost = "local" in task.meta.get("do", ()) and drops[t][data.names.index(name)]
        return Failure("lost", "") if lost else None

    (rounds,), _ = toy.run(data, [one], tmp_path, Line(toy.sites(data, tmp_path), lose))
    sim = Simulation(one.chosen(), one.factory(), data, replace(one.training, dropouts=0.3), one.head)
    for _ in range(10):
        sim.round()
    assert [r["participants"] for r in rounds.rounds] == [4 - int(sum(d)) for d in drops]
    for name, t in sim.server.state.tensors().items():
        torch.testing.assert_close(rounds.server.state.tensors()[name], t, rtol=1e-9, atol=1e-9)


# -- privacy ----------------------------------------------------------------------------------------------------------

PRIVATE = "fedavg+private:sigma=0.5,clip=0.1"
GOOD = "6f1d2b8c94e07a35b1c8f02d7e6a49530c9d1b7f8a2e4c6d"


def private_job(data, method=PRIVATE, scores=False, **training):
    given = {"sampling": "poisson", "participation": 0.5, "rounds": 6, **training}
    return replace(toy.job(data, method, experiment="private", **given), scores=scores)


def test_privacy_is_that_of_the_simulation(tmp_path, monkeypatch):
    """Both engines draw the same participants and the same noise from the run's streams; rounds without anybody have
    noise as well. The sites tell nothing but updates.

    Noise follows the sum that it is added to, too, whose last bits are the engine's own; here that is left out. The
    chance that all six rounds have somebody is (1 - 0.8^4)^6 = 0.04, so the nonce is a given one.
    """
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    monkeypatch.setattr("secrets.token_hex", lambda count: "07" * count)
    normal = Streams.normal
    monkeypatch.setattr(Streams, "normal", lambda self, t, purpose, count, about: normal(self, t, purpose, count))
    data = toy.federation()
    one = private_job(data, seed=4, participation=0.2)
    line = Line(toy.sites(data, tmp_path))
    (rounds,), _ = toy.run(data, [one], tmp_path, line, folder=tmp_path / "server")
    sim = toy.stacked(data, one, 0)
    sim.server.guard.streams = rounds.server.guard.streams
    assert sim.server.guard.streams.experiment == one.experiment
    for _ in range(one.training.rounds):
        sim.round()
    assert 0 == min(r["participants"] for r in rounds.rounds) < max(r["participants"] for r in rounds.rounds)
    torch.testing.assert_close(rounds.server.state.row, sim.server.state.row, rtol=1e-9, atol=1e-9)
    assert rounds.rounds[-1]["report"]["epsilon"] == pytest.approx(sim.server.guard.spent(6), abs=1e-6)
    assert all("skipped" not in r["report"] for r in rounds.rounds)
    for _, _, (answer,) in line.log:
        assert set(answer.meta) == {*wire.ECHOED, "site"}
        assert set(answer.tensors) <= {"update"}


def test_an_adaptive_clip_survives_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    data = toy.federation()
    one = private_job(data, "fedavg+private:sigma=0.5,clip=0.1,quantile=0.5,count_sigma=1")
    monkeypatch.setattr("secrets.token_hex", lambda count: "07" * count)  # else the two runs' noise would differ
    whole = toy.run(data, [one], tmp_path / "whole", folder=tmp_path / "whole" / "server")[0][0]
    place = tmp_path / "cut"

    def stop(name, task, answer):
        if task.meta["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.run(data, [one], place, Line(toy.sites(data, place), stop), folder=place / "server")
    again = toy.run(data, [one], place, folder=place / "server")[0][0]
    assert again.server.guard.clip == whole.server.guard.clip != 0.1
    assert torch.equal(again.server.state.row, whole.server.state.row)


@pytest.mark.parametrize(("method", "given", "sentence"), [
    (PRIVATE, {"scores": True}, "does not protect the sites' scores"),
    (PRIVATE, {"sampling": "fixed"}, "set sampling=poisson"),
    ("ifca:models=2+private", {}, "which private does not protect"),
    ("pacfl+private", {}, "introduce themselves"),
])
def test_a_run_that_would_not_be_private_is_refused_at_once(tmp_path, monkeypatch, method, given, sentence):
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    data = toy.federation()
    line = Line(toy.sites(data, tmp_path))
    with pytest.raises(CoterieError, match=sentence):
        toy.run(data, [private_job(data, method, **given)], tmp_path, line)
    assert line.log == []


def test_privacy_needs_a_secret(tmp_path, monkeypatch):
    """The seed travels with the job, so that sites could compute noise made of the seed alone."""
    monkeypatch.delenv("COTERIE_SECRET", raising=False)
    data = toy.federation()
    with pytest.raises(CoterieError, match=r"set COTERIE_SECRET on the server to a random text: python -c"):
        toy.run(data, [private_job(data)], tmp_path)
    with pytest.raises(CoterieError, match="set COTERIE_SECRET"):
        refuse_early(private_job(data), toy.POLICY)
    for weak in ("", "x", "test"):
        monkeypatch.setenv("COTERIE_SECRET", weak)
        with pytest.raises(CoterieError, match="could be guessed"):
            toy.run(data, [private_job(data)], tmp_path)


def cut(data, one, place, at):
    """A server that is stopped before the answers of a round, and its sites' homes."""

    def stop(name, task, answer):
        if task.meta["round"] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.run(data, [one], place, Line(toy.sites(data, place), stop), folder=place / "server")
    return place


def test_a_server_goes_on_with_its_own_secret_alone(tmp_path, monkeypatch):
    """Refused with the folder as it is; what is finished has no more noise to draw and serves with any secret."""
    data = toy.federation()
    one = private_job(data, participation=1.0)
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    place = cut(data, one, tmp_path, 3)
    before = {path.name: path.read_bytes() for path in (place / "server").iterdir()}
    assert all(GOOD.encode() not in content for content in before.values())
    monkeypatch.setenv("COTERIE_SECRET", GOOD[::-1])
    with pytest.raises(CoterieError, match="is not the secret that the run began with"):
        toy.run(data, [one], place, folder=place / "server")
    assert {path.name: path.read_bytes() for path in (place / "server").iterdir()} == before
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    assert toy.run(data, [one], place, folder=place / "server")[0][0].finished
    monkeypatch.setenv("COTERIE_SECRET", GOOD[::-1])
    assert toy.run(data, [one], place, folder=place / "server")[0][0].served == set(data.names)


def update_of(line, name, t):
    """What a site uploaded in round t."""
    (found,) = [answer.tensors["update"][0] for site, (task,), (answer,) in line.log
                if site == name and task.meta["round"] == t and "local" in task.meta.get("do", ())]
    return found


def test_two_runs_over_sites_with_one_secret_do_not_give_one_away(tmp_path, monkeypatch):
    """One round with oslo and one without. With shared noise the difference was oslo's update, cosine 1.

    With noise 20 times the clip and D = 43 the cosine is that of a random direction: above 0.9 with probability 1e-16.
    `tests/privacy/test_noise.py` measures it closely.
    """
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    data = toy.federation()
    one = private_job(data, "fedavg+private:sigma=20,clip=0.01", participation=1.0, rounds=1)
    rows, lines = [], []
    for place, lost in ((tmp_path / "with", ""), (tmp_path / "without", "oslo")):
        def lose(name, task, answer, lost=lost):
            return Failure("lost", "") if name == lost and "local" in task.meta.get("do", ()) else None

        lines.append(Line(toy.sites(data, place), lose))
        (rounds,), _ = toy.run(data, [one], place, lines[-1])
        rows.append(rounds.server.state.row)
    missing = update_of(lines[0], "oslo", 0)
    assert float(missing.norm()) > 0.01
    assert abs(float(torch.nn.functional.cosine_similarity(4 * (rows[0] - rows[1]), missing, dim=0))) < 0.9


def test_no_task_of_a_private_run_tells_who_else_takes_part(tmp_path, monkeypatch):
    """The epsilon of a sample counts on that. Whether oslo's answers come, or are lost in every round, or turin is away
    after the introductions: what lyon is asked is the same, but for the numbers of the model, which are noisy."""
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    monkeypatch.setattr("secrets.token_hex", lambda count: "07" * count)  # the same are drawn in all three
    data = toy.federation()
    one = private_job(data, "fedavg+private:sigma=1,clip=0.1", participation=0.5, rounds=4)
    asked = []
    for number, (lost, away) in enumerate((("", ""), ("oslo", ""), ("", "turin"))):
        def lose(name, task, answer, lost=lost):
            return Failure("lost", "") if name == lost and "local" in task.meta.get("do", ()) else None

        place = tmp_path / str(number)
        line = Line(toy.sites(data, place), lose)
        line.sites = lambda line=line, away=away: set(toy.NAMES) - ({away} if line.messages >= 4 else set())
        toy.run(data, [one], place, line, policy=replace(toy.POLICY, minimum=1))
        asked.append([(task.meta, {name: (t.shape, t.dtype) for name, t in task.tensors.items()})
                      for name, (task,), _ in line.log if name == "lyon"])
    assert any("local" in meta.get("do", ()) for meta, _ in asked[0])
    assert asked[0] == asked[1] == asked[2]


def test_a_server_that_is_restored_from_a_backup_and_meets_other_answers_has_other_noise(tmp_path, monkeypatch):
    """Round 2 is done twice, from copies of one folder: with all sites, and again without oslo. Both models were sent
    out; with the same noise their difference was oslo's update. With the same answers they are the same model."""
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    data = toy.federation()
    one = private_job(data, "fedavg+private:sigma=20,clip=0.01", participation=1.0, rounds=3)
    cut(data, one, tmp_path / "run", 2)
    rows, lines = [], []
    for number, lost in enumerate(("", "", "oslo")):
        place = shutil.copytree(tmp_path / "run", tmp_path / str(number))

        def lose(name, task, answer, lost=lost):
            return Failure("lost", "") if name == lost and "local" in task.meta.get("do", ()) else None

        lines.append(Line(toy.sites(data, place), lose))
        (rounds,), _ = toy.run(data, [one], place, lines[-1], folder=place / "server")
        rows.append(rounds.server.state.row)
    assert torch.equal(rows[0], rows[1])
    missing = update_of(lines[0], "oslo", 2)
    assert float(missing.norm()) > 0.01
    assert abs(float(torch.nn.functional.cosine_similarity(4 * (rows[0] - rows[2]), missing, dim=0))) < 0.9


@pytest.mark.parametrize("hostile", [["oslo"], ["berlin", "oslo", "turin"], list(toy.NAMES)])
def test_fifty_rows_of_one_site_are_no_fifty_clients(tmp_path, monkeypatch, hostile):
    """Whoever sends them is out of the round, with a strike, be they the most or alone; the others' sum is that of a
    round in which they did not answer, and the run goes on."""
    monkeypatch.setenv("COTERIE_SECRET", GOOD)
    monkeypatch.setattr("secrets.token_hex", lambda count: "07" * count)
    data = toy.federation()
    one = private_job(data, "fedavg+private:sigma=0.5,clip=0.1", participation=1.0, rounds=2)

    def many(name, task, answer):
        if name not in hostile or "local" not in task.meta.get("do", ()):
            return None
        return [replace(answer[0], tensors={"update": answer[0].tensors["update"].expand(50, -1)})]

    def silent(name, task, answer):
        return Failure("lost", "") if name in hostile and "local" in task.meta.get("do", ()) else None

    found = []
    for place, spoil in ((tmp_path / "many", many), (tmp_path / "silent", silent)):
        check = Inspector(Limits(strikes=2))
        (rounds,), _ = toy.run(data, [one], place, Line(toy.sites(data, place), spoil), check=check)
        found.append((rounds, check))
    (rounds, check), (expected, _) = found
    assert [r["participants"] for r in rounds.rounds] == [4 - len(hostile)] * 2
    assert rounds.rounds[0]["report"]["failures"] == {"rejected": len(hostile)}
    assert set(check.quarantine.held) == set(hostile)
    assert "update has shape [50, 43], not [1, 43]" in check.quarantine.held["oslo"]
    assert torch.equal(rounds.server.state.row, expected.server.state.row)


# -- patience ---------------------------------------------------------------------------------------------------------


def test_too_few_answers_skip_the_round(tmp_path):
    data = toy.federation()
    rounds, _, _ = trained(
        data, tmp_path, lambda n, t, a: Failure("lost", "") if n != "oslo" and in_round(t, 2) else None,
        policy=replace(toy.POLICY, minimum=2),
    )
    assert rounds.rounds[2]["report"]["skipped"] == "2 answers are needed, 1 came"
    two, _, _ = trained(data, tmp_path / "two", None, rounds=2)
    assert torch.equal(rounds.server.state.row, two.server.state.row)


def test_a_run_that_ends_for_want_of_answers_says_who_was_left_out_and_why(tmp_path):
    """Four answers are needed, and lyon's is unlike the others' in every round: after 20 the operator is told that."""
    said = (r"20 rounds in a row had too few answers \(the last: 4 answers are needed, 3 came\); left out were lyon "
            r"\(update is .* times as long as the median .*; `norm` under \[limits\] allows more\); see the log")
    with pytest.raises(CoterieError, match=said):
        trained(toy.federation(), tmp_path, lambda n, t, a: FAULTS["far too long"][0](a) if n == "lyon" and a[0].tensors
                and "local" in t.meta.get("do", ()) else None,
                rounds=25, check=Inspector(), policy=replace(toy.POLICY, minimum=4))


def test_a_target_ends_the_round_early(tmp_path):
    """The line asks in order of names: after two answers nobody else is waited for."""
    rounds, _, _ = trained(toy.federation(), tmp_path, None, policy=replace(toy.POLICY, target=2))
    assert [r["participants"] for r in rounds.rounds] == [2, 2, 2]
    assert rounds.rounds[0]["report"]["failures"] == {"late": 2}
    assert [rounds.merged[name] for name in toy.NAMES] == [2, 2, -1, -1]


def test_quick_errors_do_not_reach_a_target(tmp_path):
    """berlin is asked first and says that it failed: lyon and oslo are waited for, and no round is skipped."""
    def busy(name, task, answer):
        trains = name == "berlin" and "local" in task.meta.get("do", ())
        return [Parcel({"error": "busy", "cause": "failed"})] if trains else None

    rounds, _, _ = trained(toy.federation(), tmp_path, busy, policy=replace(toy.POLICY, target=2, minimum=2))
    assert [r["participants"] for r in rounds.rounds] == [2, 2, 2]
    assert rounds.rounds[0]["report"]["failures"] == {"failed": 1, "late": 1}


def test_who_is_not_there_is_absent_and_who_is_not_waited_for_is_late(tmp_path, caplog):
    """turin leaves after the admission, so nothing is sent to it: it is absent. oslo is asked and does not answer
    before the target of two is reached: it is late, and not because the deadline of 30 s had passed."""
    data = toy.federation()
    line = Line(toy.sites(data, tmp_path))
    line.sites = lambda: set(toy.NAMES) - ({"turin"} if line.messages >= 4 else set())
    policy = replace(toy.POLICY, target=2)
    with caplog.at_level("WARNING", "coterie.server"):
        (rounds,), _ = toy.run(data, [toy.job(data, "fedavg", rounds=1)], tmp_path, line, policy=policy)
    assert rounds.rounds[0]["report"]["failures"] == {"late": 1, "absent": 1}
    assert caplog.messages[:2] == [
        "fedavg, round 1: oslo: late enough others had answered.",
        "fedavg, round 1: turin: absent the site was not there when the round began; it is asked when it is drawn "
        "again.",
    ]
    trained = [name for name, (task,), _ in line.log if in_round(task, 0)]
    assert trained == ["berlin", "lyon"]


def test_a_barred_site_is_told_apart_from_an_absent_one(tmp_path, caplog):
    class Check:
        def __call__(self, received):
            return {}

        def barred(self):
            return ["lyon"]

    with caplog.at_level("WARNING", "coterie.server"):
        trained(toy.federation(), tmp_path, None, check=Check(), rounds=1)
    said = "the site is quarantined and is not asked until an operator lifts it."
    assert caplog.messages == [f"ditto, round 1: lyon: barred {said}"]


def test_who_does_not_introduce_itself_three_times_is_left_out_if_the_others_are_enough(tmp_path, caplog):
    """oslo's first introduction is lost: everybody is asked again and oslo is in. Where it stays silent, it is left
    out, and the others are asked anew: they are three, and numbers follow from names. Where four answers are needed in
    a round, the run stops instead."""
    data, lost = toy.federation(), []

    def lose(times):
        def spoil(name, task, answer):
            if name == "oslo" and task.meta["kind"] == "introduce" and len(lost) < times:
                lost.append(name)
                return Failure("lost", "")
            return None

        return spoil

    rounds, line, _ = trained(data, tmp_path / "once", lose(1), "fedavg")
    assert rounds.clients == list(toy.NAMES)
    assert sum(task.meta["kind"] == "introduce" for _, (task,), _ in line.log) == 8
    rounds, line, one = trained(data, tmp_path / "always", lose(100), "fedavg")
    assert len(lost) == 1 + 3 + 1  # and at the end, when it may have a model like any newcomer
    assert rounds.clients == ["berlin", "lyon", "turin"]
    assert list(rounds.left_out) == ["oslo"]
    assert "fedavg: oslo is left out" in caplog.text
    few = Line(toy.sites(data, tmp_path / "few", only=("berlin", "lyon", "turin")))
    (three,), _ = toy.run(data, [one], tmp_path / "few", few, policy=replace(toy.POLICY, sites=3))
    assert torch.equal(rounds.server.state.row, three.server.state.row)
    with pytest.raises(CoterieError, match="in 3 attempts not every site that was there introduced itself"):
        trained(data, tmp_path / "all", lose(1000), "fedavg", policy=replace(toy.POLICY, minimum=4))


@pytest.mark.parametrize("when", ["asked", "answered"])
def test_a_server_that_is_killed_goes_on_where_it_was(tmp_path, when):
    """Killed in round 1, when some or all sites have trained; what was not merged is trained again, to the same end."""

    class Killed(Exception):  # noqa: N818
        pass

    data, one = toy.federation(), toy.job(toy.federation(), "ditto", evaluate_every=1)

    def kill(name, task, answer):
        if in_round(task, 1) and name == ("lyon" if when == "asked" else "turin"):
            raise Killed

    with pytest.raises(Killed):
        toy.run(data, [one], tmp_path, Line(toy.sites(data, tmp_path), kill), folder=tmp_path / "server")
    (rounds,), _ = toy.run(data, [one], tmp_path, Loopback(toy.sites(data, tmp_path)), folder=tmp_path / "server")
    (whole,), _ = toy.run(data, [one], tmp_path / "whole")
    assert torch.equal(rounds.server.state.row, whole.server.state.row)
    for name in toy.NAMES:
        mine, theirs = (
            checkpoint.load(root / name / "ditto" / "state.safetensors")[0] for root in (tmp_path, tmp_path / "whole")
        )
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert [r["round"] for r in rounds.rounds] == [0, 1, 2]
    assert [e.round for e in rounds.history] == [0, 1, 2, 3]
    result = rounds.folder.result()  # a run folder like any other
    last = whole.history[-1].stages["served"]
    assert result.at("served", "last").test["accuracy"] == pytest.approx(last.test["accuracy"])
    (ended,), line = toy.run(data, [one], tmp_path, Loopback(toy.sites(data, tmp_path)), folder=tmp_path / "server")
    assert line.messages == 0  # the run is over and everybody has a model
    assert ended.rounds_done == 3


@pytest.mark.parametrize("method", [
    "fedavg:server=adam(lr=0.1)", "fedper:lr=0.02,batch=5,server=sgd(momentum=0.9)", "ifca:models=2,server=yogi",
    "ditto:training.epochs=2",
])
def test_options_of_the_method_alone_and_a_servers_optimizer_are_the_simulations(tmp_path, method):
    """Sites train by the method's own options, and the server's memory survives a restart between two rounds."""
    data, one = toy.federation(), toy.job(toy.federation(), method)
    sim = toy.stacked(data, one)
    (whole,), _ = toy.run(data, [one], tmp_path / "whole")

    class Killed(Exception):  # noqa: N818
        pass

    def kill(name, task, answer):
        if in_round(task, 2):
            raise Killed

    with pytest.raises(Killed):
        toy.run(data, [one], tmp_path, Line(toy.sites(data, tmp_path), kill), folder=tmp_path / "server")
    (again,), _ = toy.run(data, [one], tmp_path, Loopback(toy.sites(data, tmp_path)), folder=tmp_path / "server")
    found, kept, expected = (server.tensors() for server in (whole.server, again.server, sim.server))
    assert found.keys() == kept.keys() == expected.keys()
    assert any(name.startswith("optimizer.") for name in found) == ("server=" in method)
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-9)
        assert torch.equal(found[name], kept[name])
    assert again.folder.config()["training"]["lr"] == 0.1  # the run's; the method's own stand in its spelling


def test_late_and_absent_sites_get_their_models_when_they_come(tmp_path):
    """oslo is lost at the end and zurich comes later still; the finished run is served again and asks only them."""
    names = (*toy.NAMES, "zurich")
    data = toy.federation(names=names, sizes=(*toy.SIZES, 6), val=(*toy.VAL, 2), test=(*toy.TEST, 3), unseen=1)
    one = toy.job(data, "ifca:models=2")
    everybody = toy.sites(data, tmp_path)
    line = Line(everybody[:4], lambda n, t, a: Failure("lost", "") if n == "oslo" and t.meta["round"] == 3 else None)
    toy.run(data, [one], tmp_path, line, folder=tmp_path / "server")
    assert not (tmp_path / "zurich" / "ifca").exists()
    later = Line(everybody)
    (rounds,), _ = toy.run(data, [one], tmp_path, later, folder=tmp_path / "server", linger=0.05)
    asked = [(name, t.meta["kind"], t.meta["number"], bool(t.meta.get("newcomer"))) for name, (t,), _ in later.log]
    again = [("oslo", "round", 2, False)] * 2  # the last round is scored, then the chosen one deployed
    assert asked == [*again, ("zurich", "introduce", 4, False), ("zurich", "round", 4, True)]
    assert rounds.served == set(names)
    facts = json.loads((tmp_path / "zurich" / "ifca" / "model.json").read_text())
    sim = toy.stacked(data, one, facts["round"])
    assert facts["newcomer"]
    expected = sim.evaluate().stages["unseen_served"].test["accuracy"][0]
    assert facts["scores"]["served"]["test"]["accuracy"] == pytest.approx(expected)


def test_a_site_that_is_ahead_of_its_server_says_so(tmp_path):
    """A server resumed from an old copy of its folder knows the site as of a round that it no longer holds."""
    data = toy.federation()
    _, line, _ = trained(data, tmp_path, None)
    name, (task,), _ = next(entry for entry in line.log if in_round(entry[1][0], 0))
    (answer,) = line.by_name[name].answer([task])
    assert answer.meta["cause"] == "refused"
    assert "the server knows this site as of round -1, but the site is at round 2" in answer.meta["error"]


def test_many_experiments_travel_in_one_message(tmp_path):
    data = toy.federation()
    jobs = [toy.job(data, method) for method in ("fedavg", "ditto", "ifca:models=2")]
    many, line = toy.run(data, jobs, tmp_path / "many")
    assert line.messages == 4 * 6  # introductions, three rounds, the last round's scores, the chosen round's models
    for job, rounds in zip(jobs, many, strict=True):
        (alone,), _ = toy.run(data, [job], tmp_path / "alone")
        for name, t in alone.server.state.tensors().items():
            assert torch.equal(t, rounds.server.state.tensors()[name])


# -- sentences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"protocol": 7}, "speaks protocol 7"), ({"layout": "beef"}, "the server holds another model"),
    ({"method": "fedprox"}, "method differs"), ({"options": "FedAvg()"}, "options differs"),
    ({"kind": "dance"}, "no task of kind 'dance'"), ({"do": ["upload"]}, "may ask for join, score, local, deploy"),
    ({"job": {}}, "settings cannot be read"),
    ({"record": "Module"}, "a state 'Module' was named that fedavg does not define"),
])
def test_a_task_that_does_not_fit_is_refused_with_a_sentence(tmp_path, changed, sentence):
    data = toy.federation()
    _, line, _ = trained(data, tmp_path, None, "fedavg", rounds=1)
    name, (task,), _ = line.log[-1]
    (answer,) = line.by_name[name].answer([Parcel({**task.meta, **changed}, task.tensors)])
    assert sentence in answer.meta["error"]
    assert not answer.tensors


def test_an_experiment_keeps_the_settings_it_began_with(tmp_path):
    data = toy.federation()
    trained(data, tmp_path, None, "fedavg", rounds=1)
    with pytest.raises(CoterieError, match="introduced itself"):
        trained(data, tmp_path, None, "fedavg", rounds=2)


def test_jobs_that_cannot_run_across_sites(tmp_path):
    data = toy.federation()
    with pytest.raises(CoterieError, match="dropouts are played by the simulation"):
        toy.job(data, "fedavg", dropouts=0.1)
    with pytest.raises(CoterieError, match=r"'\.\./up' cannot be the name of an experiment"):
        toy.job(data, "fedavg", experiment="../up")
    with pytest.raises(CoterieError, match="lies in a file"):
        Job.for_data(data, experiment="mine", method="mine.py:Mine", model="mlp")
    with pytest.raises(CoterieError, match=r"the optimizer lion\.py:Lion lies in a file, .* into coterie/optimizers"):
        Job.for_data(data, experiment="mine", method="fedavg:server=lion.py:Lion", model="mlp")
    with pytest.raises(CoterieError, match="cannot be the name of a site"):
        Site("a/b", data, tmp_path)
    with pytest.raises(CoterieError, match="minimum=3 answers cannot come from 2 sites"):
        Policy(sites=2, minimum=3)
    with pytest.raises(CoterieError, match=r"waited 0\.05 s for 5 sites; there are 4: berlin, lyon, oslo, turin"):
        trained(data, tmp_path, None, policy=replace(toy.POLICY, sites=5, wait=0.05))


def test_a_job_is_the_same_after_a_journey():
    one = toy.job(toy.federation(), "fedfew:models=2", steps=3)
    assert Job.of(json.loads(json.dumps(one.values()))) == one


def test_a_site_with_other_data_is_refused(tmp_path):
    """Its samples have five features, the experiment's four."""
    data, other = toy.federation(), toy.federation(shape=(5,))
    line = Line([*toy.sites(data, tmp_path)[:3], toy.sites(other, tmp_path)[3]])
    with pytest.raises(CoterieError, match="not every site that was there introduced itself"):
        toy.run(data, [toy.job(data, "fedavg")], tmp_path, line, policy=replace(toy.POLICY, minimum=4))
    assert "wants samples of shape [4]; turin has [5]" in line.log[3][2][0].meta["error"]


def test_without_flower_only_the_apps_are_missing(tmp_path):
    """The engine imports without flwr; the apps answer with the line that installs it."""
    code = (
        "import sys\nsys.modules['flwr'] = None\nimport coterie.flower.rounds, coterie.flower.site\n"
        "for app in ('client', 'server'):\n"
        "    try:\n        __import__(f'coterie.flower.{app}')\n"
        "    except coterie.CoterieError as reason:\n        print(reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'coterie[flower]'") == 2


def test_site_at_reads_the_sites_file(tmp_path):
    """Twenty samples: five for testing, two of the other fifteen for validation."""
    import numpy as np

    np.savez(tmp_path / "ward.npz", x=np.zeros((20, 4), np.float32), y=np.arange(20) % 3)
    data = site_at("ward", tmp_path / "ward.npz", tmp_path).federation(toy.job(toy.federation(), "fedavg"))
    assert data.names == ("ward",)
    assert [int(data.sizes(split)[0]) for split in ("train", "val", "test")] == [13, 2, 5]


@pytest.mark.parametrize("method", ["fedavg", "apfl"])
def test_sites_are_fed_as_the_simulation_is(tmp_path, method):
    """Class weights from a site's own labels, smoothed labels, the same draws for images, a warm-up: the same rows."""
    data = toy.federation(shape=(1, 3, 4))
    fed = {"class_weights": "balanced", "label_smoothing": 0.1, "augment": "flip+crop(pad=1)", "warmup": 2}
    one = toy.job(data, method, **fed)
    (rounds,), line = toy.run(data, [one], tmp_path, Line(toy.sites(data, tmp_path)))
    sim = toy.stacked(data, one)
    for name, t in sim.server.state.tensors().items():
        torch.testing.assert_close(rounds.server.state.tensors()[name], t, rtol=1e-9, atol=1e-9)
    plain = toy.run(data, [toy.job(data, method)], tmp_path / "plain", Line(toy.sites(data, tmp_path / "plain")))
    assert sent(line) == sent(plain[1])  # neither counts nor weights leave a site
    (unfed,), _ = plain
    assert not torch.allclose(unfed.server.state.row, rounds.server.state.row)


def sent(line):
    """What left sites, message by message: names and shapes of tensors, and the words of their facts."""
    return [(name, [(sorted(a.meta), {n: tuple(t.shape) for n, t in a.tensors.items()}) for a in answer])
            for name, _, answer in line.log]


def test_a_site_whose_data_have_a_class_a_token_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "plays.csv").write_text("text\n" + "to be or not to be\n" * 4)
    data = f"{tmp_path / 'plays.csv'}:text=text,task=next,tokenizer=characters,words=128,length=8"
    with pytest.raises(Refusal, match="sites train on one label a sample, and in these data each token has a class"):
        site_at("ward", data, tmp_path).federation(toy.job(toy.federation(), "fedavg"))
