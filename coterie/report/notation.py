"""The plain notation of docstrings as MathML: which stretches of a text are formulas, and how each is set.

A docstring is read in a terminal, so its equations are plain text: `theta <- theta + sum_i p_i (SGD_i(theta) - theta)`.
The site shows the same text typeset; nothing is written twice. What the notation knows:

    theta, Delta, lam, eps1      Greek letters              x_i, w_ik, W_{r_i}, |x|^2    scripts
    <-  ->  <=  >=  !=  +-  ~    arrows and relations       |x|, <x, y>, {x : y}         length, inner product, set
    sum_i, max_i, argmin_k       what they run over         a / b, a/b                   a fraction, when displayed
    D', U_i'                     a prime, a transpose       pi~                          a tilde above
    SGD_i(x), sqrt(C), H[k]      functions: no space before the bracket
    x * y                        element by element; after a number, a Greek letter or an option, times
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "Delta": "Δ", "epsilon": "ε", "eps": "ε",  # noqa: RUF001
    "eta": "η", "theta": "θ", "lam": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ",  # noqa: RUF001
    "sigma": "σ", "tau": "τ", "phi": "φ", "psi": "ψ", "omega": "ω",  # noqa: RUF001
}
OPERATORS = {
    "<-": "←", "->": "→", "<=": "≤", ">=": "≥", "!=": "≠", "+-": "±", "~": "∝", "*": "·", "-": "\N{MINUS SIGN}",
    "+": "+", "=": "=", "<": "<", ">": ">", "/": "/",
}
LIMITS = {"sum": "∑", "min": "min", "max": "max", "argmin": "argmin", "argmax": "argmax", "mean": "mean"}
"""Their subscript says what they run over and stands below them."""
SURE = {"lr", "CE", "argmin", "argmax"}
IN_COMPANY = {"sum", "min", "max", "mean", "median", "cos", "arccos", "log", "sg", "grad", "SGD", "a", "A", "I"}
"""English words too: part of a formula where one goes on beside them."""
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "<": ">"}
PRIME, TRANSPOSED, TILDE = "\N{PRIME}", "\N{DOWN TACK}", "\N{SMALL TILDE}"
THIN = '<mspace width="0.17em"/>'

TOKEN = re.compile(r"""
    (?P<code>`[^`]*`|\w+=\w[\w+]*) | (?P<space>\s+) | (?P<number>\d+(?:\.\d+)?)
    | (?P<word>[^\W\d_]+\d*(?:[-'][^\W\d_]+)*) | (?P<script>[_^](?:-?[^\W_]+|[{(]))
    | (?P<op><-|->|<=|>=|!=|\+-|[-+*/=~]) | (?P<fence>[][(){}|<>]) | (?P<mark>'s\b|.)
""", re.VERBOSE | re.DOTALL)


@dataclass(frozen=True)
class Node:
    """A token, a bracket or a call, with its scripts."""

    kind: str  # code, space, number, word, op, fence (one that closes nothing), mark; group, call
    text: str  # its source, scripts included
    base: str = ""  # the same without scripts; of a group, its opening fence
    inner: tuple[Node, ...] = ()  # what a group holds; of a call, the function and the bracket
    below: tuple[Node, ...] = ()
    above: tuple[Node, ...] = ()
    accents: str = ""  # ~ and primes

    @property
    def letters(self) -> str:
        return self.base.rstrip("0123456789")

    @property
    def symbol(self) -> bool:
        """One letter, perhaps Greek, perhaps numbered."""
        return self.kind == "word" and (len(self.letters) == 1 or self.letters in GREEK)

    @property
    def scripted(self) -> bool:
        return bool(self.below or self.above or self.accents)


# -- reading ---------------------------------------------------------------------------------------------------------


def read(text: str) -> tuple[Node, ...]:
    """The text as nodes; their sources joined are the text."""
    nodes = Reader([(found.lastgroup or "", found[0]) for found in TOKEN.finditer(text)]).until("")
    assert nodes is not None  # only a closing fence can be missing
    return nodes


class Reader:
    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        self.tokens = [*tokens, ("end", "")]
        self.at = 0

    def until(self, closing: str) -> tuple[Node, ...] | None:
        """The nodes up to this fence, which is passed; None where it does not come."""
        nodes: list[Node] = []
        while (token := self.tokens[self.at])[0] != "end":
            kind, text = token
            spaced = not nodes or nodes[-1].kind == "space"
            if text == closing and not (text in "|>" and spaced):
                self.at += 1
                return tuple(nodes)
            group = self.group(spaced or nodes[-1].kind in ("op", "mark")) if text in CLOSING else None
            if group is None:
                self.at += 1
            nodes.append(self.complete(group or Node(kind, text, text)))
        return None if closing else tuple(nodes)

    def group(self, opens: bool) -> Node | None:
        """The bracket that begins here; a length or product does so before a symbol and not right after one."""
        start, opening = self.at, self.tokens[self.at][1]
        if opening in "|<" and (self.tokens[start + 1][0] in ("space", "end") or (opening == "|" and not opens)):
            return None
        self.at += 1
        inner = self.until(CLOSING[opening])
        if not inner:
            self.at = start
            return None
        return Node("group", self.source(start), opening, inner)

    def complete(self, node: Node) -> Node:
        """With the scripts, primes, tilde and arguments that follow without a space."""
        while node.kind in ("word", "number", "group", "call"):
            start, (kind, text) = self.at, self.tokens[self.at]
            if kind == "script":
                self.at += 1
                place = "below" if text[0] == "_" else "above"
                script = self.until(CLOSING[text[1]]) if text[1] in CLOSING else indices(text[1:])
                if script is None:
                    self.at = start
                    break
                node = replace(node, text=node.text + self.source(start), **{place: script})  # type: ignore[arg-type]
            elif text in ("'", "~") and (node.symbol or node.scripted or (node.kind == "group" and text == "'")):
                self.at += 1
                node = replace(node, text=node.text + text, accents=node.accents + text)
            elif text in ("(", "[") and node.kind == "word" and (group := self.group(True)) is not None:
                node = Node("call", node.text + group.text, inner=(node, group))
            else:
                break
        return node

    def source(self, start: int) -> str:
        return "".join(text for _, text in self.tokens[start:self.at])


def indices(script: str) -> tuple[Node, ...]:
    """`ik` are two indices; `max` and `lr` are words, 24 and -2 are numbers."""
    if script.strip("-").isdigit():
        return read(script)
    parts = [script] if len(script) > 2 or script == "lr" else script
    return tuple(Node("number" if part.isdigit() else "word", part, part) for part in parts)


# -- telling formulas from words -------------------------------------------------------------------------------------


def split(text: str) -> list[tuple[bool, str]]:
    """The text in stretches, each a formula (true) or not; joined they are the text."""
    marked = itertools.groupby(_marked(read(text)), key=lambda part: part[0])
    return [(formula, "".join(part for _, part in parts)) for formula, parts in marked]


def clauses(text: str) -> list[str]:
    """The text cut after each semicolon that stands in no bracket."""
    found = [""]
    for node in read(" ".join(text.split())):
        found[-1] += node.text
        found += [""] * (node.text == ";")
    return [clause.strip() for clause in found if clause]


def _marked(nodes: Sequence[Node]) -> Iterator[tuple[bool, str]]:
    formula = _formulas(nodes)
    for place, node in enumerate(nodes):
        if node.kind == "space":  # inside a formula it is part of it
            yield 0 < place < len(nodes) - 1 and formula[place - 1] and formula[place + 1], node.text
        elif node.kind == "group" and not formula[place]:
            yield False, node.base
            yield from _marked(node.inner)
            yield False, node.text[len(node.base) + sum(len(one.text) for one in node.inner):]
        else:
            yield formula[place], node.text


def _formulas(nodes: Sequence[Node]) -> list[bool]:
    """Of each node whether it is part of a formula: first those that are by themselves, then what stands beside."""
    found = [_alone(node) for node in nodes]
    while (more := [one or _beside(nodes, found, place) for place, one in enumerate(found)]) != found:
        found = more
    return found


def _alone(node: Node) -> bool:
    if node.kind == "group":
        parts = zip(node.inner, _formulas(node.inner))
        return node.base in "|<{" or all(formula or one.kind in ("space", "mark") for one, formula in parts)
    if node.kind == "word":
        return node.scripted or node.base in SURE or (node.symbol and node.base not in IN_COMPANY)
    return node.kind == "call" or node.text in ("<-", "->")


def _beside(nodes: Sequence[Node], found: Sequence[bool], place: int) -> bool:
    node = nodes[place]
    sides = [side for side in (_neighbour(nodes, place, -1), _neighbour(nodes, place, 1)) if side is not None]
    formulas = [nodes[side] for side in sides if found[side]]
    operators = [one.text for one in formulas if one.text in OPERATORS]
    leads = bool(sides) and sides[-1] > place and found[sides[-1]]  # a formula goes on after it
    match node.kind:
        case "op" | "fence":
            return node.text in OPERATORS and bool(formulas)
        case "number":
            return bool(operators) or leads
        case "word" if node.base in IN_COMPANY:
            return bool(operators) or (leads and not node.symbol)
        case "word" if node.base == "in":
            return len(formulas) == 2 and formulas[1].base == "R"
        case "word":  # an option: N - faulty - 2
            return any(text in "+-*/" for text in operators)
    return False


def _neighbour(nodes: Sequence[Node], place: int, step: int) -> int | None:
    """The next node that is no space."""
    place += step
    if 0 <= place < len(nodes) and nodes[place].kind == "space":
        place += step
    return place if 0 <= place < len(nodes) else None


# -- setting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """Part of a formula as MathML."""

    kind: str  # factor, limits (such as a sum: the product after it belongs to it), op or mark
    xml: str
    bare: str = ""  # a bracket without its fences, for above and below a line
    wide: bool = False  # keeps a distance from other factors
    slash: str = ""  # "tight" or "loose"


def mathml(formula: str, display: bool = False) -> str:
    """The formula as an element `math`, its source as the alternative text; `display` gives fractions a line."""
    style = ' displaystyle="true"' if display else ""
    source = html.escape(" ".join(formula.split()))
    return f'<math alttext="{source}"{style}>{_row(read(formula), display)}</math>'


def _row(nodes: Sequence[Node], display: bool) -> str:
    pieces = [_piece(nodes, place, display) for place, node in enumerate(nodes) if node.kind != "space"]
    return _joined(_fractions(pieces) if display else pieces)


def _joined(pieces: Sequence[Token]) -> str:
    text = ""
    for before, piece in itertools.pairwise([Token("op", ""), *pieces]):
        apart = {before.kind, piece.kind} <= {"factor", "limits"} and (before.wide or piece.wide)
        text += THIN * apart + piece.xml
    return text


def _fractions(pieces: Sequence[Token]) -> list[Token]:
    """`a b / c d` is a b over c, times d; a tight slash takes one factor from either side, a sum goes below whole."""
    out: list[Token] = []
    rest = list(pieces)
    while rest:
        piece = rest.pop(0)
        above = list(itertools.takewhile(lambda one: one.kind == "factor", reversed(out)))[::-1]
        if not piece.slash or not above or not rest:
            out.append(piece)
            continue
        above = above[-1:] if piece.slash == "tight" else above
        below = [rest.pop(0)]
        while below[0].kind == "limits" and rest and rest[0].kind in ("factor", "limits"):
            below.append(rest.pop(0))
        parts = [one[0].bare or one[0].xml if len(one) == 1 else _joined(one) for one in (above, below)]
        line = f"<mfrac><mrow>{parts[0]}</mrow><mrow>{parts[1]}</mrow></mfrac>"
        out[len(out) - len(above):] = [Token("factor", line)]
    return out


def _piece(nodes: Sequence[Node], place: int, display: bool) -> Token:
    node = nodes[place]
    match node.kind:
        case "group":
            bare = _row(node.inner, display)
            return Token("factor", _scripts(node, _fenced(node.base, bare), display),
                         "" if node.scripted or node.base in "|<" else bare, wide=node.base == "|")
        case "call":
            name, bracket = node.inner
            inner = _row(bracket.inner, display)
            whole = (f"<msqrt><mrow>{inner}</mrow></msqrt>" if name.base == "sqrt" else
                     f"<mrow>{_name(name, display).xml}{_fenced(bracket.base, inner)}</mrow>")
            return Token("factor", _scripts(node, whole, display), wide=not name.symbol)
        case "word":
            return _word(nodes, place, display)
        case "number":
            return Token("factor", _scripts(node, f"<mn>{node.base}</mn>", display))
    return _operator(nodes, place)


def _fenced(opening: str, inner: str) -> str:
    """Fences are as tall as a fraction or a sum between them."""
    left, right = ("⟨", "⟩") if opening == "<" else (opening, CLOSING[opening])
    size = "" if "<mfrac>" in inner or "<munder>" in inner else ' stretchy="false"'
    return f'<mrow><mo form="prefix"{size}>{left}</mo>{inner}<mo form="postfix"{size}>{right}</mo></mrow>'


def _operator(nodes: Sequence[Node], place: int) -> Token:
    """What has nothing before it is a sign; `~` is "about" before a minimum and "proportional to" elsewhere."""
    node, before, after = nodes[place], _neighbour(nodes, place, -1), _neighbour(nodes, place, 1)
    symbol = OPERATORS.get(node.text, node.text)
    if node.text == "~" and after is not None and nodes[after].base == "argmin":
        symbol = "≈"
    if node.text == "*" and before is not None and not _scalar(nodes[before]):
        symbol = "⊙"
    sign = node.text in ("-", "+-") and (before is None or nodes[before].kind in ("op", "mark"))
    spaced = place > 0 and nodes[place - 1].kind == "space"
    slash = "" if node.text != "/" else "loose" if spaced else "tight"
    if node.text == "'s":
        return Token("factor", "<mtext>'s</mtext>")
    form = ' form="prefix"' if sign else ""
    return Token("op" if node.text in OPERATORS else "mark", f"<mo{form}>{html.escape(symbol)}</mo>", slash=slash)


def _scalar(node: Node) -> bool:
    """Numbers, Greek letters (but models) and options are; what else is multiplied with a star is a vector."""
    if node.kind == "word" and node.symbol:
        return node.letters in GREEK and node.letters not in ("theta", "phi", "psi")
    return node.kind == "number" or (node.kind == "word" and node.base not in IN_COMPANY)


def _word(nodes: Sequence[Node], place: int, display: bool) -> Token:
    node, after = nodes[place], _neighbour(nodes, place, 1)
    if node.text == "in":
        return Token("op", "<mo>∈</mo>")
    if node.text == "grad" and after == place + 2 and (nodes[after].symbol or nodes[after].kind == "call"):
        return Token("factor", "<mo>∇</mo>")
    if _named(node) and not (node.base in LIMITS and not node.scripted and after is not None and _plain(nodes[after])):
        return _name(node, display)
    left = _space(nodes, _neighbour(nodes, place, -1))
    right = "" if after is not None and _plain(nodes[after]) else _space(nodes, after)
    return Token("factor", f"<mtext>{left}{html.escape(node.text)}{right}</mtext>")


def _named(node: Node) -> bool:
    return node.scripted or node.symbol or node.base in SURE | IN_COMPANY


def _plain(node: Node) -> bool:
    """An English word; after one of LIMITS it makes that a word too: `the mean of z`."""
    return node.kind == "word" and not _named(node)


def _space(nodes: Sequence[Node], side: int | None) -> str:
    """Between a word and a symbol; MathML drops the spaces of the source."""
    return "" if side is None or (nodes[side].kind in ("op", "mark") and nodes[side].text != "'s") else "\u00a0"


def _name(node: Node, display: bool) -> Token:
    """A symbol; a name of several letters stands upright, and an option's (`server_lr`) as it is typed."""
    number = node.base[len(node.letters):]
    if node.base in LIMITS and not node.below:
        return Token("limits", f"<mi>{LIMITS[node.base]}</mi>", wide=True)
    if node.base in LIMITS:
        symbol = f'<mo movablelimits="true" form="prefix" lspace="0.17em" rspace="0.17em">{LIMITS[node.base]}</mo>'
        return Token("limits", f"<munder>{symbol}<mrow>{_row(node.below, False)}</mrow></munder>")
    if node.symbol:
        symbol = f"<mi>{GREEK.get(node.letters, node.letters)}</mi>"
        symbol = f"<msub>{symbol}<mn>{number}</mn></msub>" if number else symbol
        return Token("factor", _scripts(node, symbol, display))
    if node.below and node.base.islower():
        return Token("factor", f"<mi>{html.escape(node.text)}</mi>", wide=True)
    return Token("factor", _scripts(node, f"<mi>{html.escape(node.base)}</mi>", display), wide=True)


def _scripts(node: Node, xml: str, display: bool) -> str:
    """A prime follows a plain letter; anything else with one is transposed."""
    if "~" in node.accents:
        xml = f'<mover accent="true">{xml}<mo stretchy="false">{TILDE}</mo></mover>'
    primes = node.accents.count("'")
    above = f"<mrow>{_row(node.above, False)}</mrow>" if node.above else ""
    if primes:
        above = f"<mo>{PRIME * primes if node.symbol and not node.below else TRANSPOSED}</mo>"
    below = f"<mrow>{_row(node.below, False)}</mrow>" if node.below else ""
    if below and above:
        return f"<msubsup>{xml}{below}{above}</msubsup>"
    if below or above:
        return f"<msub>{xml}{below}</msub>" if below else f"<msup>{xml}{above}</msup>"
    return xml
