"""The training options of the local kind: those that one method of a comparison may have of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from coterie.contract.schedules import Schedule
from coterie.options import BelowOne, Count, CountOrZero, Positive, Range, require_ranges


@dataclass(frozen=True)
class LocalOptions:
    """How a client trains in a round, and how the server takes what comes back.

    A run has them for all its methods; `fedper:lr=0.1` says what is otherwise for this one. Whatever is a field here
    may stand among a method's options, so no method calls an option of its own by one of these names.
    """

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {
        "learningrate": "lr", "eta": "lr", "stepsize": "lr", "batchsize": "batch", "bs": "batch",
        "localepochs": "epochs", "localsteps": "steps", "scheduler": "schedule", "serveroptimizer": "server",
        "warmuprounds": "warmup", "classweight": "class_weights", "smoothing": "label_smoothing",
        "labelsmooth": "label_smoothing", "augmentation": "augment", "transform": "augment",
    }
    """What others call an option, without `_` and `-`."""

    epochs: CountOrZero = 1
    """Local epochs a round."""
    steps: Count | None = None
    """Local steps a round, instead of epochs."""
    batch: CountOrZero = 10
    """Batch size; 0 takes all samples of a client at once."""
    lr: Positive = 0.05
    """Learning rate of local training."""
    optimizer: str = "sgd"
    """Clients' steps: sgd, sgd(momentum=0.9,nesterov=true,weight_decay=1e-4), adam, adamw, yogi, adagrad, or a class in
    a file. What an optimizer remembers is fresh each round, or kept by the client with keep=true."""
    clip: Positive | None = None
    """Largest norm of the gradient of a local step; none does not clip."""
    schedule: Schedule = "constant"
    """How the learning rate changes over rounds: not, times `decay` each round, or as half a cosine to 0."""
    decay: Annotated[float, Range(above=0, at_most=1)] = 0.99
    """Factor a round for schedule=decay."""
    warmup: CountOrZero = 0
    """Rounds in which the learning rate first rises, in equal steps to `lr`; the schedule begins after them."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: in training, a client's samples of a class count n / (classes it holds * samples of the class) times,
    so that its classes weigh alike. Its counts stay with it; scores are never weighted."""
    label_smoothing: BelowOne = 0.0
    """Share of a label that training spreads over all classes; scores take labels as they are."""
    augment: str = "none"
    """Images as training sees them: flip (left and right swapped, every second one), crop(pad=4) (moved by up to `pad`
    pixels, zeros at the border), or flip+crop(pad=4); drawn anew for every batch, never when scoring."""
    server: str = "sgd"
    """How the server steps along the averaged update: sgd takes it as it is, others as in adam(lr=0.01)."""

    def __post_init__(self) -> None:
        require_ranges(self)
