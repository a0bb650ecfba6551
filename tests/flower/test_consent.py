"""No approval, no training; and nobody, approved or not, gets more than a site's limits."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import sites as toy
import torch
from typer.testing import CliRunner

from coterie import registry
from coterie.cli import app
from coterie.errors import CoterieError
from coterie.flower.consent import Approval, Consent, SiteLimits
from coterie.flower.job import Job
from coterie.flower.loopback import Loopback
from coterie.flower.plan import Plan
from coterie.flower.rounds import Rounds
from coterie.flower.site import Site, _Enrolment, site_at
from coterie.flower.task import Refusal
from coterie.flower.wire import Parcel
from coterie.options import options

CONFIG = """method = "ditto"
model = "mlp:hidden=5"
shape = [4]
classes = 3
[training]
rounds = 2
lr = 0.1
[policy]
sites = 2
"""


def changed(job, **training):
    return replace(job, training=replace(job.training, **training))


# -- digests -----------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_everything_but_the_id_and_the_device():
    """Each of these asks something else of a site; what is left at its default counts too."""
    one = toy.job(toy.federation(), "ditto")
    others = [
        changed(one, lr=0.2), changed(one, rounds=4), changed(one, batch=1), changed(one, seed=1),
        replace(one, scores="full"), replace(one, scores=False), replace(one, model="mlp:hidden=6"),
        replace(one, method="ditto:lam=2"), replace(one, method="fedavg"), replace(one, head="base.1"),
        replace(one, class_names=("a", "b", "c")), replace(one, freeze="base"),
    ]
    assert len({job.digest for job in (one, *others)}) == 1 + len(others)
    assert replace(one, experiment="another").digest == one.digest
    assert changed(one, device="auto").digest == one.digest
    assert Job.of(json.loads(json.dumps(one.values()))).digest == one.digest


@pytest.mark.parametrize("text", ["", "beef", "g" * 40, "a" * 39, "a" * 41, "A" * 40, "../" + "a" * 37])
def test_what_is_no_digest_is_refused(text):
    with pytest.raises(CoterieError, match="is no digest of an experiment"):
        Approval.of(text)


# -- approvals ---------------------------------------------------------------------------------------------------------


def test_an_experiment_that_nobody_approved_is_refused_and_nothing_is_read(tmp_path):
    """The data are not even opened; the answer names the digest and what to type."""
    data, read = toy.federation(), []
    one = toy.job(data, "ditto")

    def samples(job):
        read.append(job)
        return toy.alone(data, 0)

    line = Loopback([Site("berlin", samples, tmp_path / "berlin", "cpu"), *toy.sites(data, tmp_path)[1:]])
    everybody = replace(toy.POLICY, minimum=len(toy.NAMES))  # with fewer needed it would be left out
    with pytest.raises(CoterieError, match="is not approved at this site") as reason:
        toy.run(data, [one], tmp_path, line, policy=everybody)
    assert f"`coterie client --accept {one.digest}`" in str(reason.value)
    assert read == []
    assert sorted(path.name for path in (tmp_path / "berlin").iterdir()) == ["sent.jsonl", "site.log"]


@pytest.mark.parametrize("by", ["argument", "file"])
def test_an_approved_experiment_is_trained(tmp_path, by):
    """The same experiment, of any id; one that differs in a single option is another."""
    data = toy.federation()
    one = toy.job(data, "ditto")
    homes = [tmp_path / name for name in toy.NAMES]
    if by == "file":
        for home in homes:
            Consent(home).accept([one.digest])
    sites = [Site(name, toy.alone(data, i), homes[i], "cpu", accept=one.digest if by == "argument" else ())
             for i, name in enumerate(toy.NAMES)]
    (rounds,), _ = toy.run(data, [one], tmp_path, Loopback(sites))
    assert rounds.served == set(toy.NAMES)
    toy.run(data, [replace(one, experiment="again")], tmp_path, Loopback(sites))
    with pytest.raises(CoterieError, match="is not approved"):
        toy.run(data, [replace(changed(one, batch=1), experiment="other")], tmp_path, Loopback(sites))
    assert not (tmp_path / "berlin" / "other").exists()


def test_changes_may_be_approved_by_name(tmp_path):
    """lr and rounds may differ from what was shown, nothing else, and the limits still hold for them."""
    one = toy.job(toy.federation(), "ditto")
    consent = Consent(tmp_path)
    with pytest.raises(CoterieError, match="was not shown here"):
        consent.accept([one.digest], "lr,rounds")
    consent.show(one)
    with pytest.raises(CoterieError, match="did you mean 'rounds'"):
        consent.accept([one.digest], "lr,round")
    consent.accept([one.digest], "lr,rounds")
    assert (tmp_path / "accepted").read_text() == f"{one.digest}:lr,rounds\n"
    for fine in (one, changed(one, lr=0.7), changed(one, lr=0.7, rounds=9)):
        consent.require(fine)
    wrong = (changed(one, batch=1), changed(one, lr=0.7, seed=1), replace(one, scores="full"))
    for other in (*wrong, replace(one, model="mlp:hidden=6")):
        with pytest.raises(Refusal, match="is not approved"):
            consent.require(other)
    with pytest.raises(Refusal, match="asks for rounds=1000000, and this site allows 100000 at most"):
        SiteLimits().require(changed(one, rounds=10**6))


def test_a_shown_experiment_that_was_edited_approves_nothing(tmp_path):
    one = toy.job(toy.federation(), "ditto")
    consent = Consent(tmp_path)
    consent.show(one)
    consent.accept([one.digest], "lr")
    path = tmp_path / "shown" / f"{one.digest}.json"
    path.write_text(path.read_text().replace('"batch": 3', '"batch": 1'))
    with pytest.raises(CoterieError, match="holds another experiment"):
        consent.require(changed(one, batch=1, lr=0.3))


def test_the_commands_of_consent(tmp_path):
    """The dry run prints the digest, --accept writes it down once, and the site then takes part."""
    (tmp_path / "server.toml").write_text(CONFIG)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.standard_normal((40, 4)).astype(np.float32), y=np.arange(40) % 3)
    home = tmp_path / "home"

    def said(*words):
        return CliRunner().invoke(app, ["client", *map(str, words), "--home", str(home)], catch_exceptions=False)

    shown = said("--data", tmp_path / "a.npz", "--dry-run", tmp_path / "server.toml")
    digest = Plan.configured(tmp_path / "server.toml").jobs[0].digest
    assert f"coterie client --accept {digest}" in shown.output
    for _ in range(2):
        assert said("--accept", digest).exit_code == 0
    assert (home / "accepted").read_text() == f"{digest}\n"
    said("--accept", digest, "--accept-changes", "lr,rounds")
    assert (home / "accepted").read_text() == f"{digest}\n{digest}:lr,rounds\n"
    plan = Plan.configured(tmp_path / "server.toml")
    sites = [site_at("north", tmp_path / "a.npz", home, "cpu"),
             site_at("south", tmp_path / "a.npz", tmp_path / "south", "cpu", accept=digest)]
    (rounds,), _ = toy.run(None, plan.jobs, tmp_path, Loopback(sites), policy=plan.policy)
    assert rounds.served == {"north", "south"}


@pytest.mark.parametrize(("words", "sentence"), [
    (["--accept", "beef"], "is no digest of an experiment"),
    (["--accept-changes", "lr"], "name it with --accept DIGEST"),
    (["--accept", "any"], "Give --data FILE"),
    (["--accept", "a" * 40, "--accept-changes", "lr"], "was not shown here"),
    (["--limit", "epoch=3"], "did you mean 'epochs'"),
    (["--limit", "epochs=many"], "must be a number"),
    (["--limit", "epochs=0"], "must be above 0"),
])
def test_wrong_words_are_a_sentence(tmp_path, words, sentence):
    result = CliRunner().invoke(app, ["client", *words, "--home", str(tmp_path / "home")])
    assert isinstance(result.exception, CoterieError)
    assert sentence in str(result.exception)
    assert not (tmp_path / "home").exists()


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_huge_model_is_refused_without_memory_for_it(tmp_path):
    """65,536 units twice are 4.3e9 weights, 17 GB; the process may grow by what imports and the like take, 0.3 GB."""
    one = toy.job(toy.federation(), "fedavg", model="mlp:hidden=65536,65536")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Refusal, match=r"asks for parameters=4\.29\d*e\+09, and this site allows 100000000 at most"):
        SiteLimits().require(one)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


@pytest.mark.parametrize("method", ["pfedhn:hidden=20000", "pfedhn:embedding=50000000", "pacfl:vectors=50000000"])
def test_what_a_methods_options_make_of_a_small_model_is_refused(tmp_path, method):
    """A model of 43 numbers, and a server that keeps gigabytes: the site builds none of them beyond its limit."""
    data = toy.federation()
    one = toy.job(data, method)
    site = Site("berlin", toy.alone(data, 0), tmp_path, "cpu", accept="any", limits=SiteLimits(payload=2e8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    enrolment = _Enrolment(site, one, SimpleNamespace(number=0, population=4, method=one.method,
                                                      options=repr(one.chosen())))
    with pytest.raises(Refusal, match=r"takes more than 4e\+08 bytes here"):
        enrolment._form("round")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # kilobytes
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    assert limits[0] in (resource.RLIM_INFINITY, limits[1])  # as before


@pytest.mark.parametrize("name", ["accepted", "shown", "Accepted", "flwr", "site.log", "sent.jsonl"])
def test_an_experiment_is_not_called_as_what_a_site_keeps(name):
    """A folder of that name in a site's home, and it could not read its approvals any more."""
    with pytest.raises(CoterieError, match="a site keeps something else under it"):
        toy.job(toy.federation(), "fedavg", experiment=name)


def test_parameters_are_those_of_the_methods_model():
    """FedROD has a second head, (5 + 1) * 3 more than the 4 * 5 + 5 + 5 * 3 + 3 of the model."""
    data = toy.federation()
    for method, count in (("fedavg", 43), ("fedrod", 43 + 18)):
        one = toy.job(data, method)
        assert one.numbers(one.chosen()) == one.init(one.chosen()).layout.size == count


@pytest.mark.parametrize(("limit", "values", "method"), [
    ("parameters=42", {}, "ditto"), ("epochs=3", {"epochs": 4}, "ditto"), ("epochs=3", {}, "ditto:training.epochs=4"),
    ("steps=9", {"steps": 10}, "ditto"), ("steps=2", {}, "ditto"),  # 7 samples in batches of 3 are 3 steps
    ("batch=2", {}, "ditto"), ("rounds=2", {}, "ditto"), ("payload=300", {}, "ditto"),  # 43 numbers of 8 bytes are 344
    ("classes=2", {}, "ditto"),
])
def test_each_limit_is_named_when_it_is_passed(tmp_path, limit, values, method):
    data = toy.federation()
    one = toy.job(data, method, **values)
    first = Site("berlin", toy.alone(data, 0), tmp_path / "berlin", "cpu", "any", SiteLimits.of(limit))
    line = Loopback([first, *toy.sites(data, tmp_path)[1:]])
    policy = replace(toy.POLICY, minimum=1)
    if limit.startswith("payload"):  # what introduces itself carries nothing
        (rounds,), _ = toy.run(data, [one], tmp_path, line, policy=policy)
        assert all(r["report"]["failures"] == {"refused": 1} for r in rounds.rounds)
    else:
        (rounds,), _ = toy.run(data, [one], tmp_path, line, policy=policy)
        assert set(rounds.left_out) == {"berlin"}
    said = [json.loads(text) for text in (tmp_path / "berlin" / "sent.jsonl").read_text().splitlines()]
    name, most = limit.split("=")
    refusal = next(one["error"] for one in said if "error" in one)
    assert refusal.startswith(f"the task asks for {name}=")
    assert f"and this site allows {most} at most" in refusal
    assert f"--limit {name}=" in refusal
    assert not list((tmp_path / "berlin").glob("*/state.safetensors"))


WHOLE = [(name, option) for name, cls in sorted(registry.methods().items()) for option, hint in options(cls).items()
         if int in (hint, *get_args(hint))]


@pytest.mark.parametrize(("method", "option"), WHOLE)
def test_every_whole_number_of_a_method_has_a_limit(method, option):
    """`ditto:personal_epochs=10000000` trained for ever under epochs=100; what a number means is not asked."""
    limit = "epochs" if option.endswith("epochs") else "counts"
    try:
        one = toy.job(toy.federation(), f"{method}:{option}=1001")
    except CoterieError:
        return  # the method itself allows no such number
    with pytest.raises(Refusal, match=f"asks for {method}:{option}=1001, and this site allows .* --limit {limit}=1001"):
        SiteLimits().require(one)
    SiteLimits.of(f"{limit}=1001").require(one)


def test_the_methods_as_they_come_are_within_the_limits():
    for method in registry.methods():
        SiteLimits().require(toy.job(toy.federation(), method))
    assert {"personal_epochs", "passes", "inner", "adapt_steps", "finetune_epochs", "head_epochs", "adapt"} <= {
        option for _, option in WHOLE}


def test_an_approved_experiment_under_ever_new_ids_meets_a_limit(tmp_path):
    """Each has a folder with a state of its own."""
    data = toy.federation()
    one = toy.job(data, "ditto", rounds=1)
    sites = [Site(name, toy.alone(data, i), tmp_path / name, "cpu", one.digest, SiteLimits.of("experiments=2"))
             for i, name in enumerate(toy.NAMES)]
    for experiment in ("a", "b", "a"):
        toy.run(data, [replace(one, experiment=experiment)], tmp_path, Loopback(sites))
    with pytest.raises(CoterieError, match="asks for experiments=3, and this site allows 2 at most"):
        toy.run(data, [replace(one, experiment="c")], tmp_path, Loopback(sites))
    assert not (tmp_path / "oslo" / "c").exists()


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
@pytest.mark.parametrize("do", ["local", "score"])
def test_an_approved_experiment_is_answered_about_as_often_as_it_has_rounds(tmp_path, method, do):
    """A server may call ever new payloads those of round 0, and learn the more of the data the more are answered. Three
    rounds were approved: with beginning, end and three repeats that makes 8, by whatever process of the site. The last
    one may come again as often as it likes, and is answered as before: a server that was killed asks so."""
    data = toy.federation()
    one = toy.job(data, method)
    rounds = Rounds(one, toy.POLICY, set)
    rounds.numbers, rounds.population = {"lyon": 1}, 4
    rounds.server = rounds.start(4)

    def asked(k, **header):
        (parcel,) = rounds._payloads(rounds.server, {"lyon": {"do": [do]}}).values()
        generator = torch.Generator().manual_seed(k)
        tensors = {name: torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in parcel.tensors.items()}
        site = Site("lyon", toy.alone(data, 1), tmp_path, "cpu", one.digest, SiteLimits.of("repeats=3"))
        return site.answer([Parcel({**parcel.meta, **header}, tensors)])[0]

    answers = [asked(k) for k in range(12)]
    assert ["error" in answer.meta for answer in answers] == [False] * 8 + [True] * 4
    assert "has answered 8 payloads of this experiment, which has 3 rounds" in answers[8].meta["error"]
    assert "--limit repeats=" in answers[8].meta["error"]
    lines = [json.loads(text) for text in (tmp_path / "sent.jsonl").read_text().splitlines()]
    assert lines[8]["error"] == answers[8].meta["error"]
    again = asked(7)
    assert again.meta == answers[7].meta
    assert all(torch.equal(t, again.tensors[name]) for name, t in answers[7].tensors.items())
    for other in ({"number": 2}, {"population": 5}, {"round": 1}, {"round": 1, "merged": 0}):
        assert "has answered 8 payloads" in asked(7, **other).meta["error"], other


def test_no_round_is_trained_after_it_was_merged(tmp_path):
    """Else the same payload could be trained on again and again from the state that it led to."""
    data = toy.federation()
    line = Loopback(toy.sites(data, tmp_path))
    asked = []
    deliver = line.deliver
    line.deliver = lambda name, parcels: asked.extend((name, p) for p in parcels) or deliver(name, parcels)
    toy.run(data, [toy.job(data, "ditto")], tmp_path, line)
    task = next(p for name, p in reversed(asked) if name == "lyon" and "local" in p.meta.get("do", ()))
    (answer,) = line.by_name["lyon"].answer([Parcel({**task.meta, "merged": task.meta["round"]}, task.tensors)])
    assert answer.meta["error"] == "the task trains in round 2, and says that round 2 of this site is merged already."


def test_classes_are_the_models_outputs():
    """Else a small model could come with a table of labels of any size."""
    one = replace(toy.job(toy.federation(), "fedavg"), classes=50_000)
    with pytest.raises(Refusal, match="has 50000 classes, and its model 3 outputs"):
        SiteLimits().require(one)
