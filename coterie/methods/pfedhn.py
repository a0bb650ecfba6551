"""pFedHN: a hypernetwork on the server writes every client's model from the client's embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.algebra import affine, lengths, runaway
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Uploads, enrol
from coterie.contract.net import Batch, Given, Net
from coterie.contract.records import Each, Model, Record, Upload
from coterie.errors import CoterieError
from coterie.methods.fedper import FedPer
from coterie.options import BelowOne, Count, CountOrZero, NonNegative, Positive


@dataclass(frozen=True)
class Hyper(Record):
    """The hypernetwork `psi [Q]`, embeddings `e [M, k]`, and `row [d]`, whose `columns [P]` it writes; velocities."""

    psi: Tensor
    e: Tensor
    row: Tensor
    columns: Tensor
    psi_velocity: Tensor
    e_velocity: Tensor


@dataclass(frozen=True)
class PFedHN(FedPer):
    """theta_i = H(e_i; psi); (psi, e_i) <- (psi, e_i) + hyper_lr (d theta_i / d(psi, e_i))' Delta_i, Delta_i by SGD.

    H is an MLP: k = `embedding` numbers (1 + M / 4 by default) -> `hidden` -> `depth` times (ReLU, `hidden`) -> one
    linear output per trainable tensor: its bias starts as a fresh model, its weights at `spread` times the scale of
    that tensor. For psi the vector-Jacobian products of a round's participants are averaged; an embedding takes its own
    client's in full. All are clipped together to norm `hyper_clip` and taken by SGD with `hyper_momentum` and weight
    `hyper_decay`: a client whose update is long takes most of the step; of one that diverged (its model is not finite,
    or a hundred times as long as the middle one) nothing is learned, and the round's record counts it. Embeddings of
    clients that are not asked move by momentum and decay alone. Buffers cannot be written so and are averaged. Every
    client is told the hypernetwork once, on arrival; an unseen one fits an embedding alone: `adapt` full gradient
    steps of size `adapt_lr` from the clients' mean.
    `personal` names a part that H does not write: it stays with its client, as in FedPer, and is trained with the rest
    (pFedHN-PC: the head, which a newcomer fits last).
    """

    personal: str = "none"
    """A part that the hypernetwork does not write and that stays with its client."""
    embedding: CountOrZero | None = None
    """Numbers that describe a client; none takes 1 + M / 4."""
    hidden: Count = 100
    """Width of the hypernetwork."""
    depth: CountOrZero = 3
    """Hidden layers after the first."""
    spread: NonNegative = 1.0
    """How much models differ between clients at the start."""
    hyper_lr: Positive = 0.1
    """Step size of hypernetwork and embeddings; the paper takes 0.01 for one client after another: for the
    hypernetwork 0.1 of a mean over clients is like ten of its steps, for an embedding it is ten times its one step."""
    hyper_momentum: BelowOne = 0.9
    """Momentum of its steps."""
    hyper_decay: NonNegative = 1e-3
    """Weight decay of its steps."""
    hyper_clip: Positive = 50.0
    """Largest norm of its gradient."""
    adapt: CountOrZero = 20
    """Steps on all its training samples that fit the embedding of an unseen client; they are counted as training."""
    adapt_lr: Positive = 0.1
    """Their size."""

    family = "personalized aggregation"
    shared = "a hypernetwork"
    keeps = "nothing, but what is personal, where that is a part"
    down = up = "1"
    introduces = sent.fields(e=sent.Numbers(-100, 100))  # drawn from N(0, 1), or fitted by a few steps
    newcomer = "the model of an embedding fitted to its data, the hypernetwork fixed; what is personal is trained on it"
    rates = ("hyper_lr", "adapt_lr")
    cite = "Shamsian et al., Personalized federated learning using hypernetworks, ICML 2021"
    averages = False
    presets = ("pc",)
    FORMER = (("server_lr", "hyper_lr"), *((name, f"hyper_{name}") for name in ("momentum", "decay", "clip")))

    @classmethod
    def pc(cls) -> PFedHN:
        """pFedHN-PC: personal classifiers, over bodies that the hypernetwork writes."""
        return cls(personal="head")

    def start(self, init: Init) -> Record:
        h, generator, row = self.hidden, init.noise("pfedhn"), init.layout.cut(init.row, f"~{self.personal}")
        k = 1 + init.population // 4 if self.embedding is None else self.embedding
        columns, scale = trainable(init.layout.only(f"~{self.personal}"), row)

        def drawn(*shape: int) -> Tensor:
            even = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
            return (even / math.sqrt(max(shape[-1] - 1, 1))).to(row)

        first, middle, outer = drawn(h, k + 1), drawn(self.depth, h, h + 1), drawn(len(columns), h + 1)
        outer = torch.cat([self.spread * scale[:, None] * outer[:, :-1], row[columns, None]], 1)
        psi, e = torch.cat([m.flatten() for m in (first, middle, outer)]), row.new_zeros(init.population, k)
        return Hyper(psi, e, row, columns, torch.zeros_like(psi), torch.zeros_like(e))

    def matrices(self, psi: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """psi `[Q] -> [h, k + 1], [depth, h, h + 1], [P, h + 1]`; the last column of every matrix is its bias."""
        h = self.hidden
        first, middle, outer = psi.tensor_split([h * (k + 1), h * (k + 1) + self.depth * h * (h + 1)])
        return first.view(h, k + 1), middle.view(self.depth, h, h + 1), outer.view(-1, h + 1)

    def generate(self, psi: Tensor, e: Tensor) -> Tensor:
        """H: embeddings `[m, k] -> [m, P]`."""
        first, middle, outer = self.matrices(psi, e.shape[1])
        return affine(outer, reduce(lambda z, matrix: affine(matrix, torch.relu(z)), middle.unbind(), affine(first, e)))

    def rows(self, server: Hyper, e: Tensor) -> Tensor:
        """`[m, k] -> [m, d]`: what is shared of the models of these embeddings."""
        return server.row.repeat(len(e), 1).index_copy(1, server.columns, self.generate(server.psi, e))

    def back(self, server: Hyper, e: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(dH / d(psi, e))' v for `v [m, P]`."""
        return torch.func.vjp(self.generate, server.psi, e)[1](v)  # type: ignore[no-any-return]

    def hello(self, server: Hyper) -> Record:
        return replace(server, e=server.e.mean(0), psi_velocity=None, e_velocity=None)  # type: ignore[arg-type]

    def introduce(self, cohort: Cohort, hello: Hyper) -> Upload:
        if cohort.round == 0:
            return Upload(**cohort.loop(draw, {"e": hello.e}, steps=1, purpose="embedding", counted=False))
        server, e, part = hello.map(lambda t: t[0]), hello.e, f"~{self.personal}"  # all newcomers are told the same
        for _ in range(self.adapt):
            slope = cohort.layout.cut(cohort.grad(cohort.assemble({part: self.rows(server, e)}), counted=True), part)
            e = e - self.adapt_lr * self.back(server, e, slope[:, server.columns])[1]
        return Upload(e=e)

    def admit(self, server: Hyper, ids: Tensor, introductions: Upload) -> Record:
        e = torch.where(torch.isfinite(introductions.e).all(1, keepdim=True), introductions.e, 0)  # NaN spreads by psi
        return replace(server, e=enrol(server.e, ids, e), e_velocity=enrol(server.e_velocity, ids, 0 * e))

    def send(self, server: Hyper, ids: Tensor) -> Record:
        return Model(Each(self.rows(server, server.e[ids])))  # type: ignore[arg-type]

    def fit(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return rows if self.personal == "none" else super().fit(cohort, rows)

    def merge(self, server: Hyper, up: Uploads) -> Record:  # type: ignore[override]
        learned = torch.where(self.diverged(server, up)[:, None], 0, up.learned)
        # psi serves them all, an embedding one
        psi_slope, slope = self.back(server, server.e[up.ids], -learned[:, server.columns])
        psi_slope, e_slope = psi_slope / len(up.ids), torch.zeros_like(server.e).index_add(0, up.ids, slope)
        scale = (self.hyper_clip / lengths(torch.cat([psi_slope, e_slope.flatten()]))).clamp(max=1).to(psi_slope)
        psi, psi_velocity = self.step(server.psi, scale * psi_slope, server.psi_velocity)
        e, e_velocity = self.step(server.e, scale * e_slope, server.e_velocity)
        # buffers alone are averaged
        moved = self.aggregate(learned.index_fill(1, server.columns, 0), up.share, up.layout.only(f"~{self.personal}"))
        return Hyper(psi, e, server.row + moved, server.columns, psi_velocity, e_velocity)

    def diverged(self, server: Hyper, up: Uploads) -> Tensor:
        """`[m]`: whose models are on their way to NaN; an update is no measure, as it ends where a client has learned.

        Where fewer than three take part they are measured beside what H writes for (at most a hundred) others.
        """
        trained = self.rows(server, server.e[up.ids]) + up.learned
        others = self.rows(server, server.e[: 100 if len(trained) < 3 else 0])
        return ~up.finite | runaway(torch.cat([trained, others])[:, server.columns])[: len(trained)]

    def report(self, server: Hyper, up: Uploads) -> dict[str, Tensor]:
        return {"left_out": self.diverged(server, up).sum()}

    def fallback(self, server: Hyper, init: Init, report: Mapping[str, Any]) -> Tensor:  # type: ignore[override]
        """What H writes for the clients' mean embedding; the initial one elsewhere."""
        return init.layout.put(init.row, f"~{self.personal}", self.rows(server, server.e.mean(0, keepdim=True))[0])

    def step(self, value: Tensor, slope: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """SGD on the server: the new value and its velocity."""
        velocity = self.hyper_momentum * velocity + (slope + self.hyper_decay * value)
        return value - self.hyper_lr * velocity, velocity


def draw(net: Net, s: Given, batch: Batch, given: Given) -> dict[str, Tensor]:
    """A standard normal embedding from the client's own stream."""
    return {"e": net.normal(s.e)}


def trainable(layout: Layout, row: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of trainable tensors `[P]`, and the root mean square of each one's tensor in a fresh `row`."""
    chosen = [torch.arange(entry.start, entry.stop, device=row.device) for entry in layout.entries if entry.trainable]
    if not chosen:
        raise CoterieError("pfedhn writes all of the model but its personal part, and nothing else of this model "
                           "trains; set personal=none, or take a model with more layers.")
    return torch.cat(chosen), torch.cat([row[c].square().mean().sqrt().expand(len(c)) for c in chosen])
