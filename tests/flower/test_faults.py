"""Faults of a site over real processes: a SuperLink with TLS and keys, four supervised SuperNodes, one of them faulty.

One run holds them all, a fault a round (`faulty_sites.FAULTS`); every test looks at one of them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import sites as toy
from local import free_port

pytest.importorskip("flwr")

import faulty_sites

from coterie.flower import keys
from coterie.flower.checks import Limits
from coterie.flower.keys import ClientKeys, ServerKeys
from coterie.flower.operator import lift, status
from coterie.flower.plan import Plan
from coterie.flower.policy import Policy
from coterie.flower.processes import NODES, Address, SuperLink, operate, supervise
from coterie.running.folder import Folder

pytestmark = pytest.mark.flower
ROUNDS = 12
HERE = Path(__file__).resolve()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder after twelve rounds. The server app is killed once, and the quarantine is lifted once it is there."""
    place = tmp_path_factory.mktemp("faults")
    keys.make(place / "keys", ["127.0.0.1"], list(toy.NAMES))
    rng = np.random.default_rng(0)
    for name in toy.NAMES:
        np.savez(place / f"{name}.npz", x=rng.standard_normal((24, 4)).astype(np.float32), y=rng.integers(0, 3, 24))
    job = toy.job(toy.federation(), "fedavg", precision="float32", rounds=ROUNDS, evaluate_every=100)
    home, run = place / "link", place / "run"
    home.mkdir()
    policy = Policy(sites=4, minimum=3, deadline=90, wait=240, poll=0.1)
    plan = Plan((job,), policy, Limits(strikes=3), nodes=str(home / NODES)).placed(run)
    plan.write(run / "plan.json")
    root = HERE.parents[2]
    paths = [str(root), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    address, stop, errors, said = Address("127.0.0.1", free_port()), threading.Event(), [], []
    link = SuperLink(ServerKeys.read(place / "keys" / "server"), address, home, variables, said.append)

    def guarded(function, *arguments, **options):
        try:
            function(*arguments, **options)
        except Exception as reason:
            errors.append(reason)

    threads = [threading.Thread(target=guarded, args=(
        supervise, ClientKeys.read(place / "keys" / "clients" / name), address, place / "homes" / name,
        {"name": name, "data": str(place / f"{name}.npz"), "home": str(place / "homes" / name), "device": "cpu",
         "accept": "any"},
        variables, stop), kwargs={"say": said.append, "app": "faulty_sites:app"}) for name in toy.NAMES]
    served = threading.Thread(target=guarded, args=(operate, link, {"run": str(run / "plan.json")}))
    killed = lifted = False
    with link:
        for thread in [*threads, served]:
            thread.start()
        end = time.monotonic() + 1200
        while served.is_alive() and time.monotonic() < end:
            time.sleep(0.2)
            rounds = len(Folder(run).rounds()) if (run / "metrics.jsonl").exists() else 0
            if rounds >= 1 and not killed:  # between rounds, or at the beginning of one
                os.kill(json.loads((run / "status.json").read_text())["pid"], signal.SIGKILL)
                killed = True
            if rounds >= 10 and not lifted:
                lift(run, faulty_sites.SITE)
                lifted = True
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not served.is_alive(), said
    assert errors == []
    return run, said


def report(run, t):
    """What the record says of a round, counted from 1."""
    return next(one for one in Folder(run).rounds() if one["round"] == t - 1)


@pytest.mark.parametrize(("fault", "cause"), [
    ("raise", "failed"), ("nan", "rejected"), ("hang", "late"), ("shape", "rejected"), ("replay", "late"),
    ("die", "crashed"), ("layout", "mismatch"), ("norm", "unusual"),
])
def test_a_faulty_site_is_left_out_and_the_round_goes_on(ran, fault, cause):
    t = next(t for t, name in faulty_sites.FAULTS.items() if name == fault)
    assert report(ran[0], t)["report"]["failures"] == {cause: 1}
    assert report(ran[0], t)["participants"] == 3


def test_rounds_without_a_fault_have_everybody(ran):
    assert report(ran[0], 1)["participants"] == 4
    assert len(Folder(ran[0]).rounds()) == ROUNDS


def test_three_rejected_uploads_in_a_row_bar_a_site_until_it_is_lifted(ran):
    """nan, shape and layout are three; what did not answer, was late or too long in between counts for nothing."""
    run, _ = ran
    assert report(run, 10)["report"]["failures"] == {"barred": 1}
    assert report(run, ROUNDS)["participants"] == 4
    assert json.loads((run / "checks.json").read_text())["held"] == {}


def test_the_killed_server_app_went_on_where_it_was(ran):
    assert "the server app ended (finished:failed); starting again" in ran[1]


def test_everybody_has_a_model_and_the_status_says_so(ran):
    run, _ = ran
    for name in toy.NAMES:
        facts = json.loads((run.parent / "homes" / name / "fedavg" / "model.json").read_text())
        assert facts["round"] == ROUNDS
    table = status(run)
    assert str(table.title).startswith("fedavg: finished")
    assert list(table.columns[6].cells) == ["has its model"] * 4
