"""No message of a site ends the run, moves a model or harms another site: `hostile.py`'s answers, method by method.

Three honest sites train beside one hostile site for every case, all at once. What the server is told by honest sites
goes the same way as what it is told by hostile ones: through Flower's bytes, the parsing, the checks. There are about
1,800 cases: each test says how many it has at least.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import sites as toy
import torch

pytest.importorskip("flwr")

import hostile
from hostile import Case, Raw

from coterie import registry
from coterie.flower.checks import Inspector, Limits
from coterie.flower.loopback import Loopback, through
from coterie.flower.message import answers_of
from coterie.flower.rehearsal import Rehearsal
from coterie.flower.rounds import Rounds
from coterie.flower.wire import ECHOED, Failure, Parcel

HONEST = ("berlin", "lyon", "oslo")
METHODS = sorted(registry.methods())
VARIANTS = [
    "feddyn:by_size=true", "feddyn+median", "cwfedavg:distribution=true", "fedmtl:detached=true", "fedavg+median",
]
INTRODUCED = [
    "cfl", "cwfedavg", "cwfedavg:distribution=true", "feddyn:by_size=true", "fedpac", "fesem", "pacfl", "pfedhn",
]
LIMITS = Limits(strikes=1000)


class Line(Loopback):
    """Honest sites, and hostile ones that send berlin's answers in their own names, spoiled in one kind of task.

    Without `spoils` the hostile sites are lost there instead.
    """

    def __init__(self, honest, cases: dict[str, Case], kind: str, spoils: bool = True) -> None:
        super().__init__(honest)
        self.cases, self.kind, self.spoils, self.honest = cases, kind, spoils, {}

    def sites(self) -> set[str]:
        return {*self.by_name, *self.cases}

    def ask(self, messages, deadline, enough):
        found = {}
        for name, tasks in messages.items():
            if name in self.by_name:
                answers = self.by_name[name].answer(through(tasks))
                if name == "berlin":
                    self.honest[tasks[0].meta["kind"]] = answers[0]  # at the end, hostile sites may be asked alone
                found[name] = answers_of(Raw.of(answers).carried(), tasks)
                continue
            honest = self.honest[tasks[0].meta["kind"]]
            echoed = {word: tasks[0].meta[word] for word in ECHOED}
            raw = Raw.of([Parcel({**honest.meta, **echoed, "site": name}, honest.tensors)])
            if "local" in tasks[0].meta.get("do", ()) if self.kind == "round" else tasks[0].meta["kind"] == self.kind:
                if not self.spoils:
                    found[name] = Failure("lost", "")
                    continue
                raw = self.cases[name].spoiled(raw)
            found[name] = answers_of(raw.carried(), tasks)
        return found


def trained(spec, cases, home, kind="round", spoils=True, **training):
    data = toy.federation()
    job = toy.job(data, spec, rounds=2, **training)
    line = Line(toy.sites(data, home, only=HONEST), cases, kind, spoils)
    inspector = Inspector(LIMITS)
    policy = replace(toy.POLICY, sites=len(HONEST) + len(cases), minimum=3)
    (rounds,), _ = toy.run(data, [job], home, line, policy=policy, check=inspector)
    return rounds, inspector


def rehearsed(spec):
    """What sites send with this method: names, types and shapes of the introduction and of an upload."""
    job = toy.job(toy.federation(), spec)
    server = Rounds(job, toy.POLICY, set).start(4)
    told = Rehearsal(job, server)
    return told._introduced(server, 0).tensors(), told.sent[0], server.method


def named(cases):
    return {f"x{number:03d}": case for number, case in enumerate(cases)}


def same(one, other):
    """The servers' tensors and the scores, bit for bit."""
    for name, t in one.server.tensors().items():
        assert torch.equal(t, other.server.tensors()[name]), name
    assert [e.round for e in one.history] == [e.round for e in other.history]
    for mine, theirs in zip(one.history, other.history, strict=True):
        for stage, scores in mine.stages.items():
            assert scores.clients.tolist() == theirs.stages[stage].clients.tolist()
            for metric, values in scores.test.items():
                assert values.tolist() == pytest.approx(theirs.stages[stage].test[metric].tolist(), nan_ok=True)


def blamed(case: Case, field: str) -> bool:
    """Whether the field that was named is the spoiled one, or one inside or around it."""
    if case.field == "another stype":
        return bool(field)
    return field.startswith(case.named) or (field != "" and case.named.startswith(f"{field}."))


def attack(spec, cases, home, **training):
    """Run with hostile uploads and without those sites; look at everything that is promised."""
    cases = named(cases)
    rounds, inspector = trained(spec, cases, home / "hostile", **training)
    absent, _ = trained(spec, cases, home / "absent", spoils=False, **training)
    assert rounds.rounds_done == 2
    same(rounds, absent)
    for done in rounds.rounds:
        assert done["participants"] == len(HONEST)
        refused = done["report"]["refused"]
        assert refused.keys() == cases.keys()
        wrong = {(case.field, case.form): refused[name] for name, case in cases.items()
                 if not blamed(case, refused[name]["field"])}
        assert wrong == {}
    compared = {name for name, said in rounds.rounds[0]["report"]["refused"].items() if "[limits]" in said["reason"]}
    assert {cases[name].form for name in compared} <= {"long", "far off"}  # unlike the others: no strike
    assert inspector.quarantine.strikes == {name: 2 for name in cases if name not in compared}


@pytest.mark.parametrize("spec", [*METHODS, *VARIANTS])
def test_every_tensor_of_every_upload_in_every_wrong_form(tmp_path, spec):
    _, uploaded, method = rehearsed(spec)
    cases = hostile.of_tensors(uploaded, method.uploads)
    assert len(cases) >= (1 if spec == "local" else 25)
    attack(spec, cases, tmp_path)


def test_every_value_of_a_header_and_every_message(tmp_path):
    """Whatever the method: what is repeated, the count, the scores; keys, records and texts of the whole message."""
    cases = [*hostile.of_facts(), *hostile.of_message()]
    assert len(cases) >= 300
    attack("fedavg", cases, tmp_path, evaluate_every=1)


@pytest.mark.parametrize("spec", INTRODUCED)
def test_every_tensor_of_every_introduction_in_every_wrong_form(tmp_path, spec):
    """Who has not introduced itself properly after three attempts is left out, and the others train as if alone."""
    told, _, method = rehearsed(spec)
    cases = named(case for case in hostile.of_tensors(told, method.introduces) if case.form != "long")
    assert len(cases) >= 15
    rounds, inspector = trained(spec, cases, tmp_path / "hostile", "introduce")
    alone, _ = trained(spec, {}, tmp_path / "alone", "introduce")
    assert rounds.clients == list(HONEST)
    assert rounds.left_out.keys() == cases.keys()
    same(rounds, alone)
    assert all(inspector.quarantine.strikes[name] >= 3 for name in cases)
