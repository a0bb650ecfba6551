"""Where a default is not the paper's, the page says what the paper takes; and what options are said to do, they do."""

from __future__ import annotations

import re

import pytest

from coterie import registry
from coterie.report import catalogue

DIFFERS = {
    "cfl.eps1": "0.4", "cfl.eps2": "1.6", "cfl.split_after": "20", "cfl.explained": "as in the paper",
    "cfl.weighted": "as in the authors' notebook",
    "cwfedavg.lam": "1000",
    "fedamp.alpha": "PFLlib takes 1", "fedala.passes": "sets no limit",
    "feddyn.alpha": "0.01", "feddyn.gradient_clip": "as in the paper's equations",
    "fedfew.mu": "names none", "fedfew.start_from": "equal as in the released program",
    "fedfomo.explore": "0.3",
    "fednh.scale": "20", "fednh.uniform": "as in the released program",
    "fedpac.head_lr": "0.1",
    "fedprox.mu": "0.001, 0.01, 0.1 and 1",
    "fedrep.head_epochs": "10",
    "fedsoft.lam": "0.01", "fedsoft.selected": "15 to 30",
    "moon.mu": "0.1, 1, 5 and 10", "moon.projection_head": "256",
    "pacfl.beta": "4.9", "pacfl.by_label": "as in the paper",
    "perfedavg.alpha": "0.01", "perfedavg.beta": "0.001", "perfedavg.order": "both in the paper",
    "pfedhn.hyper_lr": "0.01",
    "pfedme.batches": "20", "pfedme.beta": "1 or 2",
    "confree.c": "neither paper nor program states a value",
    "fedmgdaplus.epsilon": "0, 0.05, 0.1, 0.5 and 1", "normclip.bound": "the paper fixes a number",
}
"""Options whose default is not the one value of the paper, and what their line must say of it."""

IN_THE_TEXT = {
    "ifca": "e.g. 2 for CIFAR", "lgfedavg": "The paper starts from a model that FedAvg has trained",
    "fedpac": "(5 in the paper)", "cfl": "label skew alone makes plain updates cluster",
    "cwfedavg": "no label count leaves a client", "fedamp": "starts as Local",
    "pfedhn": "an embedding takes its own client's in full",
}

MEANT = {
    "fedamp.sigma": "By cosine: the rate that multiplies the cosine, larger being sharper",
    "apfl.adaptive": "once a round on all training samples, or with form=pfllib at every batch",
    "cfl.eps1": "the norm of its mean update is below this",
    "cfl.eps2": "the norm of some member's own update is above",
    "cwfedavg.distribution": "label counts are then sent",
    "fedfomo.explore": "all models it receives are random ones",
    "fedpac.threshold": "a client's own too",
    "pacfl.vectors": "or of all samples with by_label=false",
}

CITED = {
    "fedfew": ("Guo, Zhang, Lin, Li, Tang, Zhang", "Few-for-many personalized federated learning", "2603.11992, 2026"),
    "cwfedavg": ("Lee, Choi", "Class-wise federated averaging for efficient personalization", "ICCV 2025"),
    "fedpac": ("Xu et al.", "feature alignment and classifier collaboration", "ICLR 2023"),
    "confree": ("Zheng, Hu, Yang, Zheng, Xu, Wang", "conflict-free client update aggregation", "AAAI 2025"),
}


def cls(name):
    return (registry.methods() | registry.aggregators())[name]


@pytest.mark.parametrize(("option", "said"), [*DIFFERS.items(), *MEANT.items()])
def test_an_options_line_says_what_the_paper_takes_or_what_it_does(option, said):
    name, _, field = option.partition(".")
    line = " ".join(catalogue.explained(cls(name))[field].split())
    assert re.search(rf"(?<![\d.]){re.escape(said)}(?![\d])", line), line
    assert said in " ".join(catalogue.section(cls(name)).replace("&lt;", "<").split()), "docs/methods.md has it too"


@pytest.mark.parametrize(("name", "said"), IN_THE_TEXT.items())
def test_a_page_says_what_has_no_option(name, said):
    assert said in " ".join(catalogue.section(cls(name)).split())


@pytest.mark.parametrize(("name", "words"), CITED.items())
def test_a_citation_has_authors_title_and_place(name, words):
    assert all(word in cls(name).cite for word in words), cls(name).cite
