"""pFedMe: personal models near a shared one, which follows their Moreau envelope."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.method import Method, Uploads
from coterie.contract.net import Batch, Given, Net, Row
from coterie.contract.objectives import flat
from coterie.contract.records import Model, Record
from coterie.options import Count, NonNegative, Positive


@dataclass(frozen=True)
class PFedMe(Method):
    """v ~ argmin L(v) + lam/2 |v - w|^2 + nu/2 |v|^2, then w <- w - lr lam (w - v), batch by batch from v = w = theta.

    The inner problem takes `inner` steps of size `inner_lr` on the same batch from the last personal model; a client
    sees `batches` of them a round (by default those of the run's epochs; the paper's 20). The server takes theta <- (1
    - beta) theta + beta mean w_i; clients count alike, or by their samples with `weighted`. A client uses the inner
    problem solved anew from theta: `inner` steps on its batches. They are stable for inner_lr (lam + nu) < 2, and the
    outer steps for lr lam up to about 1, which is 0.075 in the paper (lr 0.005) and 0.75 at a run's usual 0.05. In the
    paper a client uses v as its last local round left it, after many more steps: with few and short inner steps what
    is deployed here is nearer to theta.
    """

    lam: NonNegative = 15.0
    """How strongly the personal model is held near the shared one."""
    inner: Count = 5
    """Steps of the personal model for each batch."""
    inner_lr: Positive = 0.01
    """Their size."""
    nu: NonNegative = 0.0
    """Weight decay of the personal model, which the paper's problem does not have; PFLlib and FL-bench take 0.001."""
    beta: NonNegative = 1.0
    """Share of the clients' mean in the new shared model, 1 or 2 in the paper; a server optimizer steps along what this
    leaves."""
    weighted: bool = False
    """Whether clients count by their samples; false counts them alike."""
    batches: Count | None = None
    """Batches a round, 20 in the paper; none takes those of the run's epochs, as other methods do."""

    family = "regularised"
    shared = "the model"
    newcomer = "the shared model after the inner steps"
    rates = ("inner_lr",)
    cite = "Dinh, Tran, Nguyen, Personalized federated learning with Moreau envelopes, NeurIPS 2020"

    def only_plain(self) -> str:
        return "its inner and outer steps are the method itself"

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.loop(self.step, {"row": rows, "own": rows}, steps=self.batches)["row"]  # w and v, [C, D] each

    def step(self, net: Net, s: Given, batch: Batch, given: Given) -> dict[str, Tensor]:
        own, near = s.own, Given(w=s.row)
        for _ in range(self.inner):
            own = own - self.inner_lr * net.grad(own, batch, self.envelope, near)
        return {"row": net.with_buffers(s.row - given.lr * self.lam * (s.row - own), own), "own": own}

    def envelope(self, net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
        """L(v) + lam/2 |v - w|^2 + nu/2 |v|^2 on a batch."""
        v, w = flat(net, row), flat(net, given.w)
        return net.loss(row, batch) + self.lam / 2 * (v - w).square().sum() + self.nu / 2 * v.square().sum()

    def merge(self, server: Model, up: Uploads) -> Record:
        weights = self.beta * (up.share if self.weighted else up.even)
        return Model(server.row + self.aggregate(up.update, weights, up.layout))

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        near = {"w": payload.row}
        return cohort.train(payload.row, near, steps=self.inner, lr=self.inner_lr, objective=self.envelope)
