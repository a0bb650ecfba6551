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
        **dict.fromkeys(("learningrate", "eta", "stepsize", "locallr", "clientlr", "locallearningrate"), "lr"),
        **dict.fromkeys(("batchsize", "bs", "localbs", "localbatchsize", "lbs", "b"), "batch"),
        **dict.fromkeys(("localepochs", "localep", "epoch", "numepochs", "nepochs", "e"), "epochs"),
        **dict.fromkeys(("localsteps", "localupdates", "numsteps", "localiterations"), "steps"),
        **dict.fromkeys(("scheduler", "lrscheduler", "lrschedule"), "schedule"),
        **dict.fromkeys(("gradclip", "clipnorm", "maxgradnorm", "gradientclipping", "clipgradnorm"), "clip"),
        **dict.fromkeys(("smoothing", "labelsmooth"), "label_smoothing"),
        **dict.fromkeys(("augmentation", "transform", "transforms"), "augment"),
        "serveroptimizer": "server", "warmuprounds": "warmup", "classweight": "class_weights", "optim": "optimizer",
        **dict.fromkeys(("weightdecay", "wd", "l2", "decayweight"), "write optimizer=sgd(weight_decay={})"),
        "momentum": "write optimizer=sgd(momentum={})",
        "nesterov": "write optimizer=sgd(momentum=0.9,nesterov={})",
        **dict.fromkeys(("beta1", "beta2", "betas", "eps"), "it belongs to an optimizer: write optimizer=adam(...)"),
        **dict.fromkeys(("lrdecay", "learningratedecay", "lrgamma"), "write schedule=decay and decay={}"),
        **dict.fromkeys(("serverlr", "globallr", "etag", "serverlearningrate"), "write server=sgd(lr={})"),
        "servermomentum": "write server=sgd(momentum={})",
        "dropout": "it belongs to the model: --model mlp:dropout={}",
        **dict.fromkeys(("hidden", "hiddensize", "width", "layers"), "it belongs to the model: --model mlp:hidden={}"),
        **dict.fromkeys(("k", "topk"), "for the accuracy of the first k classes use --metric 'top_k(k={})'"),
        **dict.fromkeys(("loss", "criterion", "lossfunction"), "a loss of your own is --loss file.py:function"),
        **dict.fromkeys(("numclients", "nclients", "clients", "totalclients"), "write --clients {}"),
        **dict.fromkeys(("dataset", "data", "path"), "write --data {}"),
        **dict.fromkeys(("net", "network", "architecture", "arch"), "write --model {}"),
        **dict.fromkeys(("partition", "noniid", "iid"), "write --partition, such as dirichlet:alpha=0.1"),
        **dict.fromkeys(("dirichletalpha", "diralpha"), "write --partition dirichlet:alpha={}"),
        **dict.fromkeys(("scale", "normalize", "normalise", "standardize"), "it belongs to the data: FILE:scale=true"),
        **dict.fromkeys(("numseeds", "nseeds", "repeats", "runs", "times"), "write --seeds {}"),
        **dict.fromkeys(("output", "out", "savedir", "logdir", "outdir"), "write --out {}"),
        **dict.fromkeys(("dpepsilon", "epsilon", "dpnoise"),
                        "privacy belongs to the aggregator: METHOD+private (see `coterie methods private`)"),
    }
    """What others call an option, without `_` and `-`; or what to write, where it is no option of this kind."""
    OF_THE_RUN: ClassVar[tuple[str, ...]] = (
        "rounds", "participation", "sampling", "dropouts", "stragglers", "counts", "evaluate_every", "patience",
        "buffers", "seed", "device", "precision", "wave", "state", "engine", "kernels", "capture", "prefix", "together",
        "checkpoint_every", "metric", "watch",
    )
    """The other training options, which all methods of a run share."""

    @classmethod
    def of_the_run(cls) -> dict[str, str]:
        """For `unknown`: what to write where one of those stands among a method's options."""
        flags = {"rounds": "--rounds {}", "metric": "--metric '{}'", "watch": "--watch '{}'"}
        return {name.replace("_", ""): f"all methods of a run share it: write {flags.get(name, f'--set {name}={{}}')}"
                for name in cls.OF_THE_RUN}

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
    """How the learning rate changes over rounds: not, times `decay` each round, or as half a cosine to 0. A rate that a
    method has as an option of its own, such as ditto's personal_lr, stays as it is given."""
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
