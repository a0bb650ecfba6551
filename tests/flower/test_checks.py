"""Bad uploads are refused with their reason, honest ones pass however much they differ, and strikes are counted."""

import json

import pytest
import torch

from coterie.errors import CoterieError
from coterie.flower.checks import (
    Arrived,
    Inspector,
    Limits,
    Quarantine,
    Received,
    agreed,
    ask_to_lift,
    judge,
    large,
    schema_of,
)

SIZE = 200


def upload(scale=1.0, n=50, seed=0, loss=0.7):
    generator = torch.Generator().manual_seed(seed)
    update = scale * torch.randn(SIZE, generator=generator)
    return Arrived(n, {"update": update, "loss": torch.tensor([loss, 2 * loss])})


def changed(base, n=None, **tensors):
    return Arrived(base.n if n is None else n, {**base.tensors, **tensors})


def honest(clients=5):
    return {f"site{k}": upload(seed=k) for k in range(clients)}


SCHEMA = schema_of(upload().tensors)


def refused(bad, **options):
    """The reason for the one bad upload among four honest ones; the honest ones must pass."""
    uploads = {**honest(4), "bad": bad}
    accepted, rejected = judge(uploads, SCHEMA, **options)
    assert list(accepted) == ["site0", "site1", "site2", "site3"]
    assert [client for client, _ in rejected] == ["bad"]
    return rejected[0][1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    update = upload().tensors["update"].clone()
    update[[3, 8]] = value
    assert refused(changed(upload(), update=update)) == "update holds 2 numbers that are not finite"


def test_one_bad_number_in_a_small_tensor_is_enough():
    loss = torch.tensor([0.7, float("nan")])
    assert refused(changed(upload(), loss=loss)) == "loss holds 1 number that is not finite"


@pytest.mark.parametrize("shape", [(SIZE + 1,), (1, SIZE), (SIZE // 2, 2), ()])
def test_wrong_shapes_are_refused(shape):
    """The third has the right number of elements, and is refused all the same."""
    assert refused(changed(upload(), update=torch.ones(shape))) == f"update has shape {list(shape)}, not [{SIZE}]"


@pytest.mark.parametrize(("dtype", "word"), [(torch.float64, "float64"), (torch.int32, "int32")])
def test_wrong_dtypes_are_refused(dtype, word):
    assert refused(changed(upload(), update=torch.ones(SIZE, dtype=dtype))) == f"update is {word}, not float32"


def test_missing_and_unexpected_names_are_refused():
    update = upload().tensors["update"]
    assert refused(Arrived(50, {"update": update})) == "missing: loss"
    assert refused(changed(upload(), raw=torch.ones(3))) == "unexpected: raw"
    assert refused(Arrived(50, {"update": update, "losses": torch.ones(2)})) == "missing: loss; unexpected: losses"
    assert refused(Arrived(50, {})) == "missing: loss, update"


@pytest.mark.parametrize("n", [0, -3, True, 2.5])
def test_sample_counts_are_positive_whole_numbers(n):
    assert refused(changed(upload(), n=n)) == f"the sample count is {n!r}, not a positive whole number"


@pytest.mark.parametrize(("n", "fine"), [(100, True), (25, True), (101, False), (24, False)])
def test_a_sample_count_may_change_by_the_factor_and_no_more(n, fine):
    """From 50, a factor of 2 leads to 25 and to 100; both ends are allowed."""
    uploads = {**honest(3), "bad": upload(n=n)}
    accepted, rejected = judge(uploads, SCHEMA, before={"bad": 50, "site0": 50})
    assert ("bad" in accepted) is fine
    assert rejected == ([] if fine else [("bad", f"the sample count went from 50 to {n}, by more than a factor of 2")])
    assert judge(uploads, SCHEMA, Limits(samples=None), before={"bad": 50})[1] == []  # allowed by option
    assert judge(uploads, SCHEMA)[1] == []  # nothing is known of the round before


def test_an_update_a_thousand_times_as_long_is_refused():
    """The median of five norms is that of the honest ones, about sqrt(200); the bad one is 1000 times its own."""
    reason = refused(upload(scale=1000.0, seed=9))
    assert reason.startswith("update is ")
    assert reason.endswith("more than 10")
    times = float(reason.split()[2])
    assert 800 < times < 1250  # norms of 200 normal numbers differ by about 5 %, so 20 % is four standard deviations
    uploads = {**honest(4), "bad": upload(scale=1000.0)}
    assert judge(uploads, SCHEMA, Limits(norm=None))[1] == []  # off by option


def test_the_bound_is_exact():
    """Norms 1, 1, 1, 10 and 10.1 have the median 1: 10 times is allowed, 10.1 is not."""
    uploads = {}
    for k, norm in enumerate((1, 1, 1, 10, 10.1)):
        uploads[str(k)] = Arrived(5, {"update": torch.tensor([norm, 0.0], dtype=torch.float64)})
    accepted, rejected = judge(uploads, schema_of(uploads["0"].tensors))
    assert list(accepted) == ["0", "1", "2", "3"]
    assert rejected == [("4", "update is 10.1 times as long as the median (10.1), more than 10")]


def test_honest_sites_that_differ_pass():
    """Norms from 1/50 to 5 times the usual, counts from 3 to 30,000, losses from 1e-4 to 40: all of that is honest."""
    uploads = {f"site{k}": upload(seed=k) for k in range(5)}
    uploads["short"] = upload(scale=0.02, n=3, loss=40.0)
    uploads["long"] = upload(scale=5.0, n=30_000, loss=1e-4)
    accepted, rejected = judge(uploads, SCHEMA)
    assert rejected == []
    assert accepted == uploads


def test_the_result_is_that_of_any_order():
    uploads = {**honest(4), "bad": upload(scale=1000.0), "worse": changed(upload(), n=0)}
    shuffled = dict(reversed(uploads.items()))
    one, other = judge(uploads, SCHEMA), judge(shuffled, SCHEMA)
    assert one[0].keys() == other[0].keys()
    assert sorted(one[1]) == sorted(other[1])


def test_small_cohorts_have_no_norm_check():
    """One or two uploads have no median that could tell the honest from the other."""
    pair = {"a": upload(), "b": upload(scale=1000.0)}
    assert judge({"b": pair["b"]}, SCHEMA) == ({"b": pair["b"]}, [])
    assert judge(pair, SCHEMA) == (pair, [])


def test_uploads_that_failed_before_do_not_count_for_the_median():
    """Two sound uploads and two with NaN are two, so no norm is compared."""
    broken = changed(upload(), loss=torch.full((2,), float("nan")))
    accepted, rejected = judge({"a": upload(), "b": upload(scale=1000.0), "c": broken, "d": broken}, SCHEMA)
    assert sorted(accepted) == ["a", "b"]
    assert [client for client, _ in rejected] == ["c", "d"]


def test_when_all_are_bad_nothing_is_left():
    uploads = {str(k): changed(upload(), loss=torch.full((2,), float("nan"))) for k in range(4)}
    accepted, rejected = judge(uploads, SCHEMA)
    assert accepted == {}
    assert [client for client, _ in rejected] == list("0123")
    assert judge({}, SCHEMA) == ({}, [])


def test_a_norm_beyond_all_numbers_is_refused_even_when_most_have_it():
    """1e300 squared is no double, so the norm is infinite; a median of infinity must not make that the measure."""
    huge = {str(k): Arrived(5, {"u": torch.full((4,), 1e300, dtype=torch.float64)}) for k in range(3)}
    huge["fine"] = Arrived(5, {"u": torch.ones(4, dtype=torch.float64)})
    accepted, rejected = judge(huge, schema_of(huge["fine"].tensors))
    assert list(accepted) == ["fine"]
    assert len(rejected) == 3


def test_a_median_of_zero_bounds_nothing():
    """Sites that did not move must not make the one that did look bad."""
    still = Arrived(5, {"u": torch.zeros(4)})
    uploads = {"a": still, "b": still, "c": still, "d": Arrived(5, {"u": torch.ones(4)})}
    assert judge(uploads, schema_of(still.tensors))[1] == []


def test_what_is_large():
    """A tenth of 1000 elements is 100; whole numbers have no norm that would mean something."""
    shapes = {"update": (10, 100), "head": (100,), "loss": (3,)}
    schema = {**{name: (shape, torch.float32) for name, shape in shapes.items()}, "choice": ((5000,), torch.int64)}
    assert large(schema) == ["update", "head"]
    assert large({"choice": ((), torch.int64)}) == []
    assert large({}) == []


def test_whole_numbers_and_empty_uploads_are_fine():
    """A method may upload a cluster's number, or nothing at all."""
    choice = {str(k): Arrived(5, {"choice": torch.tensor(k)}) for k in range(4)}
    assert judge(choice, schema_of(choice["0"].tensors))[1] == []
    assert judge({str(k): Arrived(5, {}) for k in range(4)}, {})[1] == []


def test_the_schema_of_the_majority():
    odd = Arrived(5, {"update": torch.zeros(3)})
    assert agreed({"a": odd, **honest(3)}) == SCHEMA
    assert agreed({"a": odd, "b": upload()}) == schema_of(odd.tensors)  # a tie: the first name decides
    with pytest.raises(CoterieError, match="no uploads"):
        agreed({})


@pytest.mark.parametrize("limits", [{"norm": 1.0}, {"norm": float("nan")}, {"samples": 0.5}, {"strikes": 0}])
def test_limits_that_mean_nothing_are_refused(limits):
    with pytest.raises(CoterieError, match="not"):
        Limits(**limits)


# -- quarantine -------------------------------------------------------------------------------------------------------


def test_three_in_a_row_are_quarantined():
    record = Quarantine()
    assert record.note(["a"], [("b", "x")]) == []
    assert record.note(["a"], [("b", "y")]) == []
    assert not record.holds("b")
    assert record.note(["a"], [("b", "z")]) == ["b"]
    assert record.holds("b")
    assert record.held == {"b": "z"}
    assert not record.holds("a")
    assert record.note([], [("b", "again")]) == []  # it is held already, and the reason that led to it stays
    assert record.held == {"b": "z"}


def test_an_accepted_upload_clears_the_strikes_and_silence_does_not():
    record = Quarantine()
    for accepted, rejected in (([], ["b"]), ([], ["b"]), (["b"], []), ([], ["b"]), ([], ["b"]), ([], [])):
        assert record.note(accepted, [(client, "x") for client in rejected]) == []
    assert record.note([], [("b", "x")]) == ["b"]  # two before the silent round and one after it


def test_the_record_survives_in_a_checkpoint():
    """What is saved is json, and the record goes on where it was."""
    record = Quarantine(limit=2)
    record.note([], [("a", "x"), ("b", "x")])
    record.note(["b"], [("a", "y"), ("c", "x")])
    again = Quarantine.of(json.loads(json.dumps(record.state())))
    assert again == record
    assert again.note([], [("c", "z")]) == ["c"]
    assert record.strikes["c"] == 1  # a copy, not the same dict


def test_lifting_is_by_a_file_in_the_folder(tmp_path):
    record = Quarantine(limit=1)
    record.note([], [("a", "x"), ("b", "x"), ("c", "x")])
    assert record.obey(tmp_path) == []
    ask_to_lift(tmp_path, "a")
    ask_to_lift(tmp_path, "unknown")
    (tmp_path / "lift").open("a").write("c\na\n\n")
    assert record.obey(tmp_path) == ["a", "c"]
    assert list(record.held) == ["b"]
    assert list(tmp_path.iterdir()) == []
    assert record.obey(tmp_path) == []  # a quarantine is lifted once, not for ever
    assert record.note([], [("a", "x")]) == ["a"]


def test_a_server_killed_while_lifting_does_it_the_next_time(tmp_path):
    record = Quarantine(limit=1)
    record.note([], [("a", "x")])
    (tmp_path / "lift.taken").write_text("a\n")
    assert record.obey(tmp_path) == ["a"]


def test_lifting_needs_a_quarantined_client_and_a_folder(tmp_path):
    with pytest.raises(CoterieError, match="quarantined are: none"):
        Quarantine().lift("a")
    with pytest.raises(CoterieError, match="not a folder"):
        ask_to_lift(tmp_path / "nowhere", "a")


# -- the gate of a server --------------------------------------------------------------------------------------------


def received(uploads, kind="round", n=None):
    """As the server hands it over: a client axis on every tensor."""
    tensors = {site: {name: t[None] for name, t in found.tensors.items()} for site, found in uploads.items()}
    counts = {site: found.n for site, found in uploads.items()} if n is None else n
    return Received("e", kind, 0, tensors, counts)


def test_a_guard_remembers_over_a_restart(tmp_path):
    """Two strikes before the server's restart and one after it make three; lifting survives a restart too."""
    uploads = {**honest(4), "bad": upload(scale=1000.0)}
    for strike in range(3):
        gate = Inspector(folder=tmp_path / "run")
        assert gate.barred() == set()
        assert list(gate(received(uploads))) == ["bad"], strike
    assert gate.barred() == {"bad"}
    assert Inspector(folder=tmp_path / "run").barred() == {"bad"}
    ask_to_lift(tmp_path / "run", "bad")
    assert Inspector(folder=tmp_path / "run").barred() == set()
    assert Inspector(folder=tmp_path / "run").barred() == set()


def test_a_guard_compares_sample_counts_with_the_last_accepted_ones():
    gate = Inspector()
    assert gate(received({"a": upload(n=50), "b": upload(n=50)})) == {}
    assert gate(received({"a": upload(n=90), "b": upload(n=500)})) == {
        "b": "the sample count went from 50 to 500, by more than a factor of 2"
    }
    assert gate(received({"a": upload(n=160), "b": upload(n=60)})) == {}  # 90 -> 160, and 50 -> 60
    assert "not a positive" in gate(received({"a": upload()}, n={}))["a"]  # a count that did not come is none


def test_introductions_have_no_count_and_no_norm_bound():
    uploads = {**honest(4), "long": upload(scale=1000.0), "bad": changed(upload(), loss=torch.full((2,), torch.nan))}
    assert list(Inspector()(received(uploads, "introduce", {}))) == ["bad"]
    assert Inspector()(received({})) == {}


def test_a_damaged_record_is_a_sentence(tmp_path):
    (tmp_path / "checks.json").write_text("{")
    with pytest.raises(CoterieError, match="is damaged"):
        Inspector(folder=tmp_path)
