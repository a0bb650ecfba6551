"""Pickles of plain values: what honest ones hold comes back, and no small one keeps the reader busy."""

import pickle

import numpy as np
import pytest
from data_files import python2, within

from coterie.data.readers.pickles import LARGER, loads


def refused(data, why):
    with within(5), pytest.raises(pickle.UnpicklingError, match=why):
        loads(data)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_and_arrays_come_back(protocol):
    """Also values that are met several times: a few thousand references to short texts, and an array in two places."""
    image = np.arange(3000, dtype=np.uint8).reshape(10, 300)
    value = {"data": image, "again": image, "labels": [1, 2, 3] * 1000, "names": ["a.png"] * 3000, "n": 2**70,
             "rows": [(1, 2.5, None, "x")] * 500, "numbers": np.float32(0.5), "fortran": np.asfortranarray(image)}
    found = loads(pickle.dumps(value, protocol))
    assert found.keys() == value.keys()
    for key in ("data", "again", "fortran"):
        assert np.array_equal(found[key], image)
    assert all(found[key] == value[key] for key in ("labels", "names", "n", "rows", "numbers"))


def test_python_2_is_read():
    found = loads(python2({b"data": np.arange(6, dtype=np.uint8), b"labels": [0, 1]}))
    assert found[b"data"].tolist() == list(range(6))


def test_lists_of_the_same_lists():
    """14 lists of ten references each to the one before: 10^14 values in less than 689 bytes, which took all day."""
    value = [1]
    for _ in range(14):
        value = [value] * 10
    data = pickle.dumps(value, 2)
    assert len(data) < 689
    refused(data, f"more than {LARGER} times its size")


def test_a_list_of_itself():
    value = []
    value.append(value)
    refused(pickle.dumps(value), f"nested too deeply|more than {LARGER} times")


def test_keys_are_texts():
    """What a tuple of tuples of ... is found by takes 2^n steps, in which nobody could stop the reader."""
    refused(b"\x80\x02})" + b"2\x86" * 22 + b"K\x01s.", "keys are no texts")  # {}, (), then a pair of itself each time
    refused(b"\x80\x02}(" + b")" + b"2\x86" * 22 + b"K\x01u.", "keys are no texts")
    refused(b"\x80\x02(" + b")" + b"2\x86" * 22 + b"K\x01d.", "keys are no texts")
    refused(pickle.dumps({k * (2**61 - 1): 0 for k in range(20_000)}), "keys are no texts")  # all found at one place
    with within(5), pytest.raises(KeyError):  # sets are not known at all
        loads(pickle.dumps({(1, 2), (3, 4)}, 4))


def test_one_array_in_many_places():
    """40 kB met 10,000 times would be 400 MB when the list becomes an array."""
    refused(pickle.dumps([np.zeros(40_000, np.uint8)] * 10_000), f"more than {LARGER} times")


def test_one_text_in_many_places():
    """An array of texts gives each the room of the longest."""
    refused(pickle.dumps(["x" * 100_000, *["y"] * 100_000]), f"more than {LARGER} times")


def test_one_text_made_bytes_many_times():
    """Python 2's strings: ten bytes of the file would copy 100 kB each time."""
    text = b"X\xa0\x86\x01\x00" + b"x" * 100_000
    call = b"c_codecs\nencode\nq\x010" + text + b"q\x020" + b"X\x06\x00\x00\x00latin1q\x030"
    refused(b"\x80\x02" + call + b"](" + b"h\x01h\x02h\x03\x86R" * 10_000 + b"e.", f"more than {LARGER} times")


def test_numbers_of_the_memo_are_small():
    """Chosen ones would all lie at one place of its table."""
    refused(b"(" + b"".join(b"I1\np%d\n" % (k * (2**61 - 1)) for k in range(1, 30_000)) + b"l.", "strange number")


@pytest.mark.parametrize("data", [
    b"cnumpy\ndtype\n(S'" + b"f4," * 300_000 + b"'\ntR.",  # a type of so many fields takes long to read
    b"\x80\x02cnumpy\nndarray\n}X\x01\x00\x00\x00aK\x01sb.",  # would change an object of this module
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"
    + b"\x8b\xa0\x86\x01\x00" + b"\x01" * 100_000 + b"\x85cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x89C\x01atb.",
], ids=["a long type", "state of a foreign object", "a shape of 100,000 digits"])
def test_other_ways_to_keep_a_reader_busy(data):
    refused(data, "dtype without a name|foreign object|shape that is none")
