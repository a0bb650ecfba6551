"""FedAvg + fine-tune: a shared model that every client adapts before use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.contract.cohort import Cohort
from coterie.contract.layout import Layout
from coterie.contract.records import Model, Record
from coterie.methods.fedavg import FedAvg
from coterie.options import CountOrZero, Positive


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg whose deployed model is SGD_i(theta): `finetune_epochs` local epochs on `part` at the rate `finetune_lr`.

    Both are by default the run's: `served` here is then what every comparison prints as FedAvg's `adapted`. The
    fine-tuned copy is never written back.
    """

    finetune_epochs: CountOrZero | None = None
    """Local epochs of fine-tuning; none takes the run's."""
    part: str = "all"
    """The part of the model that is fine-tuned."""
    finetune_lr: Positive | None = None
    """Learning rate of fine-tuning; none takes the run's."""

    shared = "the model"
    newcomer = "the shared model, fine-tuned"
    rates = ("finetune_lr",)
    cite = "Yu, Bagdasaryan, Shmatikov, Salvaging federated learning by local adaptation, 2020"
    FORMER = (*FedAvg.FORMER, ("epochs", "finetune_epochs"), ("lr", "finetune_lr"))

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_frozen(layout, self.part, "fine-tunes")

    def deploy(self, cohort: Cohort, payload: Model, mine: Record) -> Tensor:
        return cohort.train(payload.row, epochs=self.finetune_epochs, part=self.part, lr=self.finetune_lr)
