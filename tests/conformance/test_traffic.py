"""What travels: for every registered method the bytes down and up per client and round, from a formula and its reason.

A method without a line in TRAFFIC fails here: whoever adds one says what it sends. Tensors are counted apart from
scalars (a few numbers a client), from running statistics, and from what a client tells and is told once, on arrival.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from coterie import registry
from coterie.contract.records import bytes_each, spread
from coterie.errors import CoterieError

METHODS = sorted(registry.methods())
BYTES = 8  # the tiny runs are in float64, and integers have 64 bits


@dataclass(frozen=True)
class Sizes:
    """Numbers in the parts of a tiny model, 4 inputs -> 5 features -> 3 classes, in a federation of 4 clients."""

    body: int  # trainable numbers below the head
    batchnorm: int  # those of them in BatchNorm layers
    buffers: int  # running statistics and counters, all in the body
    inputs: int = 4
    features: int = 5
    classes: int = 3
    clients: int = 4
    models: int = 3  # K, the default of every method that has it
    others: int = 3  # M' = min(5, M - 1), the models of others that FedFomo sends
    rank: int = 0  # of the adapter of the body's linear layer, whose factors are part of the body

    @property
    def head(self) -> int:
        return self.features * self.classes + self.classes

    @property
    def model(self) -> int:
        return self.body + self.head

    @property
    def a(self) -> int:
        """The factor A, r x inputs."""
        return self.rank * self.inputs

    @property
    def b(self) -> int:
        """The factor B, features x r."""
        return self.features * self.rank

    @property
    def residual(self) -> int:
        """What is added to the body's weight, R of features x inputs."""
        return self.features * self.inputs

    @property
    def prototypes(self) -> int:
        """A feature vector per class, C d."""
        return self.classes * self.features

    @property
    def policy(self) -> int:
        """FedCP's: a linear layer d -> 2d with its bias, and the gains and shifts of a layer norm on 2d."""
        return self.features * 2 * self.features + 2 * self.features + 2 * 2 * self.features

    @property
    def cosine(self) -> int:
        """FedNH's model: the body, prototypes in place of the head, and one scale."""
        return self.body + self.prototypes + 1

    @property
    def psi(self) -> int:
        """pFedHN's: k = 1 + M // 4 -> 100 -> three times 100 -> every trainable number, with biases."""
        return 100 * (1 + self.clients // 4 + 1) + 3 * 100 * 101 + self.model * 101


SIZES = {
    "mlp": Sizes(body=4 * 5 + 5, batchnorm=0, buffers=0),
    "bn": Sizes(body=4 * 5 + 5 + 2 * 5, batchnorm=2 * 5, buffers=5 + 5 + 1),
}


def sizes(method: str, model: str) -> Sizes:
    """Those of the model that a method is run over, with adapters of rank 2 where it works on such."""
    s, cls = SIZES[model], registry.methods()[re.split(r"[:+]", method)[0]]
    if not cls.adapters:
        return s
    if cls.moves:  # beside what is frozen: body and running statistics
        s = replace(s, body=0, batchnorm=0, buffers=0)
    return replace(s, body=s.body + 2 * (s.inputs + s.features), rank=2)


Formula = Callable[[Sizes], int]


def nothing(s: Sizes) -> int:
    return 0


def model(s: Sizes) -> int:
    return s.model


def body(s: Sizes) -> int:
    return s.body


def with_residual(s: Sizes) -> int:
    return s.model + s.residual


def head_and_residual(s: Sizes) -> int:
    return s.head + s.residual


def all_but_a(s: Sizes) -> int:
    return s.model - s.a


def one_rank_of_two(s: Sizes) -> int:
    """The model without one rank, which is a row of A and a column of B."""
    return s.model - s.inputs - s.features


@dataclass(frozen=True)
class Traffic:
    """Numbers that travel to and from a client in a round, and how many copies of the buffers go with them."""

    why: str
    down: Formula = model
    up: Formula = model
    buffers: tuple[Formula, Formula] = (lambda s: 1, lambda s: 1)
    scalars_down: dict[str, Formula] = field(default_factory=dict)
    scalars_up: dict[str, Formula] = field(default_factory=dict)
    told: dict[str, Formula] = field(default_factory=dict)  # to a client, once, when training begins
    tells: dict[str, Formula] = field(default_factory=dict)  # by a client, once


ONE_MODEL = Traffic("the model both ways; whatever else there is stays where it is")
A_BODY = Traffic("the body both ways, with the running statistics in it; the head stays", body, body)
K_DOWN = {"down": lambda s: s.models * s.model, "buffers": (lambda s: s.models, lambda s: 1)}
A_RANK = Traffic(
    "the ranks that the client has, and how many these are, both ways; it tells how many when it arrives",
    one_rank_of_two, one_rank_of_two, scalars_down={"rank": lambda s: 1}, scalars_up={"rank": lambda s: 1},
    tells={"rank": lambda s: 1},
)
COUNTED_AS = {name: f"{name}:ranks=1" for name in ("hetlora", "raflora", "fedplora")}
"""Clients draw their ranks, so these are counted where all have one of the adapter's two."""

TRAFFIC = {
    "local": Traffic("nothing is shared", nothing, nothing, (nothing, nothing)),
    "fedavg": ONE_MODEL,
    "fedavgft": ONE_MODEL,
    "fedprox": ONE_MODEL,
    "moon": ONE_MODEL,
    "feddyn": ONE_MODEL,  # the server's s and the clients' g_i do not travel: each side adds up its own
    "feduv": ONE_MODEL,
    "ditto": ONE_MODEL,
    "apfl": ONE_MODEL,
    "pfedme": ONE_MODEL,
    "perfedavg": ONE_MODEL,
    "fedala": ONE_MODEL,
    "lorafair": ONE_MODEL,
    "flexlora": ONE_MODEL,
    "hetlora": A_RANK,
    "raflora": A_RANK,
    "fedplora": Traffic("all ranks down, those that were trained up, and which they are", up=one_rank_of_two,
                        scalars_up={"modules": lambda s: s.rank}),
    "ffalora": Traffic("all but A, which every client draws from the seed", all_but_a, all_but_a),
    "fedsvd": Traffic("the model down, as the server writes both factors anew; all but A up", up=all_but_a),
    "rolora": Traffic("the model down; in the second round, which is counted here, all but B up",
                      up=lambda s: s.model - s.b),
    "fedexlora": Traffic("all of R beside the model down, as who missed a round lacks its change", with_residual),
    "flora": Traffic("the head and all of R down, as adapters begin anew; adapters and head up", head_and_residual),
    "feddpa": ONE_MODEL,  # the second adapter and its weight stay
    "fedalt": Traffic("down the mean of the others' adapters and what else trains, up its own adapter and that"),
    "hilora": Traffic(
        "in the root's rounds, which are counted here, one adapter and what else trains both ways; once there are "
        "clusters, a newcomer is told the root's row and tells its factor B",
        told={"rows": nothing}, tells={"up": nothing},
    ),
    "fedmtl": Traffic("down the mean of all models, up how the client's own moved"),
    "fedamp": Traffic("down the client's mixture u_i, up how far its model is from it"),
    "cfl": Traffic(
        "the model of the client's leaf both ways; a newcomer is told the S models at which leaves were split and "
        "tells its update at each, and S = 0 when training begins",
        told={"rows": nothing}, tells={"moves": nothing},
    ),
    "pacfl": Traffic(
        "the model of the client's cluster both ways; once, an input's size times 3 singular vectors a class",
        tells={"basis": lambda s: s.inputs * 3 * s.classes},
    ),
    "fesem": Traffic(
        "the client's centre both ways; a newcomer is told the mean and the centres, one when training begins, and "
        "tells which is nearest",
        told={"rows": lambda s: 2 * (s.model + s.buffers)}, tells={"cluster": lambda s: 1},
    ),
    "cwfedavg": Traffic(
        "the client's mixture of class models both ways; once, FedAvg's model, whose head's norms a client tells",
        told={"row": lambda s: s.model + s.buffers}, tells={"mix": lambda s: s.classes},
    ),
    "pfedhn": Traffic(
        "the model that the hypernetwork wrote both ways; once, the hypernetwork with the mean embedding, the row and "
        "the columns it writes, which a newcomer needs to fit its embedding of 1 + M / 4 numbers",
        told={"psi": lambda s: s.psi, "e": lambda s: 2, "row": lambda s: s.model + s.buffers, "columns": model},
        tells={"e": lambda s: 2},
    ),
    "scaffold": Traffic(
        "model and control variate both ways, in rows of the same length, so buffers are counted twice",
        lambda s: 2 * s.model, lambda s: 2 * s.model, (lambda s: 2, lambda s: 2),
    ),
    "fedfew": Traffic(
        "K models both ways, and the K losses behind the weights", lambda s: s.models * s.model,
        lambda s: s.models * s.model, (lambda s: s.models, lambda s: s.models), scalars_up={"loss": lambda s: s.models},
    ),
    "ifca": Traffic(
        "down K models to choose from, up the chosen one and its number", **K_DOWN, scalars_up={"choice": lambda s: 1}
    ),
    "fedsoft": Traffic(
        "down K cluster models, up the client's own and how much each cluster matters to it", **K_DOWN,
        scalars_up={"u": lambda s: s.models},
    ),
    "fedfomo": Traffic(
        "down the models of M' others and whose they are, up the client's own, what each was worth, and whose it was",
        lambda s: s.others * s.model, buffers=(lambda s: s.others, lambda s: 1),
        scalars_down={"who": lambda s: s.others}, scalars_up={"omega": lambda s: s.others, "who": lambda s: s.others},
    ),
    "fedper": A_BODY,
    "fedrep": A_BODY,
    "fedbabu": A_BODY,  # the head is nobody's: every client rebuilds the initial one from the seed
    "lgfedavg": Traffic(
        "the head both ways; the body and its running statistics stay", lambda s: s.head, lambda s: s.head,
        (nothing, nothing),
    ),
    "fedbn": Traffic(
        "all but the BatchNorm layers, whose running statistics stay with them", lambda s: s.model - s.batchnorm,
        lambda s: s.model - s.batchnorm, (nothing, nothing),
    ),
    "fedrod": Traffic("body and generic head, the user's model, both ways; the second head stays"),
    "fedcp": Traffic(
        "body, shared head and policy both ways; the second head stays, and the context is made of it",
        lambda s: s.model + s.policy, lambda s: s.model + s.policy,
    ),
    "fedpac": Traffic(
        # Often given as 1 + C d up. Two tables of C d are needed: H under the received body, from which heads are
        # combined, and the sums of features under the trained body, which become prototypes.
        "down body, the client's combined head, prototypes and which are known; up body, head, both feature tables, V "
        "and samples per class; once, the body, and H under it",
        lambda s: s.model + s.prototypes, lambda s: s.model + 2 * s.prototypes,
        scalars_down={"known": lambda s: s.classes}, scalars_up={"V": lambda s: 1, "counts": lambda s: s.classes},
        told={"row": lambda s: s.body + s.buffers}, tells={"H": lambda s: s.prototypes},
    ),
    "fednh": Traffic(
        "body, prototypes and scale both ways, which are this method's model; up also the class means and counts",
        lambda s: s.cosine, lambda s: s.cosine + s.prototypes, scalars_up={"counts": lambda s: s.classes},
    ),
}

VARIANTS = {
    "fedmtl:pfllib": Traffic(
        "the models of all m participants, here everybody, go to each of them", lambda s: s.clients * s.model,
        buffers=(lambda s: s.clients, lambda s: 1),
    ),
    "apfl:pfllib": ONE_MODEL,
    "fedbabu:pfllib": A_BODY,
    "ifca:clustered=head": TRAFFIC["ifca"],
    "fedsoft:selected=2": TRAFFIC["fedsoft"],
    "fedamp:heur": TRAFFIC["fedamp"],
    "pfedhn:pc": Traffic(
        "as by default, without the head: the hypernetwork does not write it", body, body,
        told=TRAFFIC["pfedhn"].told | {
            "psi": lambda s: s.psi - 101 * s.head, "row": lambda s: s.body + s.buffers, "columns": body
        },
        tells={"e": lambda s: 2},
    ),
    "fedfew:official": TRAFFIC["fedfew"],
    "cwfedavg:distribution=true": Traffic(
        "as by default; a client that tells its label distribution needs no model to estimate it",
        tells={"mix": lambda s: s.classes},
    ),
    "feddyn:flbench": Traffic(
        "a model both ways, and down the mean number of samples; once, a client's own number",
        scalars_down={"mean": lambda s: 1}, tells={"samples": lambda s: 1},
    ),
    "flexlora:ranks=1": A_RANK,
    "fedavg+confree": ONE_MODEL,  # an aggregator works on the server, on what is uploaded anyway
    "fedrep+fedmgdaplus": A_BODY,
}


def stated(method: str) -> Traffic:
    found = (TRAFFIC | VARIANTS).get(method)
    assert found is not None, f"'{method}' has no line in TRAFFIC of {__file__}: say what it sends, and why."
    return found


def split(measured: dict[str, int], scalars: dict[str, Formula]) -> tuple[int, dict[str, int]]:
    """The bytes of the tensors together, and those of each scalar field."""
    return sum(n for name, n in measured.items() if name not in scalars), {
        name: measured[name] for name in scalars if name in measured
    }


def second_round(tiny, method, model, **training):
    sim = tiny.simulation(COUNTED_AS.get(method, method), model, **training)
    sim.round()
    return sim.round()


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_bytes_per_client_and_round(tiny, method, model):
    """Tensors as TRAFFIC says; running statistics, which only one of the models has, as often as it says; scalars."""
    entry, s = stated(method), sizes(method, model)
    outcome = second_round(tiny, method, model)
    ways = (
        (outcome.down, entry.down, entry.buffers[0], entry.scalars_down),
        (outcome.up, entry.up, entry.buffers[1], entry.scalars_up),
    )
    for measured, formula, copies, scalars in ways:
        tensors, small = split(measured, scalars)
        assert tensors == BYTES * (formula(s) + copies(s) * s.buffers)
        assert small == {name: BYTES * size(s) for name, size in scalars.items()}


PARTIAL = (  # they exchange a part
    "fedper", "fedrep", "fedbabu", "lgfedavg", "fedbn", "fedrod", "fedcp", "fedpac", "ffalora", "fedsvd", "rolora",
    "feddpa", "fedalt", "hilora",
)
MOVING = ("fedexlora", "flora")  # beside a body that is frozen, its buffers too


@pytest.mark.parametrize("method", [m for m in METHODS if m not in (*PARTIAL, *MOVING)])
def test_buffers_that_stay_at_home_do_not_travel(tiny, method):
    """buffers=local: the tensors alone."""
    entry, s = stated(method), sizes(method, "bn")
    outcome = second_round(tiny, method, "bn", buffers="local")
    assert split(outcome.down, entry.scalars_down)[0] == BYTES * entry.down(s)
    assert split(outcome.up, entry.scalars_up)[0] == BYTES * entry.up(s)


@pytest.mark.parametrize("method", PARTIAL)
def test_methods_that_exchange_a_part_refuse_to_keep_buffers_at_home(tiny, method):
    """Which buffers those would be depends on what is exchanged; the sentence says what to do."""
    with pytest.raises(CoterieError, match="exchanges a part"):
        tiny.simulation(method, "bn", buffers="local")


def test_pfllibs_fedmtl_sends_the_models_of_those_who_take_part(tiny):
    """Half of the four clients: two models down, as the round before had two participants, and one up."""
    outcome, row = second_round(tiny, "fedmtl:pfllib", "mlp", participation=0.5), BYTES * SIZES["mlp"].model
    assert (outcome.down, outcome.up) == ({"rows": 2 * row}, {"row": row})


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_what_is_told_once(tiny, method):
    """First contact: what a client is told before it introduces itself, and what it tells; nothing unless said."""
    entry, s = stated(method), sizes(method, "bn")
    sim = tiny.simulation(method, "bn")
    cohort = tiny.cohort(sim)
    hello = spread(sim.method.hello(sim.method.start(sim.init)), cohort.size)
    introductions = sim.method.introduce(cohort, hello)
    assert bytes_each(hello.tensors()) == {name: BYTES * size(s) for name, size in entry.told.items()}
    assert bytes_each(introductions.tensors()) == {name: BYTES * size(s) for name, size in entry.tells.items()}


UNITS: dict[str, Formula] = {
    "": model, "body": body, "head": lambda s: s.head, "all but BatchNorm": lambda s: s.model - s.batchnorm,
    "policy": lambda s: s.policy, "all but A": all_but_a, "all but A or B": lambda s: s.model - s.b,
    "its ranks": one_rank_of_two,
    "prototypes": lambda s: s.prototypes, "class features": lambda s: s.prototypes,
    "residual": lambda s: s.residual, "all but adapters": lambda s: s.head,
}


def read(words: str, s: Sizes, whole: int) -> int:
    """`2`, `K`, `M'` are so many models, other words are parts of one, and `1 + 2 class features` is a sum of such."""
    total = 0
    for term in words.split(" + "):
        count, unit = re.fullmatch(r"(\d+|K|M')? ?(.*)", term).groups()
        number = {None: 1, "K": s.models, "M'": s.others}.get(count) or int(count)
        total += number * (UNITS[unit](s) if unit else whole)
    return total


@pytest.mark.parametrize("method", METHODS)
def test_the_page_says_what_travels(method):
    """The words `down` and `up` that `coterie methods` prints, read as numbers, are those of the formulas."""
    entry, cls, s = stated(method), registry.methods()[method], sizes(method, "bn")
    whole = s.cosine if method == "fednh" else s.model  # FedNH's model has prototypes for a head
    found = (0, 0) if (cls.down, cls.up) == ("0", "0") else (read(cls.down, s, whole), read(cls.up, s, whole))
    assert found == (entry.down(s), entry.up(s))
