"""Per-FedAvg: a shared model from which one step on a client's data gives a good personal one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.net import Batch, Given, Net
from coterie.contract.objectives import hessian_times
from coterie.contract.records import Model, Record
from coterie.methods.fedavg import FedAvg
from coterie.options import CountOrZero, NonNegative, Positive


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """min sum_i p_i L_i(w - alpha grad L_i(w)) by local steps on independent batches D, D', D'':

    g = grad L(w - alpha grad L(w; D); D') and w <- w - beta (g - alpha H g) from the old w, where H is the Hessian at
    w on D''. `order` drops the term H g (`first`), takes it as a difference quotient of gradients at w +- delta g
    (`hessian_free`; across the kinks of ReLU networks it is only tame for small alpha), or as it is (`exact`). alpha
    and beta are by default the run's learning rate. A client deploys theta after `adapt_steps` steps of size alpha on
    its training batches (none: the run's local epochs). p_i = n_i / n, where the paper counts clients alike.
    """

    order: Literal["first", "hessian_free", "exact"] = "first"
    """How the second-order term is computed: left out, by differences of gradients (both in the paper), or exactly; it
    costs a third gradient a step."""
    alpha: NonNegative | None = None
    """Step size of the inner step and of adaptation; none takes the run's learning rate, as PFLlib does; the paper
    takes about 0.01."""
    beta: NonNegative | None = None
    """Step size of the outer step; none takes the run's learning rate, as PFLlib does; the paper takes about 0.001."""
    delta: Positive = 1e-3
    """Width of the differences with order=hessian_free."""
    adapt_steps: CountOrZero | None = 1
    """Steps of adaptation before use; none takes the run's local epochs."""

    family = "meta-learning"
    newcomer = "the shared model after its own step"
    rates = ("alpha", "beta")
    cite = "Fallah, Mokhtari, Ozdaglar, Personalized federated learning with theoretical guarantees: " \
        "a model-agnostic meta-learning approach, NeurIPS 2020"
    FORMER = (*FedAvg.FORMER, ("steps", "adapt_steps"))

    def only_plain(self) -> str:
        return "its inner and outer steps are the method itself"

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        alpha = rows.new_full((cohort.size,), cohort.lr if self.alpha is None else self.alpha)
        streams = 2 if self.order == "first" else 3
        return cohort.loop(self.step, Model(rows), {"alpha": alpha}, lr=self.beta, streams=streams).row

    def step(self, net: Net, s: Given, batches: tuple[Batch, ...], given: Given) -> dict[str, Tensor]:
        second, first = batches[:2]  # D' is the stream that plain training would see
        ahead = s.row - given.alpha * net.grad(s.row.clone(), first)
        g = net.grad(ahead, second)
        if self.order != "first":
            g = g - given.alpha * self.curvature(net, s.row, g, batches[2])
        return {"row": net.with_buffers(s.row - given.lr * g, ahead)}

    def curvature(self, net: Net, row: Tensor, g: Tensor, batch: Batch) -> Tensor:
        """H g at `row [D]` on a batch."""
        if self.order == "exact":
            return hessian_times(net, row, batch, g)
        return (net.grad(row + self.delta * g, batch) - net.grad(row - self.delta * g, batch)) / (2 * self.delta)

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return cohort.train(payload.row, steps=self.adapt_steps, lr=self.alpha)
