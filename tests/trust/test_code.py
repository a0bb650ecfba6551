"""The gate: what runs under which rule, which files a spelling names, and copies that take their places."""

import hashlib
import sys

import pytest

from coterie import registry
from coterie.errors import CoterieError
from coterie.trust import code, digests

METHOD = """
from coterie.methods.fedavg import FedAvg

class Mine(FedAvg):
    number = {}
"""


@pytest.fixture(autouse=True)
def untrusted(tmp_path, monkeypatch):
    """A user who has trusted nothing yet, and a process that has run nothing."""
    monkeypatch.setenv("COTERIE_TRUSTED", str(tmp_path / "conf" / "trusted"))
    for name, empty in (("_copies", {}), ("_ran", {})):
        monkeypatch.setattr(code, name, empty)
    monkeypatch.setattr(digests, "_unkept", set())
    monkeypatch.chdir(tmp_path)


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_what_python_passes_is_trusted_by_that_and_the_command_line_asks(tmp_path):
    """The same content under another name is the same; another content is not."""
    path = tmp_path / "mine.py"
    path.write_text(METHOD.format(1))
    said = f"mine.py was not typed, sha256 {digest(METHOD.format(1))}"
    with code.only_trusted(), pytest.raises(CoterieError, match=said):
        registry.method(f"{path}:Mine")
    assert registry.method(f"{path}:Mine").number == 1
    (tmp_path / "other.py").write_text(METHOD.format(1))
    with code.only_trusted():
        assert registry.method(f"{tmp_path / 'other.py'}:Mine").number == 1
        path.write_text(METHOD.format(2))
        with pytest.raises(CoterieError, match="--trust"):
            registry.method(f"{path}:Mine")
        code.typed(f"{path}:Mine:lr=0.1")
        assert registry.method(f"{path}:Mine").number == 2


def test_where_nothing_runs_nothing_runs(tmp_path):
    """Trusted or not; the rule ends with the block."""
    path = tmp_path / "mine.py"
    path.write_text(METHOD.format(1))
    registry.method(f"{path}:Mine")
    with code.nothing(), pytest.raises(CoterieError, match="is not run here"):
        registry.method(f"{path}:Mine")
    assert registry.method(f"{path}:Mine")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    """Their classes know which file they came from: the second one took the first one's place."""
    specs = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(METHOD.format(1))
        specs.append(f"{tmp_path / folder / 'mine.py'}:Mine")
    made = [registry.method(spec) for spec in specs]
    assert [registry.spelling(one) for one in made] == specs


def test_no_compiled_file_is_left_beside_it(tmp_path):
    (tmp_path / "mine.py").write_text(METHOD.format(1))
    registry.method("mine.py:Mine")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["conf", "mine.py"]


@pytest.mark.parametrize(("text", "paths"), [
    ("fedavg", []), ("mine.py", []), ("mine.py:Mine", ["mine.py"]), ("mine.py:Mine:lr=0.1+median", ["mine.py"]),
    ("fedavg:server=lion.py:Lion(lr=0.1),lr=2", ["lion.py"]), ("optimizer=lion.py:Lion", ["lion.py"]),
    ("mine.py:Mine:server=lion.py:Lion", ["mine.py", "lion.py"]),
    ("a,b=c/mine.py:Mine", ["a,b=c/mine.py"]), ("table.csv:text=said,tokenizer=own.py:tokens", ["own.py"]),
    ("gone.py:Mine", ["gone.py"]), ("x=gone.py:Mine", ["gone.py"]),
])
def test_the_files_that_a_spelling_names(tmp_path, text, paths):
    """A path begins where a file is found, also behind signs that may stand before a path."""
    (tmp_path / "a,b=c").mkdir()
    for name in ("mine.py", "lion.py", "own.py", "a,b=c/mine.py"):
        (tmp_path / name).write_text("")
    assert code.named(text) == paths
    whole = code.absolute(text)
    assert code.named(whole) == [str(tmp_path / path) for path in paths]
    assert code.absolute(whole, tmp_path / "a,b=c") == whole


def test_a_copy_takes_the_place_of_its_file_and_is_called_by_it(tmp_path):
    """The content that ran is kept, also where the file is changed before the copy is made."""
    path, run = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(METHOD.format(1))
    registry.method(f"{path}:Mine")
    path.write_text(METHOD.format(2))
    run.mkdir()
    table = code.keep(run, [f"{path}:Mine"])
    assert table == {str(path): digest(METHOD.format(1))}
    copies = code.Copies(run, table)
    copies.take()
    (note,) = copies.notes
    assert "mine.py has changed since the run began" in note
    spec = copies.spelled(f"{path}:Mine:lr=0.1+median")
    made = registry.method(spec)
    assert made.number == 1
    assert registry.spelling(made) == f"{path}:Mine:lr=0.1+median"
    assert code.original(spec) == f"{path}:Mine:lr=0.1+median"
    copy = next((run / "code").glob("*/mine.py"))
    copy.write_text(METHOD.format(3))
    with pytest.raises(CoterieError, match="is not the copy that the run made of"):
        registry.method(spec)


def test_a_copy_asks_in_python_too(tmp_path, monkeypatch):
    """Somebody else's run folder, opened by a program: its copy is not what the program typed."""
    path, run = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(METHOD.format(1))
    run.mkdir()
    copies = code.Copies(run, code.keep(run, [f"{path}:Mine"]))
    copies.take()
    with pytest.raises(CoterieError, match="which you have not trusted"):
        registry.method(copies.spelled(f"{path}:Mine"))
    copies.trust()
    assert registry.method(copies.spelled(f"{path}:Mine")).number == 1


def test_a_folder_named_code_that_leads_elsewhere_is_not_written_to(tmp_path):
    (tmp_path / "mine.py").write_text(METHOD.format(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "code").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CoterieError, match="nothing is written through it"):
        code.keep(tmp_path / "run", ["mine.py:Mine"])
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_path_of_modules_is_as_it_was_after_a_copy_ran(tmp_path):
    (tmp_path / "mine.py").write_text(METHOD.format(1))
    (tmp_path / "run").mkdir()
    copies = code.Copies(tmp_path / "run", code.keep(tmp_path / "run", ["mine.py:Mine"]))
    copies.take()
    copies.trust()
    before = list(sys.path)
    registry.method(copies.spelled(f"{tmp_path / 'mine.py'}:Mine"))
    assert sys.path == before
