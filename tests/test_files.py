"""Text and json on disk: written in one step, read with a sentence for whatever is wrong."""

import pytest

from coterie import files
from coterie.errors import CoterieError


def test_a_table_comes_back_as_it_was_written(tmp_path):
    values = {"name": "größe", "numbers": [1, 2.5, None], "inner": {"yes": True}}
    files.write_json(tmp_path / "a.json", values)
    assert files.read_json(tmp_path / "a.json") == values
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_replaced_keeps_its_text(tmp_path):
    """The new text is made beside the old one, so that a failure on the way leaves the old one alone."""
    files.write_text(tmp_path / "a", "old")
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "a", {"what": object()})
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize(("content", "sentence"), [
    (None, "cannot be read: No such file"),
    (b"", "is damaged"),
    (b'{"half": ', "is damaged"),
    (b"\xff\xfe", "is damaged"),
    (b"[1, 2]", "is damaged: it holds no table of values"),
    (b'{"a":' * 100_000, "is damaged: it is nested too deeply"),
], ids=["missing", "empty", "half", "no text", "a list", "deep"])
def test_a_wrong_file_is_a_sentence(tmp_path, content, sentence):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CoterieError, match=sentence) as raised:
        files.read_json(path)
    assert str(raised.value).startswith(str(path))
