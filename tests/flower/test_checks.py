"""Bad uploads are refused with their reason, honest ones pass however much they differ, and strikes are counted."""

import json
import logging

import pytest
import torch

from coterie.contract import sent
from coterie.errors import CoterieError
from coterie.flower.checks import (
    COUNTABLE,
    UNUSABLE,
    Arrived,
    Expected,
    Inspector,
    Limits,
    Quarantine,
    Received,
    ask_to_lift,
    judge,
)
from coterie.flower.checks import refused as refused_by
from coterie.flower.wire import Failure, schema_of

SIZE = 200


def upload(scale=1.0, n=50, seed=0, loss=0.7):
    generator = torch.Generator().manual_seed(seed)
    update = scale * torch.randn(1, SIZE, generator=generator)
    return Arrived(n, {"update": update, "loss": torch.tensor([[loss, 2 * loss]])})


def changed(base, n=None, **tensors):
    return Arrived(base.n if n is None else n, {**base.tensors, **tensors})


def honest(clients=5):
    return {f"site{k}": upload(seed=k) for k in range(clients)}


EXPECTED = Expected(schema_of(upload().tensors), {"update": sent.Vectors(), "loss": sent.Losses()})


def rows(tensors):
    """What is expected where all tensors are rows."""
    return Expected(schema_of(tensors), dict.fromkeys(tensors, sent.Vectors()))


def reasons(failures):
    return {client: failure.reason for client, failure in failures.items()}


def refused(bad, expected=EXPECTED, **options):
    """The reason for the one bad upload among four honest ones; the honest ones must pass."""
    uploads = {**honest(4), "bad": bad}
    accepted, rejected = judge(uploads, expected, **options)
    assert list(accepted) == ["site0", "site1", "site2", "site3"]
    assert list(rejected) == ["bad"]
    return rejected["bad"].reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    update = upload().tensors["update"].clone()
    update[0, [3, 8]] = value
    assert refused(changed(upload(), update=update)) == "update holds 2 numbers that are not finite"


def test_one_bad_number_in_a_small_tensor_is_enough():
    loss = torch.tensor([[0.7, float("nan")]])
    assert refused(changed(upload(), loss=loss)) == "loss holds 1 number that is not finite"


@pytest.mark.parametrize("shape", [(1, SIZE + 1), (SIZE,), (50, SIZE), (1, SIZE // 2, 2), ()])
def test_wrong_shapes_are_refused(shape):
    """The third is one site that would count for fifty; the fourth has the right number of elements."""
    assert refused(changed(upload(), update=torch.ones(shape))) == f"update has shape {list(shape)}, not [1, {SIZE}]"


def test_the_shape_is_the_expected_one_whatever_others_send():
    """Alone, one of two, or with a majority: the first name's shape, or most sites', is not the measure."""
    odd = changed(upload(), update=torch.ones(1, 3))
    assert list(judge({"a": odd}, EXPECTED)[1]) == ["a"]
    assert list(judge({"a": odd, "b": upload()}, EXPECTED)[1]) == ["a"]
    assert list(judge({"a": odd, "b": odd, "c": upload()}, EXPECTED)[1]) == ["a", "b"]


@pytest.mark.parametrize(("dtype", "word"), [(torch.float64, "float64"), (torch.int32, "int32")])
def test_wrong_dtypes_are_refused(dtype, word):
    assert refused(changed(upload(), update=torch.ones(1, SIZE, dtype=dtype))) == f"update is {word}, not float32"


def test_missing_and_unexpected_names_are_refused():
    update = upload().tensors["update"]
    assert refused(Arrived(50, {"update": update})) == "missing: loss"
    assert refused(changed(upload(), raw=torch.ones(3))) == "unexpected: raw"
    assert refused(Arrived(50, {"update": update, "losses": torch.ones(2)})) == "missing: loss; unexpected: losses"
    assert refused(Arrived(50, {})) == "missing: loss, update"


@pytest.mark.parametrize("n", [0, -3, True, 2.5, "7", [1]])
def test_sample_counts_are_positive_whole_numbers(n):
    assert refused(changed(upload(), n=n)) == f"the sample count is {n!r}, not a positive whole number"


@pytest.mark.parametrize("n", [2**63 - 1, 2**63, 10**39, COUNTABLE + 1])
def test_no_count_is_so_large_that_sums_of_counts_are_wrong(n):
    """2^63 - 1 and 1 sum to -2^63 in 64 bits."""
    assert refused(changed(upload(), n=n)) == (
        f"the sample count is {n}, not a positive whole number up to {COUNTABLE}"
    )
    assert refused(upload(n=COUNTABLE)) == f"the sample count is {COUNTABLE}, more than 10000000"
    assert refused(upload(n=1001), limits=Limits(most_samples=1000)) == "the sample count is 1001, more than 1000"


@pytest.mark.parametrize(("n", "fine"), [(100, True), (25, True), (101, False), (24, False)])
def test_a_sample_count_may_change_by_the_factor_and_no_more(n, fine):
    """From 50, a factor of 2 leads to 25 and to 100; both ends are allowed."""
    uploads = {**honest(3), "bad": upload(n=n)}
    accepted, rejected = judge(uploads, EXPECTED, declared={"bad": 50, "site0": 50})
    assert ("bad" in accepted) is fine
    said = {} if fine else {"bad": f"the sample count went from 50 to {n}, by more than a factor of 2"}
    assert reasons(rejected) == said
    assert judge(uploads, EXPECTED, Limits(samples=None), declared={"bad": 50})[1] == {}  # allowed by option
    assert judge(uploads, EXPECTED)[1] == {}  # it has declared nothing


def test_an_update_a_thousand_times_as_long_is_refused():
    """The median of five norms is that of the honest ones, about sqrt(200); the bad one is 1000 times its own."""
    reason = refused(upload(scale=1000.0, seed=9))
    assert reason.startswith("update is ")
    assert reason.endswith("more than 10; `norm` under [limits] allows more")
    times = float(reason.split()[2])
    assert 800 < times < 1250  # norms of 200 normal numbers differ by about 5 %, so 20 % is four standard deviations
    uploads = {**honest(4), "bad": upload(scale=1000.0)}
    assert judge(uploads, EXPECTED, Limits(norm=None))[1] == {}  # off by option


def test_the_bound_is_exact():
    """Norms 1, 1, 1, 10 and 10.1 have the median 1: 10 times is allowed, 10.1 is not."""
    uploads = {}
    for k, norm in enumerate((1, 1, 1, 10, 10.1)):
        uploads[str(k)] = Arrived(5, {"update": torch.tensor([[norm, 0.0]], dtype=torch.float64)})
    accepted, rejected = judge(uploads, rows(uploads["0"].tensors))
    assert list(accepted) == ["0", "1", "2", "3"]
    said = "update is 10.1 times as long as the median (10.1), more than 10; `norm` under [limits] allows more"
    assert rejected == {"4": Failure("unusual", said, "update")}


@pytest.mark.parametrize(("n", "most"), [(200, 200), (10, 10), (5, 10)])
def test_a_client_with_more_samples_may_go_further(n, most):
    """One of 200 samples among those of 10 takes 20 times the steps in an epoch: 10 times the median's length is its
    usual one, and 200 times the most. Fewer samples take nothing away."""
    usual = {str(k): Arrived(10, {"u": torch.tensor([[1.0, 0.0]])}) for k in range(4)}
    expected = rows(usual["0"].tensors)
    assert judge({**usual, "a": Arrived(n, {"u": torch.tensor([[0.99 * most, 0.0]])})}, expected)[1] == {}
    said = f"as long as the median ({1.01 * most:.3g}), more than {most}; `norm` under [limits] allows more"
    _, wrong = judge({**usual, "a": Arrived(n, {"u": torch.tensor([[1.01 * most, 0.0]])})}, expected)
    assert wrong["a"].reason.endswith(said)


def test_honest_sites_that_differ_pass():
    """Norms from 1/50 to 5 times the usual, counts from 3 to 30,000, losses from 1e-4 to 7: all of that is honest."""
    uploads = {f"site{k}": upload(seed=k) for k in range(5)}
    uploads["short"] = upload(scale=0.02, n=3, loss=7.0)
    uploads["long"] = upload(scale=5.0, n=30_000, loss=1e-4)
    accepted, rejected = judge(uploads, EXPECTED)
    assert rejected == {}
    assert accepted == uploads


def test_the_result_is_that_of_any_order():
    uploads = {**honest(4), "bad": upload(scale=1000.0), "worse": changed(upload(), n=0)}
    shuffled = dict(reversed(uploads.items()))
    one, other = judge(uploads, EXPECTED), judge(shuffled, EXPECTED)
    assert one[0].keys() == other[0].keys()
    assert one[1] == other[1]


def test_small_cohorts_have_no_norm_check():
    """One or two uploads have no median that could tell the honest from the other."""
    pair = {"a": upload(), "b": upload(scale=1000.0)}
    assert judge({"b": pair["b"]}, EXPECTED) == ({"b": pair["b"]}, {})
    assert judge(pair, EXPECTED) == (pair, {})


def test_uploads_that_failed_before_do_not_count_for_the_median():
    """Two sound uploads and two with NaN are two, so no norm is compared."""
    broken = changed(upload(), loss=torch.full((1, 2), float("nan")))
    accepted, rejected = judge({"a": upload(), "b": upload(scale=1000.0), "c": broken, "d": broken}, EXPECTED)
    assert sorted(accepted) == ["a", "b"]
    assert list(rejected) == ["c", "d"]


def test_when_all_are_bad_nothing_is_left():
    uploads = {str(k): changed(upload(), loss=torch.full((1, 2), float("nan"))) for k in range(4)}
    accepted, rejected = judge(uploads, EXPECTED)
    assert accepted == {}
    assert list(rejected) == list("0123")
    assert judge({}, EXPECTED) == ({}, {})


def test_a_median_of_zero_bounds_nothing():
    """Sites that did not move must not make the one that did look bad."""
    still = Arrived(5, {"u": torch.zeros(1, 4)})
    uploads = {"a": still, "b": still, "c": still, "d": Arrived(5, {"u": torch.ones(1, 4)})}
    assert judge(uploads, rows(still.tensors))[1] == {}


def test_numbers_that_float32_cannot_reckon_with_are_refused_alone_too():
    """1e38 is finite, and the sum of four such is not."""
    huge = Arrived(5, {"u": torch.full((1, 4), 1e38)})
    assert reasons(judge({"a": huge}, rows(huge.tensors))[1]) == {"a": "u holds numbers above 1e+30"}
    assert reasons(judge({"a": huge}, Expected(schema_of(huge.tensors)))[1]) == {"a": "u holds numbers above 1e+30"}


def test_whole_numbers_and_empty_uploads_are_fine():
    """A method may upload a cluster's number, or nothing at all."""
    choice = {str(k): Arrived(5, {"choice": torch.tensor([k])}) for k in range(4)}
    assert judge(choice, Expected(schema_of(choice["0"].tensors), {"choice": sent.Index()}, rows=4))[1] == {}
    assert judge({str(k): Arrived(5, {}) for k in range(4)}, Expected())[1] == {}


@pytest.mark.parametrize(("told", "good", "bad", "said"), [
    (sent.Index(), [[0, 2]], [[0, 3]], "holds numbers above 2"),
    (sent.Index(), [[0, 2]], [[-1, 2]], "holds numbers below 0"),
    (sent.Index(), [[0, 2]], [[0.0, 2.0]], "is float32, not int64"),
    (sent.Ranks(), [[1, 4]], [[1, 5]], "holds numbers above 4"),
    (sent.Ranks(), [[1, 4]], [[0, 4]], "holds numbers below 1"),
    (sent.Ranks(), [[1, 4]], [[1.0, 4.0]], "is float32, not int64"),
    (sent.Counts(), [[2.0, 3.0]], [[2.0, 4.0]], "counts 6 samples in all, not 5"),
    (sent.Counts(), [[2.0, 3.0]], [[6.0, -1.0]], "holds numbers below 0"),
    (sent.Counts(), [[2.0, 3.0]], [[2.5, 2.5]], "holds counts that are no whole numbers"),
    (sent.Shares(), [[0.25, 0.75]], [[0.25, 0.5]], "holds shares that do not sum to 1"),
    (sent.Shares(), [[0.25, 0.75]], [[1.5, -0.5]], "holds numbers below 0"),
    (sent.Directions(), [[[0.6, 0.8]]], [[[0.8, 0.8]]], "holds vectors longer than 1"),
    (sent.Directions(axis=0), [[[0.6, 0.8]]], [[[0.6, 1.1]]], "holds vectors longer than 1"),
    (sent.Numbers(above=0, at_most=1), [[1e-4, 1.0]], [[0.0, 1.0]], "holds numbers that are not above 0"),
    (sent.Numbers(above=0, at_most=1), [[1e-4, 1.0]], [[0.5, 1.1]], "holds numbers above 1"),
    (sent.Losses(), [[0.0, 5.0]], [[-0.1, 5.0]], "holds numbers below 0"),
    (sent.Vectors(at_least=0), [[0.0, 5.0]], [[-0.1, 5.0]], "holds numbers below 0"),
])
def test_what_a_method_declares_of_a_tensor_holds(told, good, bad, said):
    """A site has 5 samples, the server 3 models, and the model adapters of rank 4 at most."""
    fine, wrong = (Arrived(5, {"t": torch.tensor(values)}) for values in (good, bad))
    expected = Expected(schema_of(fine.tensors), {"t": told}, rows=3, rank=4)
    assert judge({"a": fine}, expected)[1] == {}
    assert judge({"a": wrong}, expected)[1] == {"a": Failure("rejected", f"t {said}", "t")}


def test_one_high_loss_does_not_take_the_round():
    """Ten times the constant answer's, log 3, is 10.99: above it the least loss is compared with the median. Of two
    sites, too, and where most have high losses a higher one is fine."""
    expected = Expected(EXPECTED.schema, EXPECTED.holds, constant=1.0986)
    assert refused(upload(loss=1e9), expected) == (
        "loss is at least 1e+09, more than 11; `loss` under [limits] allows more"
    )
    assert reasons(judge({"a": upload(), "b": upload(loss=12.0)}, expected)[1]) == {
        "b": "loss is at least 12, more than 11; `loss` under [limits] allows more"
    }
    high = {str(k): upload(loss=9.0 + 3 * k) for k in range(4)}
    assert judge(high, expected)[1] == {}  # the lower median is 12, and 120 the most
    assert judge({"a": upload(loss=1e9)}, expected)[1] == {}  # alone it is its own measure
    one_model = changed(upload(), loss=torch.tensor([[0.5, 1e9]]))  # a model that suits others may suit it not at all
    assert judge({**honest(3), "a": one_model}, expected)[1] == {}
    assert judge({**honest(3), "a": upload(loss=1e9)}, expected, Limits(loss=None))[1] == {}


def test_sums_over_samples_are_compared_sample_by_sample():
    """Features summed over 1000 samples are 200 times as long as over 5; the variance of a mean is as much smaller."""
    few, many = (Arrived(n, {"f": torch.full((1, 4), float(n)), "V": torch.full((1,), 1 / n)}) for n in (5, 1000))
    uploads = {"a": few, "b": few, "c": few, "d": many}
    holds = {"f": sent.Vectors(grows=1), "V": sent.Vectors(grows=-1, at_least=0)}
    assert judge(uploads, Expected(schema_of(few.tensors), holds))[1] == {}
    assert list(judge({**dict.fromkeys("abc", many), "d": changed(many, f=11 * many.tensors["f"])},
                      Expected(schema_of(few.tensors), holds))[1]) == ["d"]
    longer = changed(many, f=11 * many.tensors["f"])  # known to grow with n, so there is no room beside that
    assert list(judge({**uploads, "d": longer}, Expected(schema_of(few.tensors), holds))[1]) == ["d"]
    assert list(judge({**dict.fromkeys("abc", many), "d": few}, rows(few.tensors))[1]) == ["d"]


@pytest.mark.parametrize("limits", [
    {"norm": 1.0}, {"norm": float("nan")}, {"loss": 0.5}, {"samples": 0.5}, {"strikes": 0}, {"most_samples": 0},
    {"most_samples": 2**63},
])
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


def received(uploads, kind="round", wrong=None, expected=EXPECTED):
    """As the server hands it over."""
    tensors = {site: found.tensors for site, found in uploads.items()}
    return Received("e", kind, 0, tensors, {site: found.n for site, found in uploads.items()}, expected, wrong or {})


def test_a_guard_remembers_over_a_restart(tmp_path):
    """Two strikes before the server's restart and one after it make three; lifting survives a restart too."""
    uploads = {**honest(4), "bad": upload(n=0)}
    for strike in range(3):
        gate = Inspector(folder=tmp_path / "run")
        assert gate.barred() == set()
        assert list(refused_by(gate, received(uploads))) == ["bad"], strike
    assert gate.barred() == {"bad"}
    assert Inspector(folder=tmp_path / "run").barred() == {"bad"}
    ask_to_lift(tmp_path / "run", "bad")
    assert Inspector(folder=tmp_path / "run").barred() == set()
    assert Inspector(folder=tmp_path / "run").barred() == set()


@pytest.mark.parametrize("unusual", [upload(scale=1000.0), upload(loss=1e9)])
def test_who_is_unlike_the_others_is_left_out_and_never_quarantined(unusual, caplog):
    """The only holder of a class moves further than the rest in every round, and means no harm: it costs the round, and
    the log says what allows more. It wipes off no strikes either, or a site could take turns."""
    gate, uploads = Inspector(), {**honest(4), "odd": unusual}
    assert list(refused_by(gate, received({**honest(4), "odd": upload(n=0)}))) == ["odd"]
    caplog.clear()
    with caplog.at_level("WARNING", "coterie.server"):
        for _ in range(5):
            assert [failure.cause for failure in refused_by(gate, received(uploads)).values()] == ["unusual"]
    assert all(line.startswith("odd: unusual for ") and line.endswith("under [limits] allows more")
               for line in caplog.messages)
    assert (gate.quarantine.strikes, gate.quarantine.held) == ({"odd": 1}, {})


def test_a_guard_compares_sample_counts_with_what_was_declared(tmp_path):
    """A factor of 2 from one round to the next would be a factor of 1024 after ten."""
    gate = Inspector(folder=tmp_path)
    assert refused_by(gate, received({"a": upload(n=50), "b": upload(n=50)}, "introduce")) == {}
    assert refused_by(gate, received({"a": upload(n=90), "b": upload(n=60)})) == {}
    again = Inspector(folder=tmp_path)
    assert reasons(refused_by(again, received({"a": upload(n=160), "b": upload(n=60)}))) == {
        "a": "the sample count went from 50 to 160, by more than a factor of 2"
    }
    first = Inspector()  # of a run that an earlier version began: the first count stands for what was declared
    assert refused_by(first, received({"a": upload(n=50)})) == {}
    assert list(refused_by(first, received({"a": upload(n=101)}))) == ["a"]
    assert "not a positive" in refused_by(gate, received({"a": Arrived(None, upload().tensors)}))["a"].reason


def test_who_declares_more_than_all_others_together_is_named(caplog):
    """Nobody can check a count, and in a mean it is a weight: 10 million among sites of 50 are all of the model."""
    caplog.set_level(logging.WARNING, "coterie.server")
    counts = {"a": 50, "b": 60, "c": 100, "d": 10_000_000}
    assert refused_by(Inspector(), received({k: upload(n=n) for k, n in counts.items()}, "introduce")) == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("d declares 10000000 training samples, more than all 3 others together (210)")
    caplog.clear()
    refused_by(Inspector(), received({k: upload(n=n) for k, n in (("a", 50), ("b", 60), ("c", 110))}, "introduce"))
    assert not caplog.records


def test_introductions_have_no_norm_bound():
    broken = changed(upload(), loss=torch.full((1, 2), torch.nan))
    uploads = {**honest(4), "long": upload(scale=1000.0), "bad": broken}
    assert list(refused_by(Inspector(), received(uploads, "introduce"))) == ["bad"]
    assert refused_by(Inspector(), received({})) == {}


def test_what_is_not_sound_is_refused_and_a_strike_whatever_the_check(tmp_path):
    """Without a check, too; and what was wrong with an answer from the start is a strike like any other."""
    uploads = {**honest(3), "bad": changed(upload(), n=-1)}
    assert list(refused_by(None, received(uploads))) == ["bad"]
    gate = Inspector()
    late = {"worse": Failure("mismatch", "of another layout", "layout")}
    assert list(refused_by(gate, received(uploads, wrong=late))) == ["bad"]
    assert gate.quarantine.strikes == {"bad": 1, "worse": 1}


def test_what_turns_out_to_be_of_no_use_is_a_strike_more_and_not_the_first():
    gate = Inspector()
    why = {"a": Failure("rejected", "it cannot be merged", "upload")}
    for strikes in (1, 2, 3):
        assert refused_by(gate, received(honest(3) | {"a": upload()})) == {}
        refused_by(gate, received({}, UNUSABLE, why))
        assert gate.quarantine.strikes == {"a": strikes}
    assert gate.barred() == {"a"}


def test_a_damaged_record_is_a_sentence(tmp_path):
    (tmp_path / "checks.json").write_text("{")
    with pytest.raises(CoterieError, match="is damaged"):
        Inspector(folder=tmp_path)
