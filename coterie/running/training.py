"""How a federation is trained: every option of a run, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from coterie.errors import CoterieError
from coterie.running.schedules import FACTORS, Schedule


@dataclass(frozen=True)
class Training:
    """How a federation is trained. Everything here is written into the run folder."""

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {
        "learningrate": "lr", "eta": "lr", "stepsize": "lr", "batchsize": "batch", "bs": "batch",
        "localepochs": "epochs", "localsteps": "steps", "fraction": "participation", "clientfraction": "participation",
        "scheduler": "schedule", "earlystopping": "patience", "dtype": "precision", "randomseed": "seed",
        "communicationrounds": "rounds",
    }
    """What others call an option, without `_` and `-`."""
    FORMER: ClassVar[Mapping[str, str]] = {"join": "together"}
    """What older versions called an option; their run folders and files are still read."""
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
    """Learning rate of the local SGD."""
    schedule: Schedule = "constant"
    """How the learning rate changes over rounds: not, times `decay` each round, or as half a cosine to 0."""
    decay: float = 0.99
    """Factor a round for schedule=decay."""
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
    prefix: Literal["auto", "off"] = "auto"
    """The outputs of frozen layers that come before all that trains: auto computes them once for every sample, where
    that is exact and half of the free memory holds them; off computes them in every step."""
    together: Literal["auto", "on", "off"] = "auto"
    """Runs of a comparison that differ in seed, aggregator or numbers of the method: one stack (on) or one run after
    another (off); auto joins them where the model is small enough for it to pay."""
    checkpoint_every: int = 10
    """Rounds between checkpoints."""

    def __post_init__(self) -> None:
        for name, lowest in (("rounds", 0), ("epochs", 0), ("batch", 0), ("evaluate_every", 1), ("patience", 0),
                             ("wave", 0), ("checkpoint_every", 1), ("seed", 0)):
            if getattr(self, name) < lowest:
                raise CoterieError(f"{name} must be at least {lowest}, not {getattr(self, name)}.")
        if self.steps is not None and self.steps < 1:
            raise CoterieError(f"steps must be at least 1, not {self.steps}.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise CoterieError(f"lr must be a positive number, not {self.lr}.")
        if not 0 < self.participation <= 1:
            raise CoterieError(f"participation must be above 0 and at most 1, not {self.participation}.")
        for name in ("dropouts", "stragglers"):
            if not 0 <= getattr(self, name) < 1:
                raise CoterieError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}.")

    def lr_at(self, round: int) -> float:
        """The learning rate of a round."""
        return self.lr * FACTORS[self.schedule](round, self.rounds, self.decay)
