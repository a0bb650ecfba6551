"""How a federation is trained: every option of a run, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from coterie import registry
from coterie.data.augment import NONE, Augment
from coterie.errors import CoterieError
from coterie.running.schedules import Schedule, factor


@dataclass(frozen=True)
class Training:
    """How a federation is trained. Everything here is written into the run folder."""

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {
        "learningrate": "lr", "eta": "lr", "stepsize": "lr", "batchsize": "batch", "bs": "batch",
        "localepochs": "epochs", "localsteps": "steps", "fraction": "participation", "clientfraction": "participation",
        "scheduler": "schedule", "earlystopping": "patience", "dtype": "precision", "randomseed": "seed",
        "communicationrounds": "rounds", "warmuprounds": "warmup", "classweight": "class_weights",
        "smoothing": "label_smoothing", "labelsmooth": "label_smoothing", "augmentation": "augment",
        "transform": "augment",
    }
    """What others call an option, without `_` and `-`."""
    FORMER: ClassVar[Mapping[str, str]] = {"join": "together"}
    """What older versions called an option; their run folders and files are still read."""
    FED: ClassVar[tuple[str, ...]] = ("class_weights", "label_smoothing", "augment")
    """Options that belong to an engine: runs that differ in them cannot share one."""
    LISTED: ClassVar[str] = (
        "`coterie options` lists the training options with their meaning, `coterie methods NAME` a method's."
    )

    rounds: int = 50
    """Communication rounds."""
    epochs: int = 1
    """Local epochs a round."""
    steps: int | None = None
    """Local steps a round, instead of epochs."""
    batch: int = 10
    """Batch size; 0 takes all samples of a client at once."""
    lr: float = 0.05
    """Learning rate of local training."""
    optimizer: str = "sgd"
    """Clients' steps: sgd, sgd(momentum=0.9,nesterov=true,weight_decay=1e-4), adam, adamw, yogi, adagrad, or a class in
    a file. What an optimizer remembers is fresh each round, or kept by the client with keep=true."""
    clip: float | None = None
    """Largest norm of the gradient of a local step; none does not clip."""
    schedule: Schedule = "constant"
    """How the learning rate changes over rounds: not, times `decay` each round, or as half a cosine to 0."""
    decay: float = 0.99
    """Factor a round for schedule=decay."""
    warmup: int = 0
    """Rounds in which the learning rate first rises, in equal steps to `lr`; the schedule begins after them."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: in training, a client's samples of a class count n / (classes it holds * samples of the class) times,
    so that its classes weigh alike. Its counts stay with it; scores are never weighted."""
    label_smoothing: float = 0.0
    """Share of a label that training spreads over all classes, from 0 to below 1; scores take labels as they are."""
    augment: str = "none"
    """Images as training sees them: flip (left and right swapped, every second one), crop(pad=4) (moved by up to `pad`
    pixels, zeros at the border), or flip+crop(pad=4); drawn anew for every batch, never when scoring."""
    participation: float = 1.0
    """Fraction of the clients selected each round."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """How they are selected: always the same number, or each with probability `participation` on its own."""
    dropouts: float = 0.0
    """Probability that a selected client does not answer: neither its upload nor its own state changes."""
    stragglers: float = 0.0
    """Probability that a selected client manages only a part of its local steps (uniform between 10 and 100 %)."""
    evaluate_every: int = 10
    """Rounds between evaluations; the first and the last state are always evaluated."""
    patience: int = 0
    """Stop after so many evaluations without a better validation score; 0 trains all rounds."""
    buffers: Literal["average", "local", "server"] = "average"
    """Running statistics of normalisation layers: averaged, kept by each client, or fixed as the server started."""
    seed: int = 0
    """Same seed, same result: every random draw follows from it."""
    device: str = "auto"
    """cpu, cuda, or auto for cuda where there is one."""
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    """Arithmetic of local training; rows are kept in float32 (float64 with float64)."""
    wave: int = 0
    """Most clients computed at once; 0 takes as many as free memory allows, up to 256."""
    state: Literal["auto", "device", "host", "disk"] = "auto"
    """Where the clients' own states are kept: with the computation, in host memory, or in files of the temporary folder
    (TMPDIR). auto takes the device when everybody takes part each round and a quarter of its free memory holds them,
    otherwise the host, and the disk when half of the free host memory does not."""
    engine: Literal["auto", "direct", "stack", "loop", "reference"] = "auto"
    """stack trains clients together, loop one after another; direct is a stack whose plain training is differentiated
    by hand, for chains of layers. auto takes direct where it can, and the faster of the other two elsewhere. reference
    is the plain way, slow and easy to read: a DataLoader and torch.optim.SGD for one client after another."""
    kernels: bool = True
    """Convolutions of a stack by coterie's own GPU kernels (tf32 and bf16); false leaves them to PyTorch."""
    capture: bool = True
    """Steps on a GPU as CUDA graphs, captured once and replayed; false launches every operation from Python."""
    together: Literal["auto", "on", "off"] = "auto"
    """Runs of a comparison that differ in seed, aggregator or numbers of the method: one stack (on) or one run after
    another (off); auto joins them where the model is small enough for it to pay."""
    checkpoint_every: int = 10
    """Rounds between checkpoints."""

    def __post_init__(self) -> None:
        for name, lowest in (("rounds", 0), ("epochs", 0), ("batch", 0), ("evaluate_every", 1), ("patience", 0),
                             ("wave", 0), ("warmup", 0), ("checkpoint_every", 1), ("seed", 0)):
            if getattr(self, name) < lowest:
                raise CoterieError(f"{name} must be at least {lowest}, not {getattr(self, name)}.")
        if self.steps is not None and self.steps < 1:
            raise CoterieError(f"steps must be at least 1, not {self.steps}.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise CoterieError(f"lr must be a positive number, not {self.lr}.")
        object.__setattr__(self, "optimizer", registry.called(registry.optimizer(self.optimizer)))
        if self.clip is not None and not (self.clip > 0 and math.isfinite(self.clip)):
            raise CoterieError(f"clip must be a positive number or none, not {self.clip}.")
        if not 0 < self.participation <= 1:
            raise CoterieError(f"participation must be above 0 and at most 1, not {self.participation}.")
        if self.warmup > self.rounds:
            raise CoterieError(f"warmup must be at most the number of rounds, {self.rounds}, not {self.warmup}.")
        if self.augment != NONE:
            Augment.of(self.augment)
        for name in ("dropouts", "stragglers", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise CoterieError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}.")

    @property
    def plain(self) -> bool:
        """Whether a client's step is `row - lr * gradient`."""
        return self.clip is None and registry.optimizer(self.optimizer).plain

    def require(self, classes: int, shape: Sequence[int], own_loss: bool = False) -> None:
        """Raise where an option does not fit the samples, of so many classes and this shape, or a user's own loss."""
        if not classes:
            for name, off in (("class_weights", "none"), ("label_smoothing", 0.0)):
                if (asked := getattr(self, name)) != off:
                    raise CoterieError(f"{name}={asked} is for classes, and this is a regression; use {name}={off}.")
        if own_loss and self.label_smoothing:
            raise CoterieError(
                f"label_smoothing={self.label_smoothing} is for the cross entropy, and the loss is your own; smooth "
                "inside it, or leave one of them out."
            )
        if self.augment != NONE:
            Augment.of(self.augment).require(shape)

    def lr_at(self, round: int) -> float:
        """The learning rate of a round."""
        return self.lr * factor(self.schedule, round, self.rounds, self.decay, self.warmup)
