"""What the documents show works: Python blocks run, commands parse, the one-file methods run, links lead somewhere."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from coterie import registry
from coterie.cli import app
from coterie.report import catalogue

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(language):
    """(page:line, text) of the fenced blocks of a language that are not marked as sketches."""
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            before = text[: found.start()].rstrip().rsplit("\n", 1)[-1]
            if found[1] == language and before != "<!-- sketch -->":
                yield f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", found[2]


def commands():
    """(page:line, words) of every `coterie ...` line in the console blocks."""
    for where, text in blocks("console"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["coterie"]:
                yield pytest.param(words[1:], id=f"{where} {' '.join(words[1:3])}")


def block_with(text):
    return next(code for _, code in blocks("python") if text in code)


def call(arguments, folder, extra=""):
    """The command line in a process of its own, with `extra` run before it."""
    program = f"{extra}\nfrom coterie.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("code", [pytest.param(code, id=where) for where, code in blocks("python")])
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "block.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("coterie_docs_block", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("words", list(commands()))
def test_commands_parse(words):
    """Names, options and methods exist; nothing is run."""
    command = typer.main.get_command(app).commands[words[0]]
    context = command.make_context(words[0], list(words[1:]))
    given = [context.params.get(name) for name in ("named", "methods", "method", "name")]
    specs = [spec for value in given if value for spec in ([value] if isinstance(value, str) else value)]
    for spec in registry.expand(specs):
        if ".py:" not in spec and not spec.startswith("mix"):
            catalogue.find(spec) if words[0] == "methods" else registry.method(spec)


def test_the_method_of_the_readme_runs_from_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(block_with("class Mine("))
    quick = ["--rounds", "2", "--clients", "4", "--model", "linear", "--out", "out"]
    done = call(["run", "mine.py:Mine:share=0.8", *quick], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine.py:Mine:share=0.8" in done.stdout
    assert (tmp_path / "out" / "result.json").is_file()


def test_the_method_of_contributing_is_found_in_its_folder(tmp_path):
    """The folder of methods is extended instead of written to: the file lies there, nothing else is edited."""
    more = tmp_path / "more"
    more.mkdir()
    (more / "mix.py").write_text(block_with("class Mix("))
    extra = f"import coterie.methods\ncoterie.methods.__path__.append({str(more)!r})"
    listed = call(["methods"], tmp_path, extra)
    assert re.search(r"^ +mix ", listed.stdout, re.MULTILINE), listed.stderr
    quick = ["--rounds", "2", "--clients", "4", "--unseen", "1", "--model", "linear", "--out", "out"]
    done = call(["run", "mix", "--set", "mu=0.1", *quick], tmp_path, extra)
    assert done.returncode == 0, done.stderr
    assert "mix:mu=0.1" in done.stdout


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = page if not path else page.parent / path
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings], target


def test_the_page_of_methods_is_what_the_code_generates():
    """So it cannot go stale; its first line says how to make it anew."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert catalogue.COMMAND in page.partition("\n")[0]
    assert page == catalogue.markdown(), f"run `{catalogue.COMMAND}`"


def test_the_readme_counts_methods_and_aggregators():
    text = (ROOT / "README.md").read_text()
    assert f"{len(registry.methods())} methods and {len(registry.aggregators())} aggregators" in " ".join(text.split())


def test_the_table_of_the_readme_names_existing_methods():
    rows = re.findall(r"^\| ([a-z][\w:=]*)[^|]*\|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    for name in rows:
        if name != "method":
            registry.method(name)
