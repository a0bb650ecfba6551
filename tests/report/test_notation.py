"""The notation of docstrings: formulas are told from words, and each is set as a mathematician would write it.

Expected values are written as LaTeX by hand; `latex` reads the MathML that was made.
"""

# ruff: noqa: RUF001 (letters that look like others are what is tested)

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from coterie import registry
from coterie.contract.aggregator import Aggregator
from coterie.contract.method import Method
from coterie.report import catalogue, notation

ENTRIES: list[type[Method] | type[Aggregator]] = [*registry.methods().values(), *registry.aggregators().values()]
EACH = pytest.mark.parametrize("cls", [pytest.param(cls, id=cls.name) for cls in ENTRIES])
FORMS = {
    "mfrac": r"\frac{%s}{%s}", "msub": "%s_{%s}", "msup": "%s^{%s}", "msubsup": "%s_{%s}^{%s}", "munder": "%s_{%s}",
    "msqrt": r"\sqrt{%s}", "mover": r"\tilde{%s}",
}


def latex(element: ElementTree.Element) -> str:
    parts = [latex(child) for child in element]
    if element.tag in FORMS:
        return FORMS[element.tag] % tuple(parts[: FORMS[element.tag].count("%s")])
    return (element.text or "") + "".join(parts)


def made(formula: str, display: bool = True) -> str:
    return latex(ElementTree.fromstring(notation.mathml(formula, display))).replace("\N{MINUS SIGN}", "-")


@pytest.mark.parametrize(("formula", "expected"), [
    ("theta <- theta + server_lr * sum_i p_i (SGD_i(theta) - theta)", "θ←θ+server_lr·∑_{i}p_{i}(SGD_{i}(θ)-θ)"),
    ("theta_c + sum_{i in c} n_i / n_c Delta_i", r"θ_{c}+∑_{i∈c}\frac{n_{i}}{n_{c}}Δ_{i}"),
    ("q_ij = p_i pi_ij / sum_l p_l pi_lj", r"q_{ij}=\frac{p_{i}π_{ij}}{∑_{l}p_{l}π_{lj}}"),
    ("L_i(w) + mu/2 |w - theta|^2", r"L_{i}(w)+\frac{μ}{2}|w-θ|^{2}"),
    ("L_i(w) + lam / (2 alpha) |w - u_i|^2", r"L_{i}(w)+\frac{λ}{2α}|w-u_{i}|^{2}"),
    ("l = argmin |sum_i l_i u_i / |u_i||^2", r"l=argmin|∑_{i}\frac{l_{i}u_{i}}{|u_{i}|}|^{2}"),
    ("theta_i ~ argmin_w L_i(w) - <g_i, w>", "θ_{i}≈argmin_{w}L_{i}(w)-⟨g_{i},w⟩"),
    ("v_is ~ u_is n_i", "v_{is}∝u_{is}n_{i}"),
    ("server_lr (d theta_i / d(psi, e_i))' Delta_i", r"server_lr(\frac{dθ_{i}}{d(ψ,e_{i})})^{⊤}Δ_{i}"),
    ("A_ij = arccos sigma_max(U_i' U_j)", "A_{ij}=arccosσ_{max}(U_{i}^{⊤}U_{j})"),
    ("g = grad L(w - alpha grad L(w; D); D')", "g=∇L(w-α∇L(w;D);D^{′})"),
    ("W_k, {theta_i : r_i = k}, SGD_i(W_{r_i})", "W_{k},{θ_{i}:r_{i}=k},SGD_{i}(W_{r_{i}})"),
    ("CE + lam |pi_i - pi~(theta)|_2", r"CE+λ|π_{i}-\tilde{π}(θ)|_{2}"),
    ("1/sqrt(C) - exp(-|z_a - z_b|^2 / s2)", r"\frac{1}{\sqrt{C}}-exp(-\frac{|z_{a}-z_{b}|^{2}}{s_{2}})"),
    ("(sigma^-2 - (2 count_sigma)^-2)^(-1/2)", "(σ^{-2}-(2count_sigma)^{-2})^{-1/2}"),
    ("|d|^2 <= c, a >= b, i != j, w +- delta g, d -> c_k", "|d|^{2}≤c,a≥b,i≠j,w±δg,d→c_{k}"),
    ("c_k in R^d", "c_{k}∈R^{d}"),
    ("theta_i + (theta - theta_i) * W, r * z", "θ_{i}+(θ-θ_{i})⊙W,r⊙z"),
    ("mu * V, trim * N, server_lr * g", "μ·V,trim·N,server_lr·g"),
])
def test_a_formula_is_set_as_it_is_meant(formula: str, expected: str) -> None:
    """A tight slash takes a factor from either side, a loose one the product before it; a sum goes below whole."""
    assert made(formula) == expected


def test_in_a_sentence_a_fraction_stays_in_the_line() -> None:
    assert made("p_i = n_i / (n + 1)", display=False) == "p_{i}=n_{i}/(n+1)"


def test_words_in_a_function_keep_their_spaces() -> None:
    assert made("unit(sum of p_i's rows)").replace("\N{NO-BREAK SPACE}", " ") == "unit(sum of p_{i}'s rows)"


@pytest.mark.parametrize(("text", "formulas"), [
    ("Clients minimise L_i(w) + mu/2 |w - theta|^2: every step adds mu (w - theta) to it.",
     ["L_i(w) + mu/2 |w - theta|^2", "mu (w - theta)"]),
    ("a class c that a client, with the clients' mean, has; A client (of K) trains.", ["c", "K"]),
    ("the mean of all g_i, theta <- mean theta_i - s / alpha", ["g_i", "theta <- mean theta_i - s / alpha"]),
    ("its N - faulty - 2 nearest, 2 of 3, one of the l-th vectors", ["N - faulty - 2"]),
    ("set `mu = 1` or order=exact with 0 epochs (then it is Local)", []),
    ("for j != i, and xi_ii is what is left of 1", ["j != i", "xi_ii"]),
    ("C <- C exp(-lr (b - 0.5)), with |u_i| <= C", ["C <- C exp(-lr (b - 0.5))", "|u_i| <= C"]),
])
def test_formulas_are_told_from_words(text: str, formulas: list[str]) -> None:
    """Words that are both, such as mean and a, belong to a formula where one goes on beside them."""
    assert [part for formula, part in notation.split(text) if formula] == formulas


def test_a_bracket_that_is_never_closed_is_text() -> None:
    for text in ("a ( b", "|x", "<x", "x_{i", "f(x", "x) y", "|", "3 < 4 > 2", ""):
        assert "".join(part for _, part in notation.split(text)) == text
        ElementTree.fromstring(notation.mathml(text))


def test_clauses_end_at_semicolons_outside_brackets() -> None:
    assert notation.clauses("theta_i = H(e_i; psi); x <- y,\nthen z.") == ["theta_i = H(e_i; psi);", "x <- y, then z."]


@EACH
def test_every_docstring_is_set_without_leftovers(cls: type[Method] | type[Aggregator]) -> None:
    """No name of a Greek letter, script, arrow or bar of the plain notation is left, in formulas or between them."""
    text = inspect.getdoc(cls) or ""
    stretches = notation.split(text)
    assert "".join(part for _, part in stretches) == text
    assert all(one[0] != other[0] for one, other in pairwise(stretches))
    greek = "|".join(notation.GREEK)
    for formula, part in stretches:
        if formula:
            for display in (False, True):
                element = ElementTree.fromstring(notation.mathml(part, display))
                assert element.attrib["alttext"] == " ".join(part.split())
                said = " ".join(one.text or "" for one in element.iter() if one.tag != "mtext")
                said = re.sub(r"\w+_lr", "", said)  # an option stands as it is typed
                assert not re.search(rf"[_^~]|<-|->|<=|>=|\b(?:{greek}|sum|sqrt)\b", said), part
        else:
            rest = re.sub(r"`[^`]*`|\w+=\w+", "", part)
            assert not re.search(rf"\w[_^]\w|<|>|\||~|\b(?:{greek}|lr)\b|(?<!\w) [-+*/=] (?!\w)", rest), rest


def test_the_equation_of_a_method_is_a_formula() -> None:
    """All but the few that are explained in words alone have one in their first paragraph."""
    words = {"pacfl", "median", "multikrum", "trimmedmean"}
    for cls in ENTRIES:
        equation = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        assert any(formula for formula, _ in notation.split(equation)) == (cls.name not in words), cls.name


def test_a_page_of_the_site_marks_formulas() -> None:
    page = catalogue.leaf(registry.methods()["ditto"])
    assert "```equation\nv_i <- v_i - lr (grad + lam (v_i - theta)) stays with its client;\ntheta is FedAvg's" in page
    assert r"\(v_i\) starts at \(theta\) and takes `personal_epochs` local epochs a round" in page
