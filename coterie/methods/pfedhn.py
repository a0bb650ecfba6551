"""pFedHN: a hypernetwork on the server writes every client's model from the client's embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.cohort import Cohort, Init
from coterie.layout import Layout
from coterie.method import Method, Uploads, enrol
from coterie.net import Batch, Given, Net
from coterie.records import Each, Model, Record, Upload


@dataclass(frozen=True)
class Writer(Record):
    """psi = (`first [h, k+1]`, `middle [depth, h, h+1]`, `outer [P, h+1]`), the last column of each its bias; the
    embeddings `e [M, k]`; and `row [D]`, whose `columns [P]` the hypernetwork writes."""

    first: Tensor
    middle: Tensor
    outer: Tensor
    e: Tensor
    row: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Hyper(Writer):
    """The writer and its optimiser's momenta."""

    momentum_first: Tensor
    momentum_middle: Tensor
    momentum_outer: Tensor
    momentum_e: Tensor


@dataclass(frozen=True)
class Embedding(Record):
    """Embeddings `[C, k]`."""

    e: Tensor


def affine(matrix: Tensor, z: Tensor) -> Tensor:
    """`[out, in+1], [m, in] -> [m, out]`: the last column is the bias."""
    return z @ matrix[:, :-1].T + matrix[:, -1]


@dataclass(frozen=True)
class PFedHN(Method):
    """theta_i = H(e_i; psi); (psi, e_i) <- (psi, e_i) + server_lr (d theta_i / d(psi, e_i))' Delta_i, Delta_i by SGD.

    H is an MLP: k = `embedding` numbers (1 + M / 4 by default) -> `hidden` -> `depth` times (ReLU, `hidden`) -> one
    linear output per trainable tensor: its bias starts as a fresh model, its weights at `spread` times the scale of
    that tensor. The vector-Jacobian products of a round's participants are averaged, clipped to norm
    `clip`, and taken by SGD with `momentum` and weight `decay`. Buffers cannot be written so and are averaged. An
    unseen client fits an embedding alone: `adapt` full gradient steps of size `adapt_lr` from the clients' mean.
    """

    embedding: int | None = None
    hidden: int = 100
    depth: int = 3
    spread: float = 1.0
    server_lr: float = 0.01
    momentum: float = 0.9
    decay: float = 1e-3
    clip: float = 50.0
    adapt: int = 20
    adapt_lr: float = 0.1

    family = "personalised aggregation"
    shared = "a hypernetwork"
    newcomer = "the model of an embedding fitted to its data, the hypernetwork being fixed"
    cite = "Shamsian et al., Personalized federated learning using hypernetworks, ICML 2021"
    averages = False

    def start(self, init: Init) -> Record:
        row, layout, h = init.row, init.layout, self.hidden
        k = 1 + init.population // 4 if self.embedding is None else self.embedding
        columns, scale = trainable(layout, row)
        generator = init.noise("pfedhn")

        def drawn(*shape: int) -> Tensor:
            fan = max(shape[-1] - 1, 1)
            weight = (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) / math.sqrt(fan)
            return weight.to(row)

        first, middle, outer = drawn(h, k + 1), drawn(self.depth, h, h + 1), drawn(len(columns), h + 1)
        outer = torch.cat([self.spread * scale[:, None] * outer[:, :-1], row[columns, None]], 1)
        weights = {"first": first, "middle": middle, "outer": outer, "e": row.new_zeros(init.population, k)}
        still = {f"momentum_{name}": torch.zeros_like(t) for name, t in weights.items()}
        return Hyper(**weights, **still, row=row, columns=columns)

    def generate(self, first: Tensor, middle: Tensor, outer: Tensor, e: Tensor) -> Tensor:
        """H: embeddings `[m, k] -> [m, P]`."""
        z = affine(first, e)
        for matrix in middle.unbind():
            z = affine(matrix, torch.relu(z))
        return affine(outer, z)

    def rows(self, server: Writer, e: Tensor) -> Tensor:
        """`[m, k] -> [m, D]`: the models of these embeddings."""
        rows = server.row.repeat(len(e), 1)
        rows[:, server.columns] = self.generate(server.first, server.middle, server.outer, e)
        return rows

    def back(self, server: Writer, e: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """v `[m, P]` -> (dH / d(first, middle, outer, e))' v."""
        back: Callable[[Tensor], tuple[Tensor, ...]]
        back = torch.func.vjp(self.generate, server.first, server.middle, server.outer, e)[1]
        return back

    def hello(self, server: Hyper) -> Record:
        return Writer(server.first, server.middle, server.outer, server.e.mean(0), server.row, server.columns)

    def introduce(self, cohort: Cohort, hello: Writer) -> Record:
        if cohort.round == 0:
            return cohort.loop(draw, Embedding(hello.e), steps=1, purpose="embedding")
        server, e = hello.map(lambda t: t[0]), hello.e  # what all newcomers are told is the same
        for _ in range(self.adapt):
            back = self.back(server, e)
            e = e - self.adapt_lr * back(cohort.grad(self.rows(server, e))[:, server.columns])[3]
        return Embedding(e)

    def admit(self, server: Hyper, ids: Tensor, introductions: Embedding) -> Record:
        return replace(server, e=enrol(server.e, ids, introductions.e))

    def send(self, server: Hyper, ids: Tensor) -> Record:
        return Model(Each(self.rows(server, server.e[ids])))  # type: ignore[arg-type]

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        return Upload(update=cohort.train(payload.row) - payload.row), mine

    def merge(self, server: Hyper, up: Uploads) -> Record:
        weights = {"first": server.first, "middle": server.middle, "outer": server.outer, "e": server.e}
        slopes = self.slopes(server, up)
        norm = torch.stack([torch.linalg.vector_norm(g) for g in slopes.values()]).norm()
        new: dict[str, Tensor] = {}
        for name, value in weights.items():
            slope = slopes[name] * (self.clip / norm.clamp(min=self.clip)) + self.decay * value
            velocity = self.momentum * getattr(server, f"momentum_{name}") + slope
            new |= {name: value - self.server_lr * velocity, f"momentum_{name}": velocity}
        moved = server.row + self.aggregate(up.update, up.share, up.layout)
        return Hyper(**new, row=moved.index_copy(0, server.columns, server.row[server.columns]), columns=server.columns)

    def slopes(self, server: Hyper, up: Uploads) -> dict[str, Tensor]:
        """The mean over participants of (d theta_i / d(psi, e_i))' (theta_i - theta~_i)."""
        back = self.back(server, server.e[up.ids])
        first, middle, outer, e = back(-up.update[:, server.columns] / len(up.ids))
        table = torch.zeros_like(server.e).index_add(0, up.ids, e)
        return {"first": first, "middle": middle, "outer": outer, "e": table}

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return payload.row


def draw(net: Net, s: Given, batch: Batch, given: Given) -> dict[str, Tensor]:
    """A standard normal embedding from the client's own stream (Box and Muller)."""
    one, two = net.uniform((2, *s.e.shape)).to(s.e.dtype)
    return {"e": (-2 * torch.log1p(-one)).sqrt() * torch.cos(2 * math.pi * two)}


def trainable(layout: Layout, row: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of trainable tensors `[P]`, and the root mean square of each one's tensor in a fresh `row`."""
    chosen = [entry for entry in layout.entries if entry.trainable]
    columns = torch.cat([torch.arange(entry.start, entry.stop) for entry in chosen])
    scale = [row[e.start : e.stop].square().mean().sqrt().expand(e.size) for e in chosen]
    return columns.to(row.device), torch.cat(scale)
