"""FedDPA: a shared and a personal adapter beside every layer, mixed in a fixed proportion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from coterie.contract.cohort import Cohort
from coterie.contract.layout import Layout
from coterie.contract.records import Model, Record
from coterie.methods.fedper import FedPer
from coterie.models.several import MINE, OWN, SHARED, Mixed, with_several
from coterie.options import CountOrZero, Share

SHARE = "*.own_share"


@dataclass(frozen=True)
class FedDPA(FedPer):
    """h = W_0 x + (1 - a) s B_g A_g x + a s B_l A_l x, with B_g, A_g FedIT's and B_l, A_l the client's own.

    `variant=t`: in a round the client trains its own pair in this mixture, the received shared one fixed, then the
    shared one alone (a = 0), and uploads it. `variant=f`: rounds are FedIT's; the model in use starts its own pair as a
    copy of the shared one and trains it in the mixture, in `deploy`, so that these steps are counted and kept nowhere.
    A client that has not trained its own pair yet uses the shared one alone, a = 0. Whatever else trains, such as the
    head, goes with the shared pair. At a = 0 this is FedAvg on adapters, at a = 1 and with a personal head Local. p_i =
    n_i / n, where the paper counts clients alike. The weight of each sample at prediction, by how much it is like the
    client's own ones, is not built: a is the same for all samples.
    """

    variant: Literal["t", "f"] = "t"
    """When the own pair is trained: t, in every round; f, on the finished shared pair, whenever the model is used."""
    a: Share = 0.5
    """Weight of the own pair in the mixture; the paper tries 0.3, 0.5 and 0.7."""
    head: Literal["shared", "personal"] = "shared"
    """Whether the head is averaged, or stays with the client and trains with its own pair."""
    finetune_epochs: CountOrZero | None = None
    """Local epochs of the own pair with variant=f; none takes the run's."""
    personal: str = field(default="", init=False)

    family = "low-rank adapters"
    shared = "an adapter and the head"
    keeps = "a second adapter"
    down = up = "1"
    newcomer = "the shared adapter alone"
    cite = "Yang et al., Dual-personalizing adapter for federated foundation models, NeurIPS 2024"
    adapters = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "personal", MINE + "+head" * (self.head == "personal"))

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)
        super().check(population, layout)

    def wrap(self, module: nn.Module) -> nn.Module:
        return with_several(module, Mixed)

    def join(self, cohort: Cohort, payload: Model) -> Record:
        if self.head == "personal":
            return super().join(cohort, payload)
        return Model(cohort.layout.cut(cohort.assemble({}), self.personal))

    def fit(self, cohort: Cohort, rows: Tensor) -> Tensor:
        return cohort.train(rows, part="head")  # a newcomer's personal one, over the shared adapter

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        if self.variant == "f":
            return cohort.train(rows, part=f"~{OWN}")
        own = cohort.train(self.mixed(cohort, rows, self.a), part=self.personal)
        return self.mixed(cohort, cohort.train(self.mixed(cohort, own, 0.0), part=f"~{self.personal}"), self.a)

    def deploy(self, cohort: Cohort, payload: Model, mine: Model) -> Tensor:
        rows = super().deploy(cohort, payload, mine)
        if self.variant == "t":
            return rows
        begun = cohort.layout.put(rows, OWN, cohort.layout.cut(rows, SHARED))
        return cohort.train(self.mixed(cohort, begun, self.a), epochs=self.finetune_epochs, part=self.personal)

    def mixed(self, cohort: Cohort, rows: Tensor, a: float) -> Tensor:
        """Rows with the weight a of the own pair in every layer."""
        return cohort.layout.put(rows, SHARE, rows.new_full((), a))
