"""FedALA: a client blends the shared model into its own, weight by weight, before it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.layout import Layout
from coterie.contract.net import Batch, Given, Net
from coterie.contract.records import Model, Record, Upload
from coterie.methods.fedavg import FedAvg
from coterie.options import Count, NonNegative, Range, Share


@dataclass(frozen=True)
class Blended(Record):
    """The client's model `[C, D]`, its weights W `[C, d]`, and `met [C]`: 0 never trained, 1 trained, 2 W learned."""

    row: Tensor
    w: Tensor
    met: Tensor

    former = ("Own",)


def reweigh(w: Tensor, gradient: Tensor, own: Tensor, shared: Tensor, eta: float) -> Tensor:
    """W <- clip(W - eta grad * (theta - theta_i), 0, 1), the gradient being that at the blended model."""
    return (w - eta * gradient * (shared - own)).clamp(0, 1)


@dataclass(frozen=True)
class FedALA(FedAvg):
    """Clients start from theta_i + (theta - theta_i) * W in `layers` and from the shared theta elsewhere.

    W (at first `initial` everywhere) takes SGD steps of size `eta` on a stretch of `fraction` of the training data:
    W <- clip(W - eta grad * (theta - theta_i), 0, 1). The first time this is repeated until the losses of the last
    ten passes spread by less than `settled` (at most `passes` times), later for one pass. A client that has not
    trained yet starts from theta. What a client uses is the blended model before local training.
    """

    layers: str = "head"
    """The part in which own and received model are blended; the rest is the received one."""
    eta: NonNegative = 1.0
    """Step size of the blending weights W."""
    fraction: Annotated[float, Range(above=0, at_most=1)] = 0.8
    """Share of the training data that W is fitted on."""
    initial: Share = 1.0
    """Value of W at the start; 1 is the received model."""
    settled: NonNegative = 0.1
    """W has settled once the losses of the last ten passes spread by less than this."""
    passes: Count = 100
    """Most passes the first time, when W is fitted until it has settled; the paper sets no limit."""

    family = "personalized aggregation"
    keeps = "its model and W"
    cite = "Zhang et al., FedALA: adaptive local aggregation for personalized federated learning, AAAI 2023"

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_frozen(layout, self.layers, "blends")

    def join(self, cohort: Cohort, payload: Model) -> Blended:
        columns = cohort.layout.cut(payload.row, self.layers)
        return Blended(payload.row, torch.full_like(columns, self.initial), torch.zeros_like(payload.row[:, 0]))

    def blend(self, cohort: Cohort, payload: Model, mine: Blended) -> tuple[Tensor, Tensor]:
        """The rows that clients start from `[C, D]`, and their W."""
        layout, shared = cohort.layout, payload.row
        own = torch.where(mine.met[:, None] > 0, mine.row, shared)
        own = layout.put(shared, self.layers, layout.cut(own, self.layers))  # nothing to blend outside the layers
        w = layout.put(torch.ones_like(own), self.layers, mine.w)
        if self.eta and mine.w.shape[1]:
            zero, never = torch.zeros_like(mine.met), own.new_full((cohort.size, 10), torch.inf)  # no pass yet
            state = {"w": w, "recent": never, "loss": zero, "seen": zero, "met": mine.met}
            samples = torch.ceil(cohort.n.double() * self.fraction).to(own.dtype)
            w = cohort.loop(
                self.step, state, {"own": own, "shared": shared, "samples": samples},
                epochs=self.passes, fraction=self.fraction, until=self.done, purpose="ala", counted=mine.met > 0,
            )["w"]  # whoever never trained has theta, and nothing to weigh against it
        return torch.lerp(own, shared, w), layout.cut(w, self.layers)

    def step(self, net: Net, s: Given, batch: Batch, given: Given) -> dict[str, Tensor]:
        """One step of W; `recent [10]` are the mean losses of the last passes, `loss` and `seen` sums of this one."""
        row, count = torch.lerp(given.own, given.shared, s.w), batch.weight.sum()
        total, seen = s.loss + net.loss(row, batch) * count, s.seen + count
        over = seen >= given.samples  # the pass is
        recent = torch.where(over, torch.cat([s.recent[1:], (total / seen)[None]]), s.recent)
        return {
            "w": reweigh(s.w, net.grad(row, batch), given.own, given.shared, self.eta), "recent": recent,
            "loss": torch.where(over, 0, total), "seen": torch.where(over, 0, seen), "met": s.met,
        }

    def done(self, s: Given) -> Tensor:
        """Which clients need no further pass; one whose W is young needs ten losses that agree."""
        return (s.met != 1) | (s.recent.std(1) < self.settled)

    def local(self, cohort: Cohort, payload: Model, mine: Blended) -> tuple[Upload, Record]:
        row, w = self.blend(cohort, payload, mine)
        row = cohort.train(row)
        return Upload(update=row - payload.row), Blended(row, w, (mine.met + 1).clamp(max=2))

    def deploy(self, cohort: Cohort, payload: Model, mine: Blended) -> Tensor:
        return self.blend(cohort, payload, mine)[0]
