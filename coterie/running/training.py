"""How a federation is trained: every option of a run, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from coterie import registry
from coterie.contract.local import LocalOptions
from coterie.contract.schedules import factor
from coterie.data.augment import NONE, Augment
from coterie.errors import CoterieError
from coterie.options import BelowOne, Count, CountOrZero, Range, require_short
from coterie.trust import code


@dataclass(frozen=True)
class Training(LocalOptions):
    """How a federation is trained. Everything here is written into the run folder."""

    OTHER_WORDS: ClassVar[Mapping[str, str]] = {
        **LocalOptions.OTHER_WORDS,
        **dict.fromkeys(("fraction", "clientfraction", "frac", "joinratio", "samplingrate", "c"), "participation"),
        **dict.fromkeys(("earlystopping", "earlystop"), "patience"), "dtype": "precision",
        **dict.fromkeys(("randomseed", "randomstate", "rngseed"), "seed"),
        **dict.fromkeys(("communicationrounds", "numrounds", "nrounds", "globalrounds", "commrounds", "t"), "rounds"),
        **dict.fromkeys(("evalevery", "evaluationfrequency", "evalgap", "testevery"), "evaluate_every"),
        **dict.fromkeys(("gpu", "cuda"), "device"), **dict.fromkeys(("metrics", "scoring"), "metric"),
        **dict.fromkeys(("saveevery", "checkpoint"), "checkpoint_every"),
        **dict.fromkeys(("stragglerrate", "straggler"), "stragglers"), "dropoutrate": "dropouts",
    }
    """What others call an option, without `_` and `-`; or what to write, where it is no training option."""
    FORMER: ClassVar[Mapping[str, str]] = {"join": "together"}
    """What older versions called an option; their run folders and files are still read."""
    FED: ClassVar[tuple[str, ...]] = ("class_weights", "label_smoothing", "augment")
    """Options that belong to an engine: runs that differ in them cannot share one."""
    LISTED: ClassVar[str] = (
        "`coterie options` lists the training options with their meaning, `coterie methods NAME` a method's."
    )

    rounds: CountOrZero = 50
    """Communication rounds."""
    participation: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Fraction of the clients selected each round."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """How they are selected: always the same number, or each with probability `participation` on its own."""
    dropouts: BelowOne = 0.0
    """Probability that a selected client does not answer: neither its upload nor its own state changes."""
    stragglers: BelowOne = 0.0
    """Probability that a selected client manages only a part of its local steps (uniform between 10 and 100 %)."""
    counts: bool = False
    """With a robust aggregator, whether clients count by their samples, none for more than 3 times the median; false
    counts them alike (and in means over samples none for more than the median), for a client may say any number. Other
    aggregators always go by samples."""
    evaluate_every: Count = 10
    """Rounds between evaluations; the first and the last state are always evaluated."""
    patience: CountOrZero = 0
    """Stop after so many evaluations without a better validation score; 0 trains all rounds."""
    buffers: Literal["average", "local", "server"] = "average"
    """Running statistics of normalisation layers: averaged, kept by each client (who has none yet, as an unseen client,
    estimates them on its training samples), or fixed as the server started."""
    seed: CountOrZero = 0
    """Same seed, same result: every random draw follows from it."""
    device: str = "auto"
    """cpu, cuda, or auto for cuda where there is one."""
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    """Arithmetic of local training; rows are kept in float32 (float64 with float64)."""
    wave: CountOrZero = 0
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
    checkpoint_every: Count = 10
    """Rounds between checkpoints."""
    metric: str = "auto"
    """What decides the reported round, the early stop and the verdict: auroc, top_k(k=3), ... or mine.py:Mine. auto is
    the accuracy where there are classes, else the loss."""
    watch: tuple[str, ...] = ()
    """Further metrics that are computed and stored for every client."""

    def __post_init__(self) -> None:
        require_short(vars(self), "the training")
        super().__post_init__()
        for name, server in registry.OPTIMIZERS.items():
            object.__setattr__(self, name, registry.shortest(getattr(self, name), server))
        object.__setattr__(self, "metric", code.absolute(self.metric))
        object.__setattr__(self, "watch", tuple(map(code.absolute, self.watch)))
        if self.warmup > self.rounds:
            raise CoterieError(f"warmup must be at most the number of rounds, {self.rounds}, not {self.warmup}.")
        if self.augment != NONE:
            Augment.of(self.augment)

    @property
    def plain(self) -> bool:
        """Whether a client's step is `row - lr * gradient`."""
        return self.clip is None and registry.optimizer(self.optimizer).plain

    @property
    def metrics(self) -> tuple[str, ...]:
        """The spellings of all that are computed, the one that decides first."""
        return (self.metric, *self.watch)

    def require(
        self, classes: int, shape: Sequence[int], own_loss: bool = False, per_token: bool = False
    ) -> None:
        """Raise where an option does not fit the samples, of so many classes (`per_token`: each token has one) and this
        shape, or a user's own loss."""
        if per_token and self.class_weights != "none":
            raise CoterieError(
                f"class_weights={self.class_weights} weighs samples by their class, and here each token has one; use "
                "class_weights=none."
            )
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
