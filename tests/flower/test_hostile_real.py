"""Forty hostile answers in one deployment over real processes with TLS and keys: the run never ends.

oslo's processes have `hostile_site` on their path and spoil what they send by `hostile_plan`; the other three sites,
the SuperLink and the server app are as everywhere.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sites as toy
import torch
from local import free_port

pytest.importorskip("flwr")

import hostile_plan

from coterie.data import Federation
from coterie.flower import keys
from coterie.flower.checks import Limits
from coterie.flower.keys import ClientKeys, ServerKeys
from coterie.flower.loopback import Loopback
from coterie.flower.plan import Plan
from coterie.flower.policy import Policy
from coterie.flower.processes import NODES, Address, SuperLink, operate, supervise
from coterie.flower.rounds import serve
from coterie.flower.site import site_at
from coterie.flower.wire import Failure
from coterie.running import checkpoint
from coterie.running.folder import Folder

pytestmark = pytest.mark.flower
HERE = Path(__file__).resolve().parent
SPECS = {"fedfew": "fedfew:models=2", "ifca": "ifca:models=2", "fedsoft": "fedsoft:models=2"}


class Lost(Loopback):
    """The same sites in this process; oslo is lost in every round."""

    def deliver(self, name, parcels):
        if name == hostile_plan.SITE and "local" in parcels[0].meta.get("do", ()):
            return Failure("lost", "")
        return super().deliver(name, parcels)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The run's folder, and the same experiments in this process, without oslo's answers."""
    place = tmp_path_factory.mktemp("hostile")
    keys.make(place / "keys", ["127.0.0.1"], list(toy.NAMES))
    rng = np.random.default_rng(0)
    for i, name in enumerate(toy.NAMES):
        x = (rng.standard_normal((24, 4)) + 0.3 * i).astype(np.float32)
        np.savez(place / f"{name}.npz", x=x, y=np.arange(24) % 3)
    shape = Federation.from_clients([(np.zeros((3, 4), np.float32), np.arange(3))], classes=toy.CLASSES)
    options = {"precision": "float32", "rounds": hostile_plan.ROUNDS, "evaluate_every": 1}
    jobs = tuple(
        replace(toy.job(shape, SPECS.get(name, name), experiment=name, **options), scores="values")
        for name in hostile_plan.CASES
    )
    home, run = place / "link", place / "run"
    home.mkdir()
    policy = Policy(sites=4, minimum=3, deadline=120, wait=240, poll=0.1)
    plan = Plan(jobs, policy, Limits(strikes=100), nodes=str(home / NODES)).placed(run)
    plan.write(run / "plan.json")
    path = [str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    spoiling = {**variables, "PYTHONPATH": os.pathsep.join([str(HERE / "hostile_site"), *path])}
    address, stop, errors, said = Address("127.0.0.1", free_port()), threading.Event(), [], []
    link = SuperLink(ServerKeys.read(place / "keys" / "server"), address, home, variables, said.append)

    def guarded(function, *arguments, **more):
        try:
            function(*arguments, **more)
        except Exception as reason:
            errors.append(reason)

    threads = [threading.Thread(target=guarded, args=(
        supervise, ClientKeys.read(place / "keys" / "clients" / name), address, place / "homes" / name,
        {"name": name, "data": str(place / f"{name}.npz"), "home": str(place / "homes" / name), "device": "cpu",
         "accept": "any"},
        spoiling if name == hostile_plan.SITE else variables, stop), kwargs={"say": said.append}) for name in toy.NAMES]
    served = threading.Thread(target=guarded, args=(
        operate, link, {"run": str(run / "plan.json")}))
    with link:
        for thread in [*threads, served]:
            thread.start()
        end = time.monotonic() + 500
        while served.is_alive() and time.monotonic() < end:
            time.sleep(0.2)
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not served.is_alive(), (said, (home / "run.log").read_text()[-3000:])
    assert errors == []
    sites = [site_at(name, place / f"{name}.npz", place / "plain" / name, device="cpu", accept="any")
             for name in toy.NAMES]
    return run, said, {one.job.experiment: one for one in serve(jobs, Lost(sites), policy)}


def test_there_are_forty_cases():
    assert sum(map(len, hostile_plan.CASES.values())) == 40


def test_the_run_never_ended(ran):
    """One submission, no restart: the server app said nothing that Flower takes for a failure."""
    run, said, _ = ran
    assert not [line for line in said if "starting again" in line]
    for name in hostile_plan.CASES:
        assert (run / name / "result.json").exists()


@pytest.mark.parametrize("method", hostile_plan.CASES)
def test_the_culprit_and_the_field_are_named_and_the_model_is_that_of_the_others(ran, method):
    run, _, absent = ran
    rounds = Folder(run / method).rounds()
    assert [one["participants"] for one in rounds] == [3] * hostile_plan.ROUNDS
    for case, one in zip([*hostile_plan.CASES[method], *hostile_plan.WHOLE], rounds, strict=True):
        (culprit,) = one["report"]["refused"]
        assert culprit == hostile_plan.SITE
        field = one["report"]["refused"][culprit]["field"]
        assert field == ("header" if case.form == "message" else field)
        assert field.startswith(case.field) or case.form == "message", (case, field)
    tensors, _ = checkpoint.load(run / method / "checkpoint.safetensors")
    for name, t in absent[method].server.tensors().items():
        torch.testing.assert_close(tensors[name], t, rtol=1e-5, atol=1e-5)
