"""Text and json on disk: written in one step, read with a sentence for whatever is wrong."""

import os
import socket

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


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    """Under the file's own name, and under the one that its new content has before it takes the place."""
    other = tmp_path / "other"
    for name in ("a", "a.tmp"):
        other.write_text("precious")
        (tmp_path / name).symlink_to(other)
        files.write_text(tmp_path / "a", "new")
        assert (other.read_text(), (tmp_path / "a").read_text()) == ("precious", "new")
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_symlink()) == []


@pytest.mark.parametrize("change", [lambda path: files.append_text(path, "more"), lambda path: files.cut(path, 0)],
                         ids=["append", "cut"])
@pytest.mark.parametrize(("kind", "sentence"), [
    ("link", "is a symbolic link; nothing is written through it"),
    ("name", "has another name elsewhere; nothing is written to it"),
])
def test_records_are_not_written_through_a_link(tmp_path, change, kind, sentence):
    (tmp_path / "other").write_text("precious")
    (os.symlink if kind == "link" else os.link)(tmp_path / "other", tmp_path / "a")
    with pytest.raises(CoterieError, match=sentence):
        change(tmp_path / "a")
    assert (tmp_path / "other").read_text() == "precious"


def test_text_is_added_and_cut(tmp_path):
    files.append_text(tmp_path / "a", "one\n")
    files.append_text(tmp_path / "a", "two\n")
    files.cut(tmp_path / "a", 4)
    assert (tmp_path / "a").read_text() == "one\n"


@pytest.mark.parametrize("read", [files.read_json, files.read_bytes, lambda path: files.opened(path).read()],
                         ids=["json", "bytes", "text"])
def test_a_pipe_is_not_waited_for(tmp_path, read):
    """Opened as a file it would wait for a writer for ever."""
    os.mkfifo(tmp_path / "a")
    with pytest.raises(CoterieError, match="is no regular file"):
        read(tmp_path / "a")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    """8 GiB of nothing, which take no room on the disk and would take it in memory."""
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(CoterieError, match="too large to be read: 8589934592 bytes"):
        files.read_json(tmp_path / "a")


def test_folders_that_lead_elsewhere_are_refused(tmp_path):
    (tmp_path / "run" / "inner").mkdir(parents=True)
    files.refuse_links(tmp_path / "run")
    (tmp_path / "same").symlink_to(tmp_path / "run")
    files.refuse_links(tmp_path / "same")  # the folder itself was named by somebody
    (tmp_path / "run" / "inner" / "a").symlink_to(tmp_path)
    for refused in (lambda: files.refuse_links(tmp_path / "run"), lambda: files.make_folder(tmp_path / "run/inner/a")):
        with pytest.raises(CoterieError, match="inner/a is a symbolic link"):
            refused()
@pytest.fixture(params=["pipe", "device", "socket", "folder", "link to a pipe"])
def irregular(request, tmp_path):
    """Whatever is no file; opening a pipe would wait for somebody to write to it."""
    path = tmp_path / "a.json"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif request.param == "folder":
        path.mkdir()
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    return path


@pytest.mark.parametrize("read", [files.read_json, files.read_bytes, files.read_text, files.opened, files.opened_bytes])
def test_what_is_no_regular_file_is_not_waited_for(irregular, read):
    with pytest.raises(CoterieError, match=r"a.json cannot be read: it is no regular file\."):
        read(irregular)


def test_a_file_replaced_by_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    """Between the look and the opening: the opening does not wait, and looks again."""
    os.mkfifo(tmp_path / "a")
    monkeypatch.setattr(files, "refuse_irregular", lambda path: None)
    with pytest.raises(CoterieError, match="no regular file"):
        files.opened(tmp_path / "a")


def test_too_large_a_file_is_a_sentence(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    assert files.read_bytes(tmp_path / "a", 4) == b"1234"
    with pytest.raises(CoterieError, match="a is too large to be read: 4 bytes, at most 3 are"):
        files.read_bytes(tmp_path / "a", 3)


@pytest.mark.parametrize(("name", "cell"), [
    ("lyon", "lyon"), ("-1", "-1"), ("+2.5e3", "+2.5e3"), ("=cmd()", "'=cmd()"), ("@SUM(A1)", "'@SUM(A1)"),
    ("-1+cmd|' /C calc'!A0", "'-1+cmd|' /C calc'!A0"), ("a\r\nb", "a\\r\\nb"), ("\t=1", "\\t=1"),
])
def test_a_name_in_a_csv_file_is_one_line_and_no_formula(name, cell):
    assert files.csv_text(name) == cell
