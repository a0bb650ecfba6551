"""A method of one's own in a file: written, checked, compared.

    python examples/own_method.py [FOLDER]
    coterie check examples/own_method.py:Better            # the same from the command line
    coterie compare fedper examples/own_method.py:Better
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import coterie
from coterie import Cohort, Model, Record, Upload, pick
from coterie.data import digits, partition
from coterie.methods.fedavg import FedAvg
from coterie.models import model
from coterie.running import check


@dataclass(frozen=True)
class Better(FedAvg):
    """The shared model theta follows FedAvg, v_i <- SGD_i(v_i) stays with its client; client i uses the better one.

    Better is what has the smaller loss on its validation data, v_i with the loss made larger by the factor 1 + doubt.
    """

    doubt: float = 0.0

    def join(self, cohort: Cohort, payload: Model) -> Record:
        return Model(payload.row)  # [C, D]: a client that arrives starts from the shared model

    def local(self, cohort: Cohort, payload: Model, mine: Model) -> tuple[Upload, Record]:
        update = cohort.train(payload.row) - payload.row
        return Upload(update=update), Model(cohort.train(mine.row))

    def deploy(self, cohort: Cohort, payload: Model, mine: Model) -> Tensor:
        both = torch.stack([payload.row, mine.row], 1)  # [C, 2, D]
        loss = cohort.loss(both, split="val")  # [C, 2]
        return pick(both, (loss * loss.new_tensor([1, 1 + self.doubt])).argmin(-1))


def main(folder: Path) -> None:
    mine = f"{__file__}:Better"
    findings = check.examine(mine)
    print(*check.lines(findings), sep="\n")
    assert not any(finding.wrong for finding in findings)

    x, y = digits()
    dealt = partition("dirichlet", y.numpy(), 10, seed=0, alpha=0.3)
    federation = coterie.Federation.from_assignment(x, y, dealt)
    results = coterie.compare(
        [mine, f"{mine}:doubt=0.5"], model("mlp", (1, 8, 8), 10, hidden=16), federation, folder=folder,
        rounds=10, lr=0.1,
    )
    for result in results:
        accuracy = result.at("served").test["accuracy"]
        name = result.method.replace(mine, "Better")
        print(f"{name:<18} mean {accuracy.mean():.2f}, worst client {accuracy.min():.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "own-method"))
