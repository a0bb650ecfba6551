"""Whatever bytes a site sends: they are read in bounded time, and what passes all checks still cannot end a run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import sites as toy
import torch

from coterie.errors import CoterieError
from coterie.flower import wire
from coterie.flower.checks import Inspector, Limits
from coterie.flower.loopback import Loopback
from coterie.flower.wire import Failure, Parcel
from coterie.methods.fedavg import FedAvg

# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "said"), [
    ("[" * 200_000, "lists in lists"), ('[{"a":' * 200_000, "lists in lists"),
    ('[{"a": ' + "9" * 5000 + "}]", "digits"), ('[{"a": 0.' + "1" * 5000 + "}]", "digits"),
    ('[{"a": NaN}]', "NaN is no number"), ('[{"a": -Infinity}]', "-Infinity is no number"),
    ("", "no json"), ("{", "no json"), ("{}", "a list of parcels"), ("[1]", "a list of parcels"),
    ("x" * (wire.LONGEST + 1), "no text of at most"), (b"[]", "no text"), (None, "no text"),
    ("[" + "{}," * wire.PIECES, "more than 1048576 texts and lists"), ("[" + '"",' * wire.PIECES, "texts and lists"),
    ('[{"' + '\\"' * 1_000_000, "no json"), ('[{"\\', "no json"), ('[{"a": "' + "[" * 1_000_000 + '"}', "no json"),
], ids=range(18))
def test_a_header_is_bounded_before_it_is_parsed(text, said):
    began = time.process_time()
    with pytest.raises(CoterieError, match=said):
        wire.headers(text)
    assert time.process_time() - began < 5


def test_a_long_header_of_escapes_takes_no_memory_beside_its_text():
    """62 million letters, of which every second one escapes the next; each took 120 bytes while they were looked at."""
    code = f"""if True:
        import resource
        from coterie.errors import CoterieError
        from coterie.flower import wire
        text = '[{{"' + chr(92) * {wire.LONGEST - 100}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            wire.headers(text)
        except CoterieError:
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 200


def test_an_answer_that_tells_no_sums_has_a_short_header():
    """Its length is then that of some names and numbers; the sums of all classes can be long."""
    message = pytest.importorskip("coterie.flower.message")
    content = message.Encoder().records([Parcel({"n": 1, "x": "y" * wire.SHORT})])
    for scores, expected in (("values", Failure), ("full", list)):
        assert isinstance(message.answers_of(content, [Parcel({"job": {"scores": scores}})]), expected)


def test_brackets_and_digits_in_texts_are_texts():
    text = '[{"a": "' + "[" * 20 + '\\"' + "{" * 20 + '", "b": "' + "9" * 100 + '", "c": [1e10, -0.5, 1234567890]}]'
    (meta,) = wire.headers(text)
    assert meta["c"] == [1e10, -0.5, 1234567890]


@pytest.mark.parametrize("key", [
    "update", "\u00b2:update", "\u0661:update", "1:update", "-1:update", "00:update", "0:", "0:a b", "0:\u00e4",
    "0:update\n", "9" * 5000 + ":update", f"0:{'a' * 65}", 7, None,
])
def test_the_key_of_a_tensor_is_a_number_and_a_name(key):
    with pytest.raises(CoterieError, match="belongs to no parcel"):
        wire.placed(key, 1)
    assert wire.placed("0:update", 1) == (0, "update")
    assert wire.placed("12:V_2", 13) == (12, "V_2")


def test_what_others_say_is_one_line_of_printable_letters():
    assert wire.plain("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert wire.plain("\u202eabc") == "\\u202eabc"
    assert len(wire.plain("x" * 10**6)) == wire.WORDS
    assert wire.plain({"a": "\n"}) == "{'a': '\\n'}"
    failure = wire.check_answer({"round": 1}, Parcel({"error": "no\n" * 1000, "cause": "late"}), "oslo")
    assert failure.cause == "failed"  # a site cannot choose how its failure is counted
    assert len(failure.reason) == wire.WORDS
    assert "\n" not in failure.reason


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [
    torch.randn(2, 3), torch.zeros(0, 4), torch.tensor(3.5, dtype=torch.float64), torch.arange(4),
    torch.tensor([True, False]), torch.zeros(5).half(), torch.zeros(1, 1, 1, 1, 1, 1, 1, 2),
    torch.tensor([1], dtype=torch.uint8),
])
def test_arrays_are_those_that_numpy_writes(t):
    """What numpy's own reader makes of the same bytes is the same tensor."""
    message = pytest.importorskip("coterie.flower.message")
    content = message.Encoder().records([Parcel({}, {"t": t})])
    (back,) = message.parcels_of(content)
    assert back.tensors["t"].dtype == t.dtype
    assert torch.equal(back.tensors["t"], t)
    data = message.unmasked(content.array_records["arrays"]["0:t"].data)
    assert np.array_equal(np.load(io.BytesIO(data), allow_pickle=False), t.numpy())
    (found,) = message.answers_of(content, [Parcel({}, expected=wire.schema_of({"t": t}))])
    assert torch.equal(found.tensors["t"], t)
    (wrong,) = message.answers_of(content, [Parcel({}, expected={"t": ((7,), t.dtype)})])
    assert (wrong.cause, wrong.field) == ("rejected", "t")


def test_nobody_can_guess_a_name_of_what_is_in_a_message(monkeypatch):
    """Flower names objects by their content. Two messages of the same say, and two arrays of zeros in one, have no
    object in common, nor has an array one twice: whoever knows all that a site says still cannot name what it sends,
    to announce it first or to ask whether it is there."""
    message = pytest.importorskip("coterie.flower.message")
    from flwr.app.message import array as module
    from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree

    monkeypatch.setattr(module, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    zeros = {"a": torch.zeros(1, 1000), "b": torch.zeros(1, 1000), "c": torch.zeros(0)}
    for tensors, count in ((zeros, 1 + 1 + 3 + (5 + 5 + 1) + 1), ({}, 1 + 1)):  # dict, record, arrays, chunks, header
        names = [[tree.object_id for tree in iterate_object_tree(get_object_tree(
            message.Encoder().records([Parcel({"n": 24}, tensors)])))] for _ in range(2)]
        assert [len(one) for one in names] == [count, count]
        assert len({*names[0], *names[1]}) == 2 * count


def test_a_tensor_for_many_sites_is_kept_once():
    """The server's own messages share its arrays, and nothing else."""
    message = pytest.importorskip("coterie.flower.message")
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    encoder, t = message.Encoder(), torch.zeros(1, 1000)
    one, two = (set(get_all_nested_objects(encoder.records([Parcel({}, {"t": t})]))) for _ in range(2))
    assert (len(one), len(one & two)) == (5, 3)  # of dict, record, array, chunk and header


def test_an_array_that_names_one_chunk_a_million_times_is_never_put_together(monkeypatch):
    """A megabyte would become a terabyte in the server's memory. What was asked for, of several chunks, is put together
    as ever, and so are equal chunks, which Flower sends once."""
    message = pytest.importorskip("coterie.flower.message")
    from flwr.app import Array
    from flwr.app.message import array as module
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

    monkeypatch.setattr(module, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    monkeypatch.setitem(inflatable_utils.inflatable_class_registry, "Array", Array)
    monkeypatch.setattr(message.BoundedArray, "most", 0)
    message.BoundedArray.install()
    message.BoundedArray.expect([Parcel({}, expected={"t": ((1, 1000), torch.float64)})])
    honest = Array(np.zeros((1, 1000)))

    def contents(array, body=None):
        """The objects that a node would push."""
        whole = array.deflate() if body is None else add_header_to_object_body(body, array)
        return "id", {"id": whole, **{key: chunk.deflate() for key, chunk in array.children.items()}}

    back = inflatable_utils.inflate_object_from_contents(*contents(honest))
    assert back.data == honest.data
    body = json.loads(message.get_object_body(honest.deflate(), Array))
    assert len(body["arraychunk_ids"]) == 9 > len(honest.children)
    body["arraychunk_ids"] += [body["arraychunk_ids"][1]] * 1_000_000
    with pytest.raises(CoterieError, match="an array of 1000009 chunks is larger than any that was asked for"):
        inflatable_utils.inflate_object_from_contents(*contents(honest, json.dumps(body).encode()))


def test_a_site_puts_no_more_together_than_it_has_room_for(monkeypatch):
    """What a site will be asked is not known to it before: all arrays of a message share the room that it has."""
    message = pytest.importorskip("coterie.flower.message")
    from flwr.app import Array
    from flwr.app.message import array as module
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

    monkeypatch.setattr(module, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    monkeypatch.setitem(inflatable_utils.inflatable_class_registry, "Array", Array)
    monkeypatch.setattr(message.BoundedArray, "left", None)
    message.BoundedArray.install(together=20_000)
    honest = Array(np.arange(1000.0))

    def put(names):
        body = json.loads(message.get_object_body(honest.deflate(), Array))
        body["arraychunk_ids"] = body["arraychunk_ids"] if names is None else body["arraychunk_ids"][:1] * names
        whole = add_header_to_object_body(json.dumps(body).encode(), honest)
        return inflatable_utils.inflate_object_from_contents(
            "id", {"id": whole, **{key: chunk.deflate() for key, chunk in honest.children.items()}})

    assert put(None).data == honest.data
    assert put(None).data == honest.data  # 8,128 bytes each: 3,744 are left
    with pytest.raises(CoterieError, match="an array of 9 chunks is larger than there is room for"):
        put(None)
    with pytest.raises(CoterieError, match="an array of 1000000 chunks is larger than there is room for"):
        put(1_000_000)


@pytest.fixture
def reading(monkeypatch):
    """A function that reads an object as the server app does, and what is read again after the test."""
    message = pytest.importorskip("coterie.flower.message")
    from flwr.supercore.inflatable import inflatable_utils

    monkeypatch.setattr(inflatable_utils, "inflatable_class_registry",
                        registry := dict(inflatable_utils.inflatable_class_registry))
    monkeypatch.setattr(message, "inflatable_class_registry", registry)
    monkeypatch.setattr(message.BoundedArray, "most", 1 << 20)
    monkeypatch.setattr(message.BoundedArray, "left", None)
    monkeypatch.setattr(message.BoundedHeader, "most", wire.SHORT)
    message.BoundedArray.install()
    return inflatable_utils.inflate_object_from_contents


def object_of(kind, body):
    return f"{kind}  {len(body)}".encode() + b"\0" + body


def test_what_the_apps_write_is_read_as_ever(reading):
    """Of any length: the bounds go by what is asked for."""
    message = pytest.importorskip("coterie.flower.message")
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    for text in ("", "ü", "x" * 100, "x" * 20_000, "x" * (wire.SHORT - 20)):
        tensors = {f"t{i}": torch.arange(float(i)) for i in range(300)}
        content = message.Encoder().records([Parcel({"a": text}, tensors)])
        objects = {name: one.deflate() for name, one in get_all_nested_objects(content).items()}
        (found,) = message.parcels_of(reading(content.object_id, objects))
        assert found.meta == {"a": text}
        assert all(torch.equal(found.tensors[name], t) for name, t in tensors.items())


LISTS = b'{"a":[' + b"[]," * 700_000 + b"[]]}"
TEXTS = b"{" + b",".join(b'"%d":""' % i for i in range(200_000)) + b"}"
TWO = b"\n\x0d\n\x05parts\x12\x04*\x02[]"


@pytest.mark.parametrize("content", [
    *(object_of(kind, body) for kind in ("RecordDict", "ArrayRecord", "Array") for body in (LISTS, TEXTS)),
    object_of("Array", b'{"dtype": "f", "shape": [1], "stype": "s", "arraychunk_ids": [' + b"0, " * 700_000 + b"0]}"),
    object_of("MetricRecord", b"\0" * 2_000_000), object_of("Message", b"\0" * 2_000_000),
    object_of("ConfigRecord", b"\n\0" * 1_000_000), object_of("ConfigRecord", TWO), object_of("ConfigRecord", b""),
    object_of("ConfigRecord", TWO * 100_000), object_of("ConfigRecord", b"x" * (wire.SHORT + (1 << 20))),
], ids=range(14))
def test_a_record_that_takes_much_memory_to_read_is_refused_before(reading, content):
    """60 MB of json of empty lists took 1.5 GB of the server app, a record of as many empty items more: what is longer
    than coterie's own, or of another form, takes some copies of its bytes and no more."""
    tracemalloc.start()
    try:
        with pytest.raises(CoterieError, match=r"none of coterie|another way|no text with|longer than|larger than"):
            reading("id", {"id": content})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(content) + (1 << 20)


# -- the last resort --------------------------------------------------------------------------------------------------

MARK = 0.12345


class Marked(Loopback):
    """lyon's updates begin with MARK in the rounds named; or lyon is lost there."""

    def __init__(self, sites, rounds, lost=False):
        super().__init__(sites)
        self.rounds, self.lost = rounds, lost

    def deliver(self, name, parcels):
        answers = super().deliver(name, parcels)
        if name == "lyon" and parcels[0].meta["round"] in self.rounds and "local" in parcels[0].meta.get("do", ()):
            if self.lost:
                return Failure("lost", "")
            answers[0].tensors["update"][..., 0] = MARK
        return answers


def spoiled(monkeypatch, how):
    """FedAvg with a flaw that nobody knows of: one number in an upload makes its merge go wrong."""
    merge = FedAvg.merge

    def flawed(self, server, up):
        merged = merge(self, server, up)
        if not bool((up.update[..., 0] == MARK).any()):
            return merged
        if how == "raises":
            raise IndexError("index 7 is out of bounds")
        return type(merged)(merged.row * torch.inf)

    monkeypatch.setattr(FedAvg, "merge", flawed)


@pytest.mark.parametrize("how", ["raises", "not finite"])
@pytest.mark.parametrize("method", ["fedavg", "fedavg:server=adam(lr=0.1)"])
def test_what_passes_all_checks_and_cannot_be_merged_is_left_out(tmp_path, monkeypatch, method, how):
    """The server takes the others' uploads, as if lyon had not answered; its optimizer remembers nothing of the try."""
    spoiled(monkeypatch, how)
    data, inspector = toy.federation(), Inspector(Limits(strikes=2))
    job = toy.job(data, method, rounds=4)
    line = Marked(toy.sites(data, tmp_path / "a"), (1, 2))
    (rounds,), _ = toy.run(data, [job], tmp_path / "a", line, check=inspector)
    gone = Marked(toy.sites(data, tmp_path / "b"), (1, 2, 3), lost=True)
    (absent,), _ = toy.run(data, [job], tmp_path / "b", gone)
    for name, t in absent.server.tensors().items():
        assert torch.equal(rounds.server.tensors()[name], t)
    assert [r["participants"] for r in rounds.rounds] == [4, 3, 3, 3]
    assert rounds.rounds[1]["report"]["refused"]["lyon"]["field"] == "upload"
    assert list(inspector.quarantine.held) == ["lyon"]  # two in a row


def test_where_no_one_upload_is_to_blame_the_round_is_skipped(tmp_path, monkeypatch):
    def broken(self, server, up):
        raise IndexError("index 7 is out of bounds")

    monkeypatch.setattr(FedAvg, "merge", broken)
    data, inspector = toy.federation(), Inspector()
    (rounds,), _ = toy.run(data, [toy.job(data, "fedavg")], tmp_path, check=inspector)
    assert [r["participants"] for r in rounds.rounds] == [0, 0, 0]
    assert "no one upload is to blame" in rounds.rounds[0]["report"]["skipped"]
    assert inspector.quarantine.strikes == {}


def test_a_sentence_of_the_methods_own_still_ends_the_run(tmp_path, monkeypatch):
    def refuses(self, server, up):
        raise CoterieError("this run was begun by an earlier version.")

    monkeypatch.setattr(FedAvg, "merge", refuses)
    data = toy.federation()
    with pytest.raises(CoterieError, match="earlier version"):
        toy.run(data, [toy.job(data, "fedavg")], tmp_path)


def test_a_running_variance_below_0_is_refused_by_name(tmp_path):
    """An update of usual length, all of it in the running variances: with a mean every model would answer NaN."""
    data, inspector = toy.federation(shape=(2, 32)), Inspector()
    one = toy.job(data, "fedavg", model="sensor:norm=batch", lr=0.05)
    columns = [entry for entry in one.init(one.chosen()).layout.entries if entry.name.endswith("running_var")]
    assert columns

    class Negative(Loopback):
        def deliver(self, name, parcels):
            answers = super().deliver(name, parcels)
            if name == "lyon" and "update" in answers[0].tensors:
                honest = answers[0].tensors["update"]
                wrong = torch.zeros_like(honest)
                for entry in columns:
                    wrong[0, entry.start : entry.stop] = -1
                answers[0].tensors["update"] = wrong * (4 * honest.norm() / wrong.norm())
            return answers

    (rounds,), _ = toy.run(data, [one], tmp_path, Negative(toy.sites(data, tmp_path)), check=inspector)
    assert "running_var would be negative" in rounds.rounds[0]["report"]["refused"]["lyon"]["reason"]
    assert [done["participants"] for done in rounds.rounds][:2] == [3, 3]
    row = rounds.server.state.row
    assert min(float(row[entry.start : entry.stop].min()) for entry in columns) >= 0
    assert np.isfinite(rounds.history[-1].stages["served"].test["loss"]).all()


@pytest.mark.parametrize("minimum", [1, 3])
def test_two_that_push_a_running_variance_below_0_together_are_both_refused(tmp_path, minimum):
    """Without either alone it is still below 0: leaving one site out, nobody was to blame, and 20 skipped rounds ended
    the run. An honest site's own variances are never negative, so each is told by what it sent alone. Two are left of
    four, which a policy of at least three does not merge: the culprits have their strikes all the same."""
    data, inspector = toy.federation(shape=(2, 32)), Inspector()
    one = toy.job(data, "fedavg", model="sensor:norm=batch", lr=0.05, rounds=4)
    column = next(e.start for e in one.init(one.chosen()).layout.entries if e.name.endswith("running_var"))

    class Colluding(Loopback):
        def deliver(self, name, parcels):
            answers = super().deliver(name, parcels)
            if name in ("lyon", "turin") and "update" in answers[0].tensors:
                answers[0].tensors["update"][0, column] = -9
            return answers

    line = Colluding(toy.sites(data, tmp_path / "homes"))
    policy = replace(toy.POLICY, minimum=minimum, wait=0.1)
    if minimum == 3:
        with pytest.raises(CoterieError, match="there are 2: berlin, oslo"):
            toy.run(data, [one], tmp_path, line, check=inspector, policy=policy, folder=tmp_path / "run")
        done = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        reports = [line["report"] for line in done if line["kind"] == "round"]
        assert [r["skipped"] for r in reports] == ["3 answers needed, 2 could be merged"] * 3
    else:
        (rounds,), _ = toy.run(data, [one], tmp_path, line, check=inspector, policy=policy)
        assert [done["participants"] for done in rounds.rounds] == [2, 2, 2, 2]
        reports = [done["report"] for done in rounds.rounds[:3]]
    for report in reports:
        assert sorted(report["refused"]) == ["lyon", "turin"]
        assert all("running_var would be negative" in said["reason"] for said in report["refused"].values())
    assert sorted(inspector.quarantine.held) == ["lyon", "turin"]


@pytest.mark.parametrize("sites", [("lyon",), ("berlin", "lyon")])
def test_a_hostile_shape_is_refused_alone_and_of_two(tmp_path, sites):
    """Nobody else's upload says what is right."""

    class Long(Loopback):
        def deliver(self, name, parcels):
            answers = super().deliver(name, parcels)
            if name == "lyon" and "update" in answers[0].tensors:
                answers[0].tensors["update"] = torch.zeros(1, 7, dtype=torch.float64)
            return answers

    data = toy.federation()
    policy = replace(toy.POLICY, sites=len(sites))
    line = Long(toy.sites(data, tmp_path, only=sites))
    (rounds,), _ = toy.run(data, [toy.job(data, "fedavg")], tmp_path, line, policy=policy)
    for done in rounds.rounds:
        assert done["participants"] == len(sites) - 1
        assert done["report"]["refused"] == {
            "lyon": {"field": "update", "reason": "update has shape [1, 7], not [1, 43]"}
        }
    assert ("skipped" in rounds.rounds[0]["report"]) == (len(sites) == 1)


@pytest.mark.parametrize("method", ["ditto", "fedper", "apfl"])
def test_a_count_of_two_to_the_63_moves_no_model(tmp_path, method):
    """It overflowed the sum of counts, and honest sites' own states became non-finite: now it is refused."""

    class Many(Loopback):
        def deliver(self, name, parcels):
            answers = super().deliver(name, parcels)
            if name == "lyon" and "local" in parcels[0].meta.get("do", ()):
                answers[0].meta["n"] = 2**63 - 1
            return answers

    data = toy.federation()
    (rounds,), _ = toy.run(data, [toy.job(data, method)], tmp_path / "a", Many(toy.sites(data, tmp_path / "a")))
    assert [r["report"]["refused"]["lyon"]["field"] for r in rounds.rounds] == ["n"] * 3
    few = toy.sites(data, tmp_path / "b")
    lost = Marked(few, (0, 1, 2), lost=True)
    (absent,), _ = toy.run(data, [toy.job(data, method)], tmp_path / "b", lost)
    assert torch.equal(rounds.server.state.row, absent.server.state.row)


# -- Flower's grid ----------------------------------------------------------------------------------------------------


def test_a_reply_that_flower_cannot_read_spoils_no_other(tmp_path, monkeypatch):
    """Replies are pulled one by one: who made one of nonsense is blamed for it, and everybody else has answered."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity
    from test_server import Grid

    from coterie.flower.server import PRESENT, GridTransport

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    configs = {node: {"name": name, "data": str(tmp_path / "x"), "home": str(tmp_path / name)}
               for node, name in enumerate(toy.NAMES, start=3)}

    class Broken(Grid):
        broken = False

        def pull_messages(self, ids):
            if self.broken and any(self.held[one].metadata.dst_node_id == 4 for one in ids):
                raise KeyError("no class 'Evil'")
            return super().pull_messages(ids)

    grid = Broken(configs)
    line = GridTransport(grid, poll=0.01)
    assert line.sites() == set(toy.NAMES)
    grid.broken = True
    found = line.ask({name: [PRESENT] for name in toy.NAMES}, 5, lambda got: False)
    assert {name: type(one) for name, one in found.items()} == {
        "berlin": list, "lyon": Failure, "oslo": list, "turin": list,
    }
    assert (found["lyon"].cause, found["lyon"].field) == ("rejected", "message")


@pytest.mark.parametrize("answer", [
    [], [Parcel({})], [Parcel({"site": 7})], [Parcel({"site": "../up", "protocol": wire.PROTOCOL})],
    [Parcel({"site": ["a"], "protocol": wire.PROTOCOL})], [Parcel({"site": "oslo", "protocol": 0})],
    [Parcel({"site": "oslo", "protocol": wire.PROTOCOL}, {"x": torch.zeros(3)})],
    [Parcel({"site": "oslo", "protocol": wire.PROTOCOL})] * 2, [Parcel({"error": ["x"]})],
])
def test_a_node_that_does_not_say_properly_who_it_is_is_nobody(answer, monkeypatch, tmp_path):
    pytest.importorskip("flwr")
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity
    from test_server import Grid

    from coterie.flower import client
    from coterie.flower.message import Encoder
    from coterie.flower.server import GridTransport

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(client, "answer",
                        lambda message, context: Message(Encoder().records(answer), reply_to=message))
    assert GridTransport(Grid({3: {}})).sites() == set()
