"""A tokenizer.json built here, whose numbers are known by hand."""

import json
import sys
from hashlib import sha256

import pytest
from word_pieces import WORDS, tokenizer

from coterie import CoterieError
from coterie.data import load
from coterie.data.readers.text import Cutter
from coterie.data.readers.vocabulary import Vocabulary


def test_numbers_are_those_of_the_file_and_a_cut_keeps_the_special_tokens(tmp_path):
    file = tokenizer(tmp_path / "tokenizer.json")
    cutter = Cutter(str(file), 32_000, 6)
    assert cutter.words == len(WORDS)
    assert cutter("we like chess") == [1, 8, 9, 7, 2, 0]
    assert cutter("playing plays") == [1, 5, 6, 5, 10, 2]
    assert cutter("we like playing chess") == [1, 8, 9, 5, 6, 2]  # chess is cut off, [SEP] is not
    assert cutter("we swim") == [1, 8, 3, 2, 0, 0]
    assert "1 of 4 texts is longer than length=6 and was cut; length=7 holds" in cutter.notes()[0]
    assert Cutter(str(tmp_path), 32_000, 6)("we") == [1, 8, 2, 0, 0, 0]  # a folder with the file
    assert (cutter.mask, sorted(cutter.special)) == (4, [0, 1, 2, 3, 4])


def test_the_encoding_names_the_files_content_and_not_where_it_lies(tmp_path):
    file = tokenizer(tmp_path / "tokenizer.json")
    told = Cutter(str(file), 32_000, 6).encoding()
    assert told == {
        "tokenizer": "tokenizer.json", "words": 11, "length": 6, "sha256": sha256(file.read_bytes()).hexdigest(),
    }


def test_where_number_0_is_a_word_all_numbers_move_up_by_one(tmp_path):
    file = tokenizer(tmp_path / "tokenizer.json", ["it", *WORDS[1:]])
    cutter = Cutter(str(file), 32_000, 4)
    assert cutter("it like") == [2, 1, 10, 3]
    assert cutter("it") == [2, 1, 3, 0]
    assert (cutter.words, cutter.encoding()["shift"]) == (12, 1)
    assert (cutter.mask, sorted(cutter.special)) == (5, [2, 3, 4, 5])


def test_padding_and_cutting_that_the_file_asks_for_are_left_to_the_options(tmp_path):
    file = tokenizer(tmp_path / "tokenizer.json")
    held = json.loads(file.read_text())
    held["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    held["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "[PAD]"}
    file.write_text(json.dumps(held))
    assert Vocabulary(str(file))("we like playing chess") == [1, 8, 9, 5, 6, 7, 2]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("text,label\n" + "we like chess,yes\nplaying plays,no\n" * 5)
    return path


def test_a_site_with_another_tokenizer_is_told(tmp_path, table):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = tokenizer(tmp_path / "one" / "tokenizer.json")
    two = tokenizer(tmp_path / "two" / "tokenizer.json", [*WORDS[:7], "go", *WORDS[8:]])
    known = load(table, text="text", tokenizer=str(one), length=5)
    assert known.x[0].tolist() == [1, 8, 9, 7, 2]
    again = load(table, text="text", tokenizer=str(one), length=5, schema=known.encoding)
    assert again.x.equal(known.x)
    with pytest.raises(CoterieError, match=r"numbered by a tokenizer file of sha256 .* whose numbers mean other words"):
        load(table, text="text", tokenizer=str(two), length=5, schema=known.encoding)
    with pytest.raises(CoterieError, match="by words here, whose numbers mean other words"):
        load(table, text="text", length=5, schema=known.encoding)
    hashed = load(table, text="text", length=5).encoding
    with pytest.raises(CoterieError, match="say tokenizer=words"):
        load(table, text="text", tokenizer=str(one), length=5, schema=hashed)


def test_what_is_no_tokenizer_is_refused_in_a_sentence(tmp_path, table, monkeypatch):
    other = tmp_path / "other.json"
    other.write_text('{"model": 3}')
    with pytest.raises(CoterieError, match=r"'.*other.json' is no tokenizer: "):
        load(table, text="text", tokenizer=str(other))
    with pytest.raises(CoterieError, match=r"there is no tokenizer '.*none.json'; name the tokenizer.json"):
        load(table, text="text", tokenizer=str(tmp_path / "none.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CoterieError, match=r"there is no tokenizer '.*tokenizer.json'"):
        load(table, text="text", tokenizer=str(tmp_path / "empty"))
    file = tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(CoterieError, match="has 11 words, not words=12; leave words= out"):
        load(table, text="text", tokenizer=str(file), words=12)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CoterieError, match=r'install it with: pip install "coterie\[text\]"'):
        load(table, text="text", tokenizer=str(file))
