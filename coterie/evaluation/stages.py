"""The stages a model is scored in: names with fixed meanings, in the order of every table.

`served` is what `deploy` gives before any training in the round; `adapted` is the same row after the run's local
epochs on the round's own training stream; `unseen_served` and `unseen_adapted` are both on clients kept out of
training. The test split is only looked at, the validation split chooses.
"""

from __future__ import annotations

SERVED, ADAPTED = "served", "adapted"
SEEN = (SERVED, ADAPTED)
"""On clients that train."""
PREFIX = "unseen_"
STAGES = (*SEEN, *(PREFIX + stage for stage in SEEN))

ABOUT = {SERVED: "the model a client gets", ADAPTED: "the same after local training"}
"""What a stage is, for people."""


def unseen(stage: str) -> str:
    """The same stage on clients kept out of training."""
    return PREFIX + stage


def basis(stage: str) -> str:
    """The same stage on clients that train: its round is reported, as unseen clients choose nothing."""
    return stage.removeprefix(PREFIX)


def title(stage: str) -> str:
    """As it stands above a picture."""
    return stage if stage in SEEN else f"unseen clients, {basis(stage)}"
