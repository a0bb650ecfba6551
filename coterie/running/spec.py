"""One run as plain values: what a method and a module are built from, wherever it is written down.

The command line, TOML files, config.json of a run folder, jobs of Flower and the headers of model files all hold these
values, and all build from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from coterie import files, models, registry
from coterie.contract.cohort import Init
from coterie.contract.method import Method
from coterie.contract.net import PerSample
from coterie.contract.patterns import partly
from coterie.data import Federation
from coterie.errors import CoterieError, unknown
from coterie.models.lora import adapted
from coterie.options import build, parse_options, require_short
from coterie.running.training import Training
from coterie.trust import code

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Layers that take tokens."""
DTYPES = ("float32", "float64", "int64")
"""Types of the samples' numbers that a federation holds."""
PARTS = ("adapter", "freeze", "train")
"""What is said of which parts of the model train."""
TEXTS = ("method", "model", "head", "dtype", "loss", *PARTS)
OPTIONAL = ("dtype", "class_names", "encoding", "loss", "unit", *PARTS)
"""Values that are left out where nothing is known: older versions did not write them, and do not read them."""


@dataclass(frozen=True)
class RunSpec:
    """A method, a model, what samples look like, and how to train."""

    method: str
    """The method's spelling, e.g. fedfew:models=3."""
    model: str
    """The model's spelling, e.g. mlp:hidden=64; empty where a run was started in Python and nobody named it."""
    shape: tuple[int, ...]
    """Shape of one sample."""
    classes: int
    """Number of classes, 0 for regression."""
    outputs: int
    """Numbers the model gives for a sample: the classes, or the targets."""
    training: Training = field(default_factory=Training)
    head: str | None = None
    dtype: str = ""
    """Type of the samples' numbers, e.g. float32, or int64 for tokens; empty where an older version wrote it down."""
    class_names: tuple[str, ...] = ()
    """Where labels were names, or numbers other than 0, 1, 2, ..."""
    encoding: Mapping[str, Any] | None = None
    """How a table became numbers."""
    loss: str = ""
    """A user's own loss of each sample, `file.py:function`; empty for the task's usual one."""
    freeze: str = ""
    """Parts of the model that are frozen, e.g. base or layer1*+layer2*."""
    train: str = ""
    """Parts of the model beside which all else is frozen, e.g. head."""
    unit: Mapping[str, float] | None = None
    """Mean and deviation of the targets, where the model trains on standardised ones."""
    adapter: str = ""
    """The low-rank adapters of the model, e.g. lora:rank=8; empty for none."""

    def __post_init__(self) -> None:
        for name in TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "head" and value is None):
                raise CoterieError(f"the experiment's {name} must be text, not a {type(value).__name__}.")
        require_short({name: getattr(self, name) for name in TEXTS}, "the experiment")
        if self.dtype not in ("", *DTYPES):
            raise unknown("type of samples", str(self.dtype), DTYPES)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "the run's settings") -> Self:
        """From plain values, as they arrive or stand in a file."""
        return cls(**cls.arguments(values, where))

    @classmethod
    def arguments(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The arguments that plain values stand for; files that they name are not run."""
        try:
            given = dict(values)
            with code.nothing():
                given["training"] = build(Training, given.pop("training", {}), "training")
            given["shape"] = tuple(int(n) for n in given.pop("shape"))
            given["class_names"] = tuple(given.pop("class_names", ()))
            signature(cls).bind(**given)
        except (KeyError, TypeError, ValueError) as reason:
            if isinstance(reason, CoterieError):
                raise
            raise CoterieError(f"{where} cannot be read ({reason}).") from reason
        return given

    @classmethod
    def of_config(cls, config: Mapping[str, Any], model: str = "", loss: str = "") -> Self:
        """From config.json of a run folder, which does not know where model and loss come from; runs no file."""
        samples, recipe = config["samples"], config["federation"]
        with code.nothing():
            training = build(Training, config["training"], "training")
        return cls(
            str(config["method"]), model, tuple(int(n) for n in samples["shape"]), int(samples["classes"]),
            int(samples["outputs"]), training, config["head"],
            samples.get("dtype", ""), tuple(recipe.get("classes", ())), recipe.get("encoding"), loss,
            str(config.get("freeze", "")), str(config.get("train", "")), samples.get("unit"),
            str(config.get("adapter", "")),
        )

    def config(self) -> dict[str, Any]:
        """What `of_config` reads back; names of classes and encoding stand in the federation's recipe."""
        samples: dict[str, Any] = {
            "shape": list(self.shape), "classes": self.classes, "outputs": self.outputs, "dtype": self.dtype,
        }
        samples |= {} if self.unit is None else {"unit": dict(self.unit)}
        chosen = {name: text for name in PARTS if (text := getattr(self, name))}
        training = asdict(self.training)
        return {"method": self.method, "training": training, "head": self.head, "samples": samples, **chosen}

    @classmethod
    def for_data(cls, federation: Federation, **values: Any) -> Self:
        """For samples that look like this federation's."""
        return cls(**cls.form_of(federation), **values)

    @staticmethod
    def form_of(federation: Federation) -> dict[str, Any]:
        """What a federation's samples look like."""
        return {
            "shape": tuple(federation.x.shape[1:]), "classes": federation.classes, "outputs": federation.outputs,
            "dtype": str(federation.x.dtype).removeprefix("torch."),
            "unit": None if federation.unit is None else federation.unit.facts(),
            "class_names": tuple(federation.recipe.get("classes", ())),
        }

    def values(self) -> dict[str, Any]:
        """What `of` reads back."""
        whole = {**asdict(self), "shape": list(self.shape), "class_names": list(self.class_names)}
        return {name: value for name, value in whole.items() if value or name not in OPTIONAL}

    def taken_from(self, kept: code.Copies, trust: bool = False) -> Self:
        """With a run's copies in place of the files of its method, optimizers and metrics; raises where one is not
        trusted, unless it is `trust`ed now. Metrics are not needed here, and ask where they are."""
        if trust:
            kept.trust()
        kept.take()
        made = replace(self._spelled(kept.spelled), model=self.model, loss=self.loss)
        named = [made.method, made.training.optimizer, made.training.server]
        code.mark(made.training.metrics)
        code.require(named, str(kept.folder / "config.json"), trust)
        return made

    def as_it_was(self) -> Self:
        """With the paths that its files had, where it goes on with a run's copies of them."""
        return self._spelled(code.original)

    def _spelled(self, of: Callable[[str], str]) -> Self:
        """With every text that may name a code file as `of` spells it; runs none."""
        own: dict[str, Any] = {name: of(getattr(self.training, name)) for name in (*registry.OPTIMIZERS, "metric")}
        with code.nothing():
            training = replace(self.training, **own, watch=tuple(map(of, self.training.watch)))
        return replace(self, method=of(self.method), model=of(self.model), loss=of(self.loss), training=training)

    # -- what is built from it -------------------------------------------------------------------------------------

    def chosen(self) -> Method:
        return registry.method(self.method)

    def factory(self) -> Callable[[], nn.Module]:
        """Each call gives the module with fresh weights, of which trains what should."""
        name, given = parse_options(self.model)
        made = models.model(name, self.shape, self.outputs, **self._told(name), **given)
        whole = adapted(made, self.adapter, self.head)
        return cast("Callable[[], nn.Module]", partly(whole, self.freeze, self.train, self.head))

    def _told(self, name: str) -> dict[str, Any]:
        """What a pretrained model of texts is told of how these became numbers."""
        encoding = self.encoding or {}
        if name == "minilm" and encoding.get("shift"):
            raise CoterieError("minilm knows words by other numbers than this tokenizer, whose number 0 is no padding; "
                               "take minilm's own, tokenizer=minilm.")
        if files.in_folder(name) is None or "tokenizer" not in encoding:
            return {}
        return {"shift": int(encoding.get("shift", 0)), "speaks": encoding.get("task") == "next"}

    def own_loss(self) -> PerSample | None:
        """The user's loss from its file; None for the task's usual one."""
        if not self.loss:
            return None
        spelled = files.in_file(self.loss)
        if spelled is None or spelled[2]:
            raise CoterieError(f"a loss of your own is a function in a file, spelled file.py:name, not '{self.loss}'.")
        path, name, _ = spelled
        held = vars(code.module(Path(path), f"the loss {name}"))
        found = held.get(name)
        if found is None:
            ours = [n for n, v in held.items() if callable(v) and getattr(v, "__module__", "") == held["__name__"]]
            raise unknown(f"loss in {path}", name, ours)
        if not callable(found) or isinstance(found, type):
            raise CoterieError(
                f"{name} in {path} is a {type(found).__name__}; a function of outputs and labels is needed."
            )
        return found  # type: ignore[no-any-return]

    def init(
        self, method: Method, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
        population: int = 1,
    ) -> Init:
        """Layout, module and fresh rows of the run's seed, as the method wraps the model."""
        seed = self.training.seed
        return Init(self.factory(), method.wrap, seed, self.head, dtype, device, population, self.classes)

    def numbers(self, method: Method) -> int:
        """How many numbers the model has, with what the method adds to it; no memory is taken for them."""
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            module = method.wrap(self.factory()())
        return sum(t.numel() for t in (*module.parameters(), *module.buffers()))

    # -- samples of this form, without meaning ---------------------------------------------------------------------

    def takes_tokens(self, module: nn.Module | None = None) -> bool:
        """Whether samples are whole numbers; where nobody wrote that down, whether the model looks anything up."""
        if self.dtype:
            return not getattr(torch, self.dtype).is_floating_point
        return any(isinstance(part, LOOKUPS) for part in self._module(module).modules())

    def blank_samples(self, count: int, value: int) -> Tensor:
        """`[count, *shape]`, every number the same."""
        return torch.full((count, *self.shape), value, dtype=torch.int64 if self.takes_tokens() else torch.float32)

    def random_samples(self, count: int, dtype: torch.dtype, module: nn.Module | None = None) -> Tensor:
        """`[count, *shape]`: normal numbers of this type, or tokens that the model knows; always the same ones."""
        generator = torch.Generator().manual_seed(0)
        if self.takes_tokens(module):
            known = next((m.num_embeddings for m in self._module(module).modules() if isinstance(m, LOOKUPS)), 2)
            return torch.randint(0, known, (count, *self.shape), generator=generator)
        return torch.randn((count, *self.shape), generator=generator, dtype=torch.float64).to(dtype)

    def _module(self, module: nn.Module | None) -> nn.Module:
        """The module that was given, or one of the model's, without touching anybody's random numbers."""
        if module is not None:
            return module
        with torch.random.fork_rng(devices=[]):
            return self.factory()()
