"""What the documents show works: every code block runs, links lead somewhere, and the site builds and is complete.

A page is one test. Its blocks run in their order in a folder of their own, Python blocks in one namespace. A block with
a title (```python title="mine.py") is that file. Commands run through the real command line in this process, with 1
round and 1 seed, and their pictures are coarse: what a page shows takes minutes, and more would try nothing else. `make
TARGET` runs the target's `coterie` commands in the same way; a target that has none must be there. A block that cannot
run here says why in the line before it, `<!-- not run: reason -->`; its commands must still be understood.
"""

import html
import inspect
import re
import shlex
import sys
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
import typer
from chromium import chromium
from typer.testing import CliRunner

import coterie.methods
from coterie import registry
from coterie.cli import app
from coterie.report import catalogue, notation
from coterie.running.experiment import Experiment

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
EACH = pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
REASON = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LANGUAGES = ("python", "console", "toml", "text", "equation")
TO_WRITE = ("mine", "mix", "NAME", "GROUP")
NOT_RUN = 35
"""How many blocks have a reason not to run; whoever adds one raises it on purpose."""
GROUP = typer.main.get_command(app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}


@dataclass
class Block:
    where: str
    language: str
    file: str
    text: str
    reason: str


def blocks(page):
    text = page.read_text()
    for found in FENCE.finditer(text):
        marked = REASON.search(text[: found.start()])
        where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"
        yield Block(where, found[1], found[2] or "", found[3], marked[1] if marked else "")


def commands(text):
    """The words of each command of a console block; a line may end in a backslash, and comments are left out."""
    lines = (shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines())
    return [words for words in lines if words]


def recipe(target):
    """The `coterie` commands of a target of the Makefile."""
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule, f"the Makefile has no target {target}"
    lines = commands(rule[1].replace("\t", "").replace("$(BIN)/", ""))
    return [words for words in lines if words[0] == "coterie"]


def shortened(words):
    """1 round and 1 seed."""
    if words[0] not in ("run", "compare", "advise", "dissect"):
        return words
    kept = re.sub(r" --(rounds|seeds) \S+", "", shlex.join(words))
    return [*shlex.split(kept), "--rounds", "1", *(["--seeds", "1"] if words[0] != "run" else [])]


class Reader:
    """Someone who does what a page says, in a folder of their own."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.module = types.ModuleType("coterie_docs_page")
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)  # where dataclasses look for names
        monkeypatch.setitem(matplotlib.rcParams, "savefig.dpi", 40)
        monkeypatch.chdir(folder)

    def do(self, block):
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            if path.parent == self.folder / "coterie" / "methods":
                self.extend(path)
        getattr(self, block.language)(block)

    def extend(self, path):
        """The folder of methods gets a second place instead of a new file."""
        self.monkeypatch.setattr(coterie.methods, "__path__", [*coterie.methods.__path__, str(path.parent)])
        self.monkeypatch.setitem(sys.modules, f"coterie.methods.{path.stem}", None)
        del sys.modules[f"coterie.methods.{path.stem}"]
        registry._found.cache_clear()

    def python(self, block):
        exec(compile(block.text, block.file or block.where, "exec"), self.module.__dict__)

    def console(self, block):
        for words in commands(block.text):
            if words[0] == "make":
                for made in recipe(words[1]):
                    self.type(made[1:], block)
            else:
                assert words[0] == "coterie", f"{block.where}: how to run '{words[0]}' is not known here"
                self.type(words[1:], block)

    def type(self, words, block):
        done = CliRunner().invoke(app, shortened(words))
        assert done.exit_code == 0, f"{block.where}: coterie {shlex.join(words)}: {done.exception}\n{done.output}"

    def toml(self, block):
        """The file of a server (it names the shape of samples), or of an experiment; both are built."""
        path = self.folder / (block.file or "block.toml")
        path.write_text(block.text)
        if "shape" in tomllib.loads(block.text):
            from coterie.flower.plan import Plan

            assert Plan.configured(path, "docs").jobs
        else:
            experiment = Experiment.read(path)
            federation = experiment.federation()
            assert experiment.factory(federation)()
            assert experiment.chosen()

    def text(self, block):
        """What something prints."""

    def equation(self, block):
        """Formulas and words; at least one line has a formula."""
        assert any(formula for formula, _ in notation.split(block.text)), block.where


@pytest.mark.long
@EACH
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    found = list(blocks(page))
    assert 2 * len(found) == len(re.findall(r"^ *(?:```|~~~)", page.read_text(), re.MULTILINE)), "a fence is not read"
    reader = Reader(tmp_path, monkeypatch)
    try:
        for block in found:
            assert block.language in LANGUAGES, f"{block.where} has no language of {', '.join(LANGUAGES)}"
            if not block.reason:
                reader.do(block)
    finally:
        monkeypatch.undo()
        registry._found.cache_clear()


def test_few_blocks_do_not_run_and_their_commands_are_understood():
    """Names, options and methods exist; `python FILE` and `make TARGET` name what is there."""
    left_out = [block for page in PAGES for block in blocks(page) if block.reason]
    assert len(left_out) == NOT_RUN, [block.where for block in left_out]
    for block in left_out:
        for words in commands(block.text) if block.language == "console" else ():
            if words[0] == "coterie":
                understood(words[1:])
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
            elif words[0] == "python" and words[1] != "-m":
                assert (ROOT / words[1]).is_file(), words


def understood(words):
    command = COMMANDS[words[0]]
    context = command.make_context(words[0], list(words[1:]))
    given = [context.params.get(name) for name in ("named", "methods", "method")]
    specs = [spec for value in given if value for spec in ([value] if isinstance(value, str) else value)]
    for spec in registry.expand(specs):
        registry.method(spec)


# -- links -----------------------------------------------------------------------------------------------------------


def anchors(page):
    """Of a page's headings: as the site makes them, and as repositories do; a link must be right in both places."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", text) for text in plain} & {re.sub(r"\s", "-", text) for text in plain}


@EACH
def test_links_lead_somewhere(page):
    inside = ROOT / "docs"
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page if not path else page.parent / path).resolve()
        assert found.exists(), f"{page.name} links to {target}"
        assert inside not in page.parents or inside in found.parents, f"{page.name}: {target} is not in the site"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}; there is {anchors(found)}"


# -- what is generated -----------------------------------------------------------------------------------------------


def test_the_page_of_methods_is_what_the_code_generates():
    """So it cannot go stale; its first line says how to make it anew."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert catalogue.COMMAND in page.partition("\n")[0]
    assert page == catalogue.markdown(), f"run `{catalogue.COMMAND}`"


def test_the_page_of_metrics_has_every_metric_as_its_docstring_says():
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name, cls in registry.metrics().items():
        head = f"**{name}** ({'higher' if cls.higher else 'lower'} is better)."
        assert f"{head}\n\n```text\n{inspect.getdoc(cls)}\n```\n\nA constant answer scores" in text


def test_the_page_of_options_is_what_the_code_generates():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert catalogue.OPTIONS_COMMAND in page.partition("\n")[0]
    assert page == catalogue.option_markdown(), f"run `{catalogue.OPTIONS_COMMAND}`"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` does: a warning is an error."""
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason="pip install 'coterie[docs]' builds the site")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return folder


def test_the_site_builds_without_a_warning_and_is_complete(site):
    """One test, because the build takes most of its time, and tests may run in several processes."""
    nobody_else_is_asked(site)
    formulas_are_set(site)
    for cls in [*registry.methods().values(), *catalogue.plugs(), *registry.optimizers().values()]:
        has_a_page(site, cls)
    for name in coterie.__all__:
        is_explained(site, name)
    has_the_colours_of_the_report(site)


PHONE = """() => {
    const lines = cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return new Set([...range.getClientRects()].map(box => Math.round(box.bottom / 8))).size;
    };
    const cells = [...document.querySelectorAll("td")];
    const numbers = cells.filter(cell => /^[-+\\d., ±%]+$/.test(cell.textContent.trim()));
    return {
        wide: document.documentElement.scrollWidth,
        numbers: numbers.length,
        broken: numbers.filter(cell => lines(cell) > 1).map(cell => cell.textContent),
        empty: [...document.querySelectorAll("math")].filter(one => !one.getBoundingClientRect().width).length,
    };
}"""


def test_on_a_phone_numbers_stay_whole_and_pages_open_from_the_disk(site):
    """390 pixels wide, offline, from the files: nothing is fetched, tables scroll inside the page, formulas show."""
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 390, "height": 844}, offline=True)
        page = context.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        for name in ("results/har", "methods", "methods/fednh", "aggregators/confree", "performance", "options",
                     "reference/run", "reference/method", "guide-author"):
            page.goto((site / f"{name}.html").as_uri())
            found = page.evaluate(PHONE)
            assert found["wide"] <= 390, name
            assert found["broken"] == [], name
            assert found["empty"] == 0, name
            assert found["numbers"] > 50 or name != "results/har"
        assert all(address.startswith(("file:", "data:", "blob:")) for address in asked), asked
        context.close()


def nobody_else_is_asked(site):
    """Scripts, styles, fonts and pictures are the site's own; only links a reader clicks may lead elsewhere."""
    elsewhere = re.compile(r"""@import|url\(\s*["']?(?:https?:)?//""")
    for page in site.rglob("*.html"):
        text = page.read_text()
        for tag in re.findall(r"<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*>", text):
            assert not re.search(r"""(?:src|srcset|href|data)=["']?(?:https?:)?//""", tag), f"{page.name}: {tag}"
        assert not elsewhere.search(re.sub(r"<code.*?</code>", "", text, flags=re.DOTALL)), page.name
    for sheet in site.rglob("*.css"):
        assert not elsewhere.search(sheet.read_text()), sheet.name


def formulas_are_set(site):
    """As MathML, without a script: none is left as it was typed, and each is a well-formed element."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code).*?</\1>", "", page.read_text(), flags=re.DOTALL)
        assert "arithmatex" not in text, page.name
        assert not re.search(r"\\[()]|```", text), page.name
        for formula in re.findall(r"<math\b.*?</math>", text, flags=re.DOTALL):
            assert ElementTree.fromstring(formula).attrib["alttext"]


def read(page):
    """What a page says; a formula is read as its source."""
    text = re.sub(r'<math alttext="([^"]*)".*?</math>', r"\1", page.read_text(), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def squeezed(text):
    return re.sub(r"[`\s]", "", text)


def is_explained(site, name):
    """A public name has an anchor of its own, its docstring and those of what it holds, word for word."""
    [page] = [page for page in (site / "reference").glob("*.html") if f'id="coterie.{name}"' in page.read_text()]
    source, text, thing = page.read_text(), squeezed(read(page)), getattr(coterie, name)
    said = {f"coterie.{name}": thing} | {f"coterie.{name}.{key}": value for key, value in vars(thing).items()}
    for anchor, one in said.items():
        if f'id="{anchor}"' in source and not is_field(one):
            assert squeezed(inspect.getdoc(one)) in text, f"markup swallowed a part of the docstring of {anchor}"


def is_field(value):
    return not (inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, property | classmethod))


def has_the_colours_of_the_report(site):
    """Light and dark as in its style sheet; the mark in the tab, which cannot read that, has the same four colours."""
    sheet = ROOT / "coterie" / "report" / "web" / "page.css"
    light, dark = (re.findall(rf"{scheme}.*?\n\}}", sheet.read_text(), re.DOTALL)[0]
                   for scheme in (r"^:root \{", r':root\[data-theme="dark"\] \{'))
    made = (site / "palette.css").read_text()
    for scheme, colours in ("default", light), ("slate", dark):
        block = made.partition(f'[data-md-color-scheme="{scheme}"]')[2].partition("}")[0]
        assert re.findall(r"--[\w-]+: #\w+", block) == re.findall(r"--[\w-]+: #\w+", colours)
    wanted = [re.search(rf"--{name}: (#\w+)", colours)[1] for colours in (light, dark) for name in ("accent", "m1")]
    assert re.findall(r"fill: (#\w+)", (site / "favicon.svg").read_text()) == wanted
    start = (site / "index.html").read_text()
    assert 'href="favicon.svg"' in start
    assert 'style="fill: var(--accent)"' in start


def has_a_page(site, cls):
    """With every word of its docstring, its options, citation and traffic; in the index and in the search."""
    method = cls.name in registry.methods()
    folder = "methods" if method else "aggregators" if cls.name in registry.aggregators() else "optimizers"
    page = site / folder / f"{cls.name}.html"
    text = read(page)
    formulas = [part for formula, part in notation.split(inspect.getdoc(cls)) if formula]
    assert page.read_text().count("<math ") >= len(formulas)
    facts = {"aggregators": "fewest clients", "optimizers": "at the server"}
    traffic = "Nothing travels." if cls.name == "local" else "bytes per client and round."
    for wanted in [*catalogue.own_options(cls()), cls.cite, traffic if method else facts[folder]]:
        assert wanted in text, f"{cls.name}: {wanted}"
    said = re.sub(r"[`\s]", "", inspect.getdoc(cls))
    assert said in re.sub(r"[`\s]", "", text), f"{cls.name}: markup swallowed a part of its docstring"
    assert f"{folder}/{cls.name}.html" in (site / f"{folder}.html").read_text()
    assert f'"{folder}/{cls.name}.html"' in (site / "search" / "search_index.json").read_text()


def test_every_public_name_is_in_the_reference_with_an_example():
    """The block of code before it, in the same section or at the page's top, uses the name."""
    found = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
            code = "\n".join(text for language, _, text in FENCE.findall(section) if language == "python")
            for name in re.findall(r"^::: coterie\.(\w+)$", section, re.MULTILINE):
                assert name not in found, f"{name} is explained twice"
                assert re.search(rf"\b{name}\b", code), f"{page.name}: no example uses {name}"
                found[name] = page.name
    assert sorted(found) == sorted(coterie.__all__)


def test_documents_name_files_that_are_there():
    """A module that has moved is found nowhere by a reader; some are for them to write."""
    named = re.compile(r"\b(?:coterie|tests|benchmarks|examples)/[\w/.-]+\.(?:py|md|css|js|toml)\b")
    for page in PAGES:
        for path in named.findall(page.read_text()) if page.name != "CHANGELOG.md" else ():
            assert (ROOT / path).exists() or Path(path).stem in TO_WRITE, f"{page.name} names {path}"


def test_documents_name_tests_that_are_there():
    """What is said to be tried is tried: `tests/flower/test_link.py::test_name` is a function of that file."""
    named = [found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())]
    assert len(named) > 60
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_page_is_in_the_nav():
    """A page that is only in the folder is found by nobody."""
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in nav, page.name


def test_the_command_is_activated_before_it_is_used():
    """Whoever types a page from its top has `coterie` on the path from the first command on."""
    for name in ("README.md", "docs/index.md"):
        consoles = [block.text for block in blocks(ROOT / name) if block.language == "console"]
        typed = [words for text in consoles for words in commands(text)]
        first = next(place for place, words in enumerate(typed) if words[0] == "coterie")
        assert ["source", ".venv/bin/activate"] in typed[:first], name


# -- the README's facts ----------------------------------------------------------------------------------------------


def test_the_readme_counts_methods_and_aggregators():
    text = (ROOT / "README.md").read_text()
    assert f"{len(registry.methods())} methods and {len(registry.aggregators())} aggregators" in " ".join(text.split())


def test_the_table_of_the_readme_names_existing_methods():
    rows = re.findall(r"^\| ([a-z][\w:=]*)[^|]*\|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    for name in rows:
        if name != "method":
            registry.method(name)


# -- results that were made otherwise ---------------------------------------------------------------------------------

FORMER_CFL = {
    "cifar10.md": ("64.31", "68.21"), "ham10000.md": ("70.37 ± 0.55", "70.94 ± 0.06"),
    "har.md": ("89.41 ± 0.23", "91.97 ± 1.03"), "mnist-writers.md": ("94.79 ± 0.08", "95.60 ± 0.04"),
}
"""Means that a rule of CFL made which split clients at the random start."""


def lines_of(method, page):
    """The cells of every line of a page's tables whose first cell names this method."""
    tables = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in tables if method in re.findall(r"\w+", cells[0].lower())]


@pytest.mark.parametrize(("name", "means"), FORMER_CFL.items())
def test_lines_of_cfls_former_rule_are_struck_and_the_page_says_why(name, means):
    """Every cell is; a study that replaces them takes these numbers away, and the note with them."""
    page = ROOT / "docs" / "results" / name
    left = [cells for cells in lines_of("cfl", page) if cells[1].strip("~*") in means]
    for cells in left:
        assert all(re.fullmatch(r"~~[^~]+~~", cell) for cell in cells), cells
    assert bool(left) == ("a rule that split clients at the random start" in page.read_text())


@pytest.mark.parametrize("name", ["cifar10.md", "cifar100.md", "ham10000.md", "har.md", "mnist-writers.md"])
def test_every_line_of_cwfedavg_says_whose_label_shares_it_used(name):
    """The true ones, which a client tells the server, or those estimated from the norms of the output layer."""
    found = [cells[0] for cells in lines_of("cwfedavg", ROOT / "docs" / "results" / name)]
    assert found
    for first in found:
        assert re.search(r"distribution=(true|approx)|true distributions|distributions from weight norms", first), first
