"""Where clients' states live changes nothing but the place; waves follow from free memory and change nothing at all."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from coterie import memory
from coterie.engine import store, waves
from coterie.engine.store import Store
from coterie.errors import CoterieError
from coterie.running import checkpoint, round, runs

PLACES = ("device", "host", "disk")
CPU = torch.device("cpu")
GB = 1 << 30
MAPS = Path("/proc/self/maps")


# -- the tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_what_was_put_is_taken_and_the_others_stay(place):
    """A table is `[M, ...]`: take gives the slices of the clients named, in their order, as copies."""
    kept = Store(5, CPU, place)
    kept.open({"row": torch.zeros(2, 3), "count": torch.zeros(2, dtype=torch.int64)})
    everyone = np.arange(5)
    kept.put(everyone, {"row": torch.arange(15.0).view(5, 3), "count": torch.arange(5)})
    kept.put(np.array([3, 1]), {"row": torch.tensor([[1.0] * 3, [2.0] * 3]), "count": torch.tensor([-3, -1])})
    kept.ahead(np.array([4, 3]))
    found = kept.take(np.array([4, 3]))
    assert found["row"].tolist() == [[12.0, 13.0, 14.0], [1.0] * 3]
    assert found["count"].tolist() == [4, -3]
    found["row"].zero_()
    assert kept.take(everyone)["row"].tolist() == [[0.0, 1.0, 2.0], [2.0] * 3, [6.0, 7.0, 8.0], [1.0] * 3,
                                                   [12.0, 13.0, 14.0]]


@pytest.mark.parametrize("place", PLACES)
def test_tables_of_strange_shapes(place):
    """No field at all, a field without columns, and one number a client, each as it was put."""
    kept = Store(3, CPU, place)
    assert kept.take(np.array([1])) == {}
    kept.replace({"none": torch.zeros(3, 0), "one": torch.tensor([True, False, True])})
    assert kept.take(np.array([1, 2]))["one"].tolist() == [False, True]
    assert kept.take(np.array([1, 2]))["none"].shape == (2, 0)


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists what a process has mapped")
def test_files_are_mapped_and_leave_nothing_behind(monkeypatch, tmp_path):
    """A table on disk is a shared file mapping; the file has lost its name by then, so no killed run leaves one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = Store(4, CPU, "disk")
    kept.replace({"row": torch.ones(4, 3)})
    assert kept.take(np.array([2]))["row"].tolist() == [[1.0] * 3]
    assert str(tmp_path) in MAPS.read_text()
    assert list(tmp_path.iterdir()) == []
    del kept
    gc.collect()
    assert str(tmp_path) not in MAPS.read_text()


def test_a_disk_that_is_full_is_said_in_one_sentence(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CoterieError, match=r"need 0\.8 GB in .*No space left on device.*TMPDIR"):
        Store(1000, CPU, "disk").open({"row": torch.zeros(1, 200_000)})


def test_the_place_is_chosen_from_free_memory(monkeypatch):
    """On CUDA a quarter of its memory if everybody takes part; half of the host's; then the disk."""
    free = {"cuda": 40 * GB, "cpu": 20 * GB}
    monkeypatch.setattr(memory, "free", lambda device: free[device.type])
    cuda = torch.device("cuda")
    assert store.choose(10 * GB, True, cuda) == "device"
    assert store.choose(10 * GB, False, cuda) == "host"
    assert store.choose(10 * GB + 1, True, cuda) == "disk"
    assert store.choose(10 * GB, True, CPU) == "host"
    assert store.choose(10 * GB + 1, True, CPU) == "disk"


def test_free_memory_is_a_plausible_number():
    """No more than the machine has, and a process can still take a megabyte of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 << 20 < memory.free(CPU) <= total


# -- runs -------------------------------------------------------------------------------------------------------------


CASES = {"ditto": ("mlp", {}), "apfl": ("dropout", {}), "fedavg": ("bn", {"buffers": "local"}),
         "fedfew:models=2": ("bn", {"buffers": "local"})}


@pytest.mark.parametrize("method", CASES)
def test_runs_do_not_depend_on_the_place(tiny, method):
    """Nothing but the storage differs, so state and scores have the same bits; so have runs resumed elsewhere."""
    model, options = CASES[method]
    options = options | {"participation": 0.5, "wave": 2}
    sims = [tiny.simulation(method, model, data=tiny.federation(sizes=(6, 3, 1, 5, 4, 9)), state=place, **options)
            for place in PLACES]
    assert [sim.choices["state"] for sim in sims] == list(PLACES)
    for sim in sims:
        for _ in range(3):
            sim.round()
    for sim in sims[1:]:
        tiny.same(tiny.state(sim), tiny.state(sims[0]))
    middle = sims[0].snapshot()
    sims[0].round()
    expected, scores = tiny.state(sims[0]), sims[0].evaluate().stages["adapted"]
    for place in PLACES:
        data = tiny.federation(sizes=(6, 3, 1, 5, 4, 9))
        again = tiny.simulation(method, model, data=data, state=place, choices=middle[1]["choices"], **options)
        again.restore(*middle)
        assert again.choices["state"] == place
        again.round()
        tiny.same(tiny.state(again), expected)
        np.testing.assert_array_equal(again.evaluate().stages["adapted"].test["loss"], scores.test["loss"])


def test_a_folder_is_resumed_with_another_place(tiny, tmp_path):
    """Half a run on disk, the rest in memory: the digest of the final state is that of a run in one place."""
    options = {"batch": 3, "lr": 0.1, "device": "cpu", "precision": "float64", "participation": 0.5,
               "checkpoint_every": 1, "evaluate_every": 2}
    data = tiny.federation()

    def go(name, **more):
        return runs.run("ditto", tiny.mlp, data, folder=tmp_path / name, **options, **more)

    go("whole", rounds=4, state="host")
    go("half", rounds=2, state="disk")
    (tmp_path / "half" / "result.json").unlink()
    go("half", rounds=4, state="host", resume=True)
    results = [(tmp_path / name / "result.json").read_text() for name in ("whole", "half")]
    digests = [text.split('"rows_sha256": ')[1] for text in results]
    assert digests[0] == digests[1]


def test_a_method_without_states_records_no_place(tiny):
    assert "state" not in tiny.simulation("fedavg").choices
    assert tiny.simulation("ditto").choices["state"] == "host"


def test_two_thousand_clients_and_one_in_a_hundred_a_round(tiny):
    """20 of 2,000 a round in one wave, evaluation in waves of 160: the states of all others keep their bits, and the
    scores are those of waves of another size."""
    data = tiny.federation(sizes=(4, 3, 2, 5) * 500)
    sims = [tiny.simulation("ditto", data=data, participation=0.01, wave=wave) for wave in (0, 37)]
    assert [sim.wave for sim in sims] == [160, 37]
    for sim in sims:
        start = tiny.state(sim)["own.row"]
        asked = set()
        for t in range(3):
            asked |= set(sim.selected(t).tolist())
            assert sim.round().participants == 20
        moved = (tiny.state(sim)["own.row"] != start).any(1).nonzero()[:, 0].tolist()
        assert moved == sorted(asked)
    tiny.close(tiny.state(sims[0]), tiny.state(sims[1]))
    scores = [sim.evaluate().stages["adapted"].test["loss"] for sim in sims]
    assert len(scores[0]) == 2000
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-12)


# -- waves ------------------------------------------------------------------------------------------------------------


def test_the_layers_outputs_are_counted(tiny):
    """4 -> 5 -> tanh -> 3 leaves 5 + 5 + 3 = 13 numbers, at most 5 at once; a single layer leaves its output."""
    sim = tiny.simulation()
    assert waves.activations(sim.engine.net, sim.init.row, sim.engine.x[:1]) == (13, 5)
    alone = tiny.simulation(model=lambda: nn.Linear(4, 3))
    assert waves.activations(alone.engine.net, alone.init.row, alone.engine.x[:1]) == (3, 3)


def test_bytes_of_a_slot():
    """16 rows of 43 columns; training 10 samples takes 10 (4 + 3 * 13), scoring 20 samples 20 (4 + 2 * 5) numbers."""
    assert waves.slot_bytes(43, 4, (13, 5), 10, 20, 8) == 8 * (16 * 43 + 430)
    assert waves.slot_bytes(43, 4, (13, 5), 1, 20, 4) == 4 * (16 * 43 + 280)


def test_waves_fit_into_half_of_what_is_free():
    """256 clients where they fit, otherwise 256 / 2^k, at least one."""
    assert waves.fitting(1 << 20, GB) == 256
    assert waves.fitting(1 << 20, 100 << 20) == 32  # 50 would fit
    assert waves.fitting(GB, GB) == 1


def test_waves_of_a_round_are_equal_and_fill_buckets():
    """300 asked with room for 256: two of 150. 100 asked: evaluation takes 200, of which 100 is a bucket (4/8)."""
    assert waves.size(256, 300, 300) == 150
    assert waves.size(256, 100, 10_000) == 200
    assert waves.size(256, 10, 10_000) == 80
    assert waves.size(256, 20, 20) == 20
    assert waves.size(32, 100, 10_000) == 25
    assert [len(part) for part in waves.cut(np.arange(10), 4)] == [4, 3, 3]
    assert np.concatenate(waves.cut(np.arange(10), 4)).tolist() == list(range(10))
    assert waves.cut(np.arange(0), 4) == []


def test_the_wave_follows_from_free_memory_and_the_models_of_a_client(tiny, monkeypatch):
    """A slot takes 8 (16 * 43 + 12 (4 + 2 * 5)) = 6848 bytes here: the largest split, 12 samples, is scored at once."""
    data = tiny.federation(sizes=(12,) * 8)
    for clients, method, expected in ((8, "fedavg", 8), (4, "fedavg", 4), (4, "fedfew:models=2", 2), (0, "fedavg", 1)):
        monkeypatch.setattr(memory, "free", lambda device, n=clients: 2 * n * 6848)
        sim = tiny.simulation(method, data=data)
        assert sim.wave == sim.choices["wave"] == expected
    monkeypatch.setattr(memory, "free", lambda device: 1 << 40)
    assert tiny.simulation(data=data).wave == 8
    assert tiny.simulation(data=data, wave=3).wave == 3
    began = {"engine": "stack", "wave": 5}
    assert tiny.simulation(data=data, choices=began).wave == 5  # a resumed run goes on as it began
    assert tiny.simulation(data=data, choices=began, wave=3).wave == 3  # unless told otherwise


# -- what must not grow with the clients ------------------------------------------------------------------------------


def test_batches_for_scoring_are_kept_up_to_a_limit(tiny):
    """Those of one client are 1 x 1 x n samples and 5 numbers; the ones used longest ago go first."""
    engine = tiny.simulation(data=tiny.federation(sizes=(7, 12, 1, 5))).engine
    engine._kept.most = 40
    first, second, third = (engine._whole(np.array([i]), 1, "train") for i in (0, 1, 2))  # 12, 17 and 6 numbers
    assert engine._whole(np.array([0]), 1, "train") is first
    engine._whole(np.array([3]), 1, "train")  # 10 more are 45, so the second, by now the oldest, goes
    assert engine._whole(np.array([2]), 1, "train") is third
    assert engine._whole(np.array([0]), 1, "train") is first
    assert engine._whole(np.array([1]), 1, "train") is not second
    assert engine._kept.numbers <= 40


def test_pairs_are_counted_among_a_few(tiny, monkeypatch):
    """Of 6 participants with 3 compared, the last round records the 3 x 3 cosines of the updates 0, 2 and 5."""
    monkeypatch.setattr(round, "COMPARED", 3)
    sim = tiny.simulation(data=tiny.federation(sizes=(6, 3, 1, 5, 4, 9)), rounds=1)
    start = sim.server.state.row
    moved = torch.stack([sim.row(i, adapted=True) - start for i in (0, 2, 5)])
    found = torch.tensor(sim.round().report["cosines"], dtype=torch.float64)
    unit = moved / moved.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, unit @ unit.T, rtol=0, atol=1e-4)  # recorded with four digits


def test_a_checkpoint_holds_tensors_that_share_memory_and_copies_no_table(tmp_path):
    """Slices and twins come back as they were; a tensor with memory of its own is written from where it lies."""
    table = torch.arange(12.0).view(4, 3)
    tensors = {"table": table, "twin": table, "slice": table[1:3], "column": table[:, 1]}
    tensors["spread"] = table[0].expand(2, 3)
    assert checkpoint._apart(tensors)["table"].data_ptr() == table.data_ptr()
    checkpoint.save(tmp_path / "state", tensors, {})
    found, _ = checkpoint.load(tmp_path / "state")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
