"""APFL: every client mixes its own model with the shared one, in a proportion it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.net import Batch, Given, Net
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedavg import FedAvg
from coterie.options import NonNegative, Share


@dataclass(frozen=True)
class Mixture(Record):
    """A client's own model v_i `[C, D]` and its proportion `alpha [C]`."""

    own: Tensor
    alpha: Tensor

    former = ("Own",)


@dataclass(frozen=True)
class APFL(FedAvg):
    """w <- w - lr grad(w), v <- v - lr alpha grad(m) with m = alpha v + (1 - alpha) w of the old w; theta is FedAvg's.

    Client i deploys alpha_i v_i + (1 - alpha_i) theta with the latest theta. With `adaptive`, alpha moves once a round,
    at the trained models on all training samples: alpha <- clip(alpha - alpha_lr (<v - w, grad(m)> + rho alpha), 0, 1)
    with `alpha_lr` by default the run's. The running statistics of v are those of the mixture it was trained in.
    `form=pfllib`: v takes grad(v), alpha moves each batch by <v - w, alpha grad(v) + (1 - alpha) grad(w)> + rho alpha,
    and after the round the mixture replaces v and is deployed as it is. Clients count by n_i in theta, where the paper
    counts them alike.
    """

    alpha: Share = 0.5
    """Share of the own model in the mixture, at the start, or always with adaptive=false; the paper takes 0.25, 0.5 and
    0.75."""
    adaptive: bool = True
    """Whether the share is learned: once a round on all training samples, or with form=pfllib at every batch."""
    alpha_lr: NonNegative | None = None
    """Step size of the share; none takes the run's learning rate."""
    rho: NonNegative = 0.0
    """How strongly the share is pulled towards 0, the shared model."""
    form: Literal["paper", "pfllib"] = "paper"
    """As the paper describes it, or as PFLlib's program does it."""

    rates = ("alpha_lr",)
    family = "regularised"
    keeps = "its own model and its proportion"
    newcomer = "the shared model"
    cite = "Deng, Kamani, Mahdavi, Adaptive personalized federated learning, 2020"
    presets = ("pfllib",)

    @classmethod
    def pfllib(cls) -> APFL:
        """The program of PFLlib, which starts with alpha = 1, that is with the own model alone."""
        return cls(alpha=1.0, rho=0.02, form="pfllib", validation=False, printed="served")

    def only_plain(self) -> str:
        return "its shared and its own model take inner steps of their own"

    def join(self, cohort: Cohort, payload: Model) -> Mixture:
        return Mixture(payload.row, payload.row.new_full((cohort.size,), self.alpha))

    def local(self, cohort: Cohort, payload: Model, mine: Mixture) -> tuple[Upload, Record]:
        step = self.step if self.form == "paper" else self.released
        end = cohort.loop(step, {"row": payload.row, "own": mine.own, "alpha": mine.alpha})
        row, own, alpha = end["row"], end["own"], end["alpha"]
        mixed = torch.lerp(row, own, alpha[:, None])
        if self.adaptive and self.form == "paper":
            alpha = self.moved(alpha, ((own - row) * cohort.grad(mixed)).sum(-1), cohort.lr)
        return Upload(update=row - payload.row), Mixture(own if self.form == "paper" else mixed, alpha)

    def step(self, net: Net, s: Given, batch: Batch, given: Given) -> dict[str, Tensor]:
        mixed = torch.lerp(s.row, s.own, s.alpha)
        own = s.own - given.lr * s.alpha * net.grad(mixed, batch)
        row = s.row - given.lr * net.grad(s.row, batch)
        return {"row": row, "own": net.with_buffers(own, mixed), "alpha": s.alpha}

    def released(self, net: Net, s: Given, batch: Batch, given: Given) -> dict[str, Tensor]:
        at_row, at_own = net.grad(s.row, batch), net.grad(s.own, batch)
        row, own = s.row - given.lr * at_row, s.own - given.lr * at_own
        slope = ((own - row) * torch.lerp(at_row, at_own, s.alpha)).sum()
        return {"row": row, "own": own, "alpha": self.moved(s.alpha, slope, given.lr) if self.adaptive else s.alpha}

    def moved(self, alpha: Tensor, slope: Tensor, lr: float | Tensor) -> Tensor:
        return (alpha - (lr if self.alpha_lr is None else self.alpha_lr) * (slope + self.rho * alpha)).clamp(0, 1)

    def deploy(self, cohort: Cohort, payload: Model, mine: Mixture) -> Tensor:
        return torch.lerp(payload.row, mine.own, mine.alpha[:, None]) if self.form == "paper" else mine.own
