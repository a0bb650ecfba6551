"""FedAvg: one averaged model for everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.contract.method import Method, Uploads
from coterie.contract.records import Model, Record


@dataclass(frozen=True)
class FedAvg(Method):
    """theta <- theta + sum_i p_i (SGD_i(theta) - theta) with p_i = n_i / n over the participants.

    The rest is what every method does unless it says otherwise: the server starts from one fresh model, clients train
    what they received, upload how it moved, and use the model as received.
    """

    family = "baseline"
    shared = "the model"
    newcomer = "the shared model"
    cite = "McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017"
    presets = ("fedit",)
    FORMER: ClassVar[tuple[tuple[str, str], ...]] = (("server_lr", "server=sgd(lr={})"),)

    @classmethod
    def fedit(cls) -> FedAvg:
        """FedIT (Zhang et al., Towards building the federated GPT: federated instruction tuning, ICASSP 2024): FedAvg
        over the factors of low-rank adapters, each averaged by itself; the model has to have some (--adapter)."""
        return cls()

    def merge(self, server: Model, up: Uploads) -> Record:
        return Model(server.row + self.aggregate(up.update, up.share, up.layout))
