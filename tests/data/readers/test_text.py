"""What cutting texts loses is counted and said; and how texts become numbers is kept with the run."""

from __future__ import annotations

import json
from zlib import crc32

import pytest
from commands import exit_code

from coterie.data import load
from coterie.data.readers.text import Cutter
from coterie.errors import CoterieError


def texts(folder, sizes, start=""):
    """A table with a text of each of these numbers of words, `start` first."""
    lines = [f"{start}{' '.join(f'w{k}x{j}' for j in range(size))},{'ab'[k % 2]},{k // 2 % 2}"
             for k, size in enumerate(sizes)]
    (folder / "t.csv").write_text("\n".join(["said,client,label", *lines]) + "\n")
    return folder / "t.csv"


def test_cut_texts_are_counted_with_the_length_that_holds_them(tmp_path):
    """Of 100 texts of 1 to 100 words, 36 are longer than 64; 95 have at most 95 words."""
    source = load(texts(tmp_path, range(1, 101)), text="said")
    assert source.notes == ("36 of 100 texts are longer than length=64 and were cut; length=95 holds 95 % of them",)
    assert load(texts(tmp_path, range(1, 101)), text="said", length=95).notes == ()


def test_texts_that_begin_alike_become_one_sample(tmp_path):
    """A letterhead of 64 words and more: all that differs is cut away."""
    source = load(texts(tmp_path, [5] * 40, "same " * 64), text="said")
    assert len(source.x.unique(dim=0)) == 1
    assert source.notes == (
        "40 of 40 texts are longer than length=64 and were cut; length=69 holds 95 % of them",
        "40 different texts became 1 different sample: a larger length= keeps more of each",
    )


def test_a_tokenizer_that_loses_what_tells_texts_apart_is_said():
    cutter = Cutter(lambda text: [len(text)], 100, 4)
    for k in range(10, 90):
        cutter(f"text {k}")
    assert cutter.notes() == ["80 different texts became 1 different sample: tokenizer=<lambda> tells no more of them"]


def test_few_cut_texts_and_few_that_differ_in_case_need_no_note():
    """One of 40 is 2.5 %, fewer than 5 %."""
    cutter = Cutter("words", 32_000, 4)
    for k in range(38):
        cutter(f"number {k}")
    cutter("Number 3")
    cutter("a text of five words")
    assert cutter.notes() == []


SAID = ("我今天感觉非常不舒服头痛得厉害", "今日はとても気分がいいです", "วันนี้ฉันรู้สึกไม่สบายมาก")
"""Chinese, Japanese and Thai without a blank: phrases of 8 letters and more."""


@pytest.mark.parametrize("said", SAID, ids=["Chinese", "Japanese", "Thai"])
def test_phrases_without_blanks_are_no_words(said):
    """Each phrase is one number, which no other text has: 6 of 100 are more than 5 %, and 5 are not."""
    cutter, few = Cutter("words", 32_000, 64), Cutter("words", 32_000, 64)
    for k in range(100):
        cutter(said + str(k) if k < 6 else f"good day {k}")
        few(said + str(k) if k < 5 else f"good day {k}")
    (note,) = cutter.notes()
    assert note.startswith("6 of 100 texts have no blanks between words, as Chinese, Japanese or Thai, so whole")
    assert note.endswith("tokenizer=characters reads such texts")
    assert few.notes() == []


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [("characters", SAID[0]), ("words", "我 今天 感觉 非常 不 舒服"), ("words", "张三丰 hello"),
     ("words", "今日 は とても 気分 が いい です"), ("words", "วันนี้ ฉัน รู้สึก ไม่ สบาย มาก"),
     ("words", "Donaudampfschifffahrtsgesellschaft"), ("words", "오늘은 기분이 좋다"), ("words", "сегодня хорошо")],
)
def test_words_that_somebody_set_apart_need_no_word(tokenizer, said):
    """Words with blanks between them have 2 to 4 letters on average, and Korean, Russian and German have blanks."""
    cutter = Cutter(tokenizer, 32_000, 64)
    for k in range(100):
        cutter(f"{said} {k}")
    assert cutter.notes() == []


def test_texts_of_leaf_are_counted_too(tmp_path):
    long = [" ".join(f"w{k}x{j}" for j in range(80)) for k in range(4)]
    users = {"u": {"x": long, "y": [0, 1, 0, 1]}}
    (tmp_path / "all_data.json").write_text(json.dumps({"users": ["u"], "num_samples": [4], "user_data": users}))
    assert any("4 of 4 texts are longer than length=64" in note for note in load(tmp_path / "all_data.json").notes)


def test_numbers_need_no_word_on_texts(tmp_path):
    (tmp_path / "t.csv").write_text("a,label\n0.5,0\n1.5,1\n")
    source = load(tmp_path / "t.csv")
    assert source.notes == ()
    assert not {"text", "tokenizer", "words", "length"} & source.encoding.keys()


def test_the_encoding_says_how_texts_become_numbers(tmp_path, monkeypatch):
    """What the json beside an exported model says is enough to make its inputs without this package."""
    monkeypatch.chdir(tmp_path)
    path = texts(tmp_path, [3] * 40)
    for words in (["run", "fedavg", "--data", f"{path.name}:text=said,length=5,words=50", "--model",
                   "fasttext:vocabulary=50,features=8", "--rounds", "1", "--out", "run"],
                  ["export", "run", "--model", "0", "-o", "m.safetensors"]):
        assert exit_code(monkeypatch, *words) == 0
    told = json.loads((tmp_path / "m.json").read_text())["job"]["encoding"]
    assert {name: told[name] for name in ("text", "tokenizer", "words", "length")} == {
        "text": "said", "tokenizer": "words", "words": 50, "length": 5}
    assert "crc32" in told["rule"]
    by_hand = [1 + crc32(word.encode()) % (told["words"] - 1) for word in ("w0x0", "w0x1", "w0x2")]
    source = load(path, text="said", length=5, words=50)
    assert source.x[0].tolist() == [*by_hand, 0, 0]


def test_a_schema_is_followed_for_texts(tmp_path):
    """The column is the schema's; another way to cut, which would number words otherwise, is refused."""
    path, schema = texts(tmp_path, [3] * 8), str(tmp_path / "schema.json")
    first = load(path, text="said", length=5, schema=schema)
    again = load(path, length=5, schema=schema)
    assert first.x.tolist() == again.x.tolist()
    with pytest.raises(CoterieError, match="length=5 by the schema, and with length=64 here; say length=5"):
        load(path, schema=schema)
    with pytest.raises(CoterieError, match="tokenizer=words by the schema"):
        load(path, length=5, tokenizer="characters", schema=schema)
    path.write_text(path.read_text().replace("said", "told", 1))
    with pytest.raises(CoterieError, match="has no column 'said', whose text the schema needs; add it"):
        load(path, length=5, schema=schema)


@pytest.mark.parametrize("words", [["run", "fedavg", "--rounds", "1"], ["advise", "--rounds", "1", "--seeds", "1"]])
def test_the_default_model_refuses_texts_and_names_one_that_takes_them(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts(tmp_path, [3] * 60)
    assert exit_code(monkeypatch, *words, "--data", "t.csv:text=said") == 2
    assert "--model fasttext" in " ".join(capsys.readouterr().err.split())
