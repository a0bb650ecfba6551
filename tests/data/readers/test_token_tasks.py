"""Tables of texts whose own tokens are the targets."""

import pytest
import torch
from word_pieces import tokenizer

from coterie import CoterieError
from coterie.contract.tokens import IGNORED
from coterie.data import load
from coterie.data.readers.text import Cutter
from coterie.data.readers.token_tasks import masked

A, B, C, D = (1 + ord(sign) for sign in "abcd")


@pytest.fixture
def plays(tmp_path):
    path = tmp_path / "plays.csv"
    path.write_text("role,text\nanna,abcd\nanna,a\nbert,abcabcabcd\nbert,dd\n")
    return path


def test_long_texts_are_cut_into_windows_and_every_token_but_the_first_is_a_target_once(plays):
    """abcd, length 3: one window, abc -> bcd. abcabcabcd: nine targets in three windows, each going on where the one
    before it ended. a: nothing follows, so it is left out. dd: d -> d."""
    found = load(plays, x="text", client="role", task="next", tokenizer="characters", length=3, words=200)
    I = IGNORED  # noqa: E741
    assert found.x.tolist() == [[A, B, C], [A, B, C], [A, B, C], [A, B, C], [D, D, 0]]
    assert found.y.tolist() == [[B, C, D], [B, C, A], [B, C, A], [B, C, D], [D, I, I]]
    assert found.client.tolist() == ["anna", "bert", "bert", "bert", "bert"]
    assert found.vocabulary == 200
    assert "1 text left out: fewer than two tokens, so nothing follows" in found.notes
    assert int((found.y != IGNORED).sum()) == 3 + 9 + 1


def test_the_task_is_part_of_the_encoding_and_followed(plays, tmp_path):
    schema = tmp_path / "schema.json"
    options = {"text": "text", "client": "role", "tokenizer": "characters", "length": 3, "words": 200}
    first = load(plays, **options, task="next", schema=str(schema))
    again = load(plays, **options, schema=str(schema))
    assert again.y.equal(first.y)
    assert first.encoding["task"] == "next"
    with pytest.raises(CoterieError, match="texts are cut with task=next by the schema, and with task=masked here"):
        load(plays, **options, task="masked", schema=str(schema))


def test_masked_tokens_are_15_of_100_of_which_80_10_and_10(tmp_path):
    """Of 200,000 tokens, counts within 4 standard deviations of a binomial draw."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 1000, (1000, 200), generator=generator)
    cutter = Cutter("words", 1000, 200)
    x, y = masked(tokens, cutter)
    drawn = y != IGNORED
    n = int(drawn.sum())
    assert abs(n - 30_000) < 4 * (200_000 * 0.15 * 0.85) ** 0.5
    assert y[drawn].equal(tokens[drawn])
    assert x[~drawn].equal(tokens[~drawn])
    hidden = int((x[drawn] == 1000).sum())  # the number behind the last word
    kept = int((x[drawn] == tokens[drawn]).sum())
    assert abs(hidden - 0.8 * n) < 4 * (n * 0.8 * 0.2) ** 0.5
    assert abs(kept - 0.1 * n - 0.1 * n / 999) < 4 * (n * 0.1 * 0.9) ** 0.5
    assert int(x.min()) >= 1
    order = torch.randperm(1000, generator=generator)
    assert masked(tokens[order], cutter)[0].equal(x[order])  # a text has its masks wherever it stands


def test_special_tokens_and_padding_are_never_masked_and_a_short_text_has_one_mask(tmp_path):
    file = tokenizer(tmp_path / "tokenizer.json")
    table = tmp_path / "notes.csv"
    table.write_text("text\n" + "we like chess\nplaying plays\nwe\n\"\"\n" * 4)
    found = load(table, text="text", task="masked", tokenizer=str(file), length=7, skip=True)
    assert found.vocabulary == 11  # with a [MASK] of its own
    drawn = found.y != IGNORED
    assert bool((drawn.sum(1) >= 1).all())
    assert bool((found.y[drawn] >= 5).all())
    assert found.x[:, 0].tolist() == [1] * len(found.x)
    whole = torch.where(drawn, found.y, found.x)
    assert whole[0].tolist() == [1, 8, 9, 7, 2, 0, 0]


def test_a_task_that_cannot_be_is_refused(plays):
    with pytest.raises(CoterieError, match="task"):
        load(plays, text="text", task="nxt")
    with pytest.raises(CoterieError, match="task=next needs the column of the texts; name it with text=COLUMN"):
        load(plays, task="next")
    with pytest.raises(CoterieError, match="holds no samples"):
        load(plays, text="role", client="role", task="next", tokenizer=lambda text: [1])
