"""What the site needs besides the pages in this folder: a page for each method and aggregator, and the project's own.

mkdocs calls the functions `on_...`. Nothing is written to this folder: the pages are made in memory from the docstrings
(`coterie.report.catalogue`), and a method's bytes are counted in one real round. Formulas stand in the pages as in the
docstrings, as plain text in a fence ```equation or in `\\( \\)`, and become MathML (`coterie.report.notation`), which
a browser shows without a script. Colours are the report's.
"""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import coterie
from coterie import registry
from coterie.contract.method import Method
from coterie.data import digits, partition
from coterie.models import model
from coterie.models.lora import adapted
from coterie.report import catalogue, notation
from coterie.report.table import markdown_table

ROOT = Path(__file__).parents[1]
EQUATION = re.compile(r"^```equation\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(?: *(\d+)  )?( *)(.*)")
FORMULA = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>([,.;:)]*)', re.DOTALL)
CELL = re.compile(r"<td((?: style=[^>]*)?)>(.*?)</td>", re.DOTALL)
FROM_THE_ROOT = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the nav's `Methods`, `Aggregators` and `Optimizers`."""
    for section in config.nav:
        for title, entries in section.items():
            if title == "Methods":
                entries += [{family.capitalize(): [{cls.name: f"methods/{cls.name}.md"} for cls in group]}
                            for family, group in catalogue.families().items()]
                plugs = [{cls.name: f"aggregators/{cls.name}.md"} for cls in catalogue.plugs()]
                entries.append({"Aggregators": [{"All aggregators": "aggregators.md"}, *plugs]})
                steps = [{name: f"optimizers/{name}.md"} for name in registry.optimizers()]
                entries.append({"Optimizers": [{"All optimizers": "optimizers.md"}, *steps]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is made; the committed methods.md, one page for readers of the sources, gives way."""
    pages = catalogue.site(traffic) | {path: moved((ROOT / name).read_text()) for path, name in FROM_THE_ROOT.items()}
    pages["palette.css"] = palette()
    for path, text in pages.items():
        if (committed := files.get_file_from_path(path)) is not None:
            files.remove(committed)
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The lines of an equation become those of a paragraph of the class `equation`, with their indents."""

    def paragraph(found: re.Match[str]) -> str:
        return "  \n".join(map(equation_line, found[1].splitlines())) + "\n{: .equation }"

    return EQUATION.sub(paragraph, markdown)


def equation_line(line: str) -> str:
    """A line of an algorithm may begin with its number, and two spaces set it in by one step."""
    number, indent, text = LINE.fullmatch(line).groups()
    inside = "&emsp;" * (len(indent) // 2) + catalogue.with_formulas(text)
    return f'<span class="step"><span class="line">{number}</span>{inside}</span>' if number else inside


def on_page_content(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas are typeset, and the cells of tables are marked as short or long for the style sheet."""
    text = re.sub(r'<p class="equation">.*?</p>', lambda found: typeset(found[0], display=True), text, flags=re.DOTALL)
    return CELL.sub(cell, typeset(text, display=False))


def cell(found: re.Match[str]) -> str:
    """A number, with its spread, unit or what it is of, and a word are short and stay in one line."""
    said = html.unescape(re.sub(r"<[^>]+>", "", found[2])).strip()
    number = re.match(r"[-+±≤≥<>]?\d", said) and not re.search(r"[^\W\d_]{4}", said)
    kind = "short" if len(said) <= (28 if number else 12) else "long" if len(said) > 40 else ""
    return f'<td{found[1]} class="{kind}">{found[2]}</td>' if kind else found[0]


def typeset(text: str, display: bool) -> str:
    """What the Markdown extension arithmatex has left as it was; the comma or stop after it stays in its line."""

    def element(found: re.Match[str]) -> str:
        formula = html.unescape(found[1]).replace(r"\|", "|")
        return f'<span class="formula">{notation.mathml(formula, display)}{found[2]}</span>'

    return FORMULA.sub(element, text)


def palette() -> str:
    """The report's colours, light and dark, under the theme's names of its two schemes."""
    sheet = (ROOT / "coterie" / "report" / "web" / "page.css").read_text()
    blocks = dict(re.findall(r"^(:root\S*) \{\n(.*?)^\}", sheet, re.MULTILINE | re.DOTALL))
    schemes = {"default": blocks[":root"], "slate": blocks[':root[data-theme="dark"]']}
    return "\n".join(f'[data-md-color-scheme="{scheme}"] {{\n{colours}}}' for scheme, colours in schemes.items()) + "\n"


def moved(text: str) -> str:
    """A page of the project's root as a page of the site: its links leave out the folder."""
    return re.sub(r"\]\(docs/", "](", text)


@functools.cache
def federation() -> coterie.Federation:
    """Six clients: the fewest with which FedFomo sends as many models as by default."""
    x, y = digits()
    return coterie.Federation.from_assignment(x[:120], y[:120], partition("iid", y[:120].numpy(), 6, seed=0))


@functools.cache
def traffic(cls: type[Method]) -> str:
    """A table of what one round of a method with its defaults sends, counted and not computed."""
    base = "frozen" if cls.moves else "trains"
    adapter = f"lora:rank=4,base={base}" if cls.adapters else ""
    factory = adapted(model("mlp", (1, 8, 8), 10, hidden=64), adapter)
    numbers = sum(p.numel() for p in factory().parameters())
    done = coterie.run(cls(), factory, federation(), rounds=1, batch=100, device="cpu", engine="stack")
    sent: dict[str, dict[str, int]] = {way: done.rounds[-1][way] for way in ("down", "up")}
    rows = [(f"{way}, `{name}`", f"{count:,}") for way, fields in sent.items() for name, count in fields.items()]
    if not rows:
        return "Nothing travels."
    total = sum(count for fields in sent.values() for count in fields.values())
    beside = f" and `--adapter {adapter}`" if adapter else ""
    about = (f"Counted in a round with the model `mlp:hidden=64`{beside} on digits, {numbers:,} numbers or "
             f"{4 * numbers:,} bytes: {total:,} bytes per client and round.")
    return f"{about}\n\n{markdown_table(('what travels', 'bytes'), rows, '--:')}"
