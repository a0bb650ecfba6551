"""A module as a function of its row: what objectives and inner steps call, written for one client."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from coterie import memory, streams
from coterie.contract import stored
from coterie.contract.frozen import duplicate, frozen_layers, frozen_tensors, same_values
from coterie.contract.ground import Ground
from coterie.contract.layout import Entry, Layout
from coterie.contract.tokens import mean_over_tokens, per_token
from coterie.contract.units import Unit
from coterie.errors import CoterieError

Row = Tensor | Mapping[str, Tensor]
"""A model's tensors for one client: the flat `[D]`, or its named views where the engine differentiates them."""


class Given:
    """What a per-sample function was handed: `given.anchor` is one client's slice of the tensor of that name."""

    def __init__(self, **tensors: Tensor) -> None:
        self.__dict__.update(tensors)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"nothing named '{name}' was given, only {sorted(self.__dict__)}")

PerSample = Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    """One mini-batch of one client. `weight [B]` is 1 for a sample and 0 for padding; `key` seeds its noise.

    Where y are classes of tokens, `[B, L]`, a text's weight is the number of its counted tokens (`contract.tokens`).
    `worth [B]` is how many times each sample counts in a mean, with class weights; None where each counts once.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    key: Tensor
    worth: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """(1 / B) sum_b worth_b values_b over the B samples that are not padding, `[B] -> []`; with classes of tokens
        sum_b weight_b values_b / sum_b weight_b, which is the mean over tokens of a text's means over its own.

        It is not divided by the sum of the worths in the batch: so the mean over batches stays that over all samples.
        """
        counted = self.weight if self.worth is None else self.weight * self.worth
        return (values * counted).sum() / self.weight.sum().clamp(min=1)


Objective = Callable[["Net", Row, Batch, Given], Tensor]
Kernels = Mapping[Callable[..., Any], Callable[..., Any]]
"""A function of PyTorch -> what is called in its place, with the same arguments."""


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """`[B, classes], [B] -> [B]`; with a class a token, `[B, L, classes], [B, L] -> [B]`, the mean of a text's."""
    return _cross_entropy(outputs, y, 0.0)


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """`[B, ...] -> [B]`: the squared error, averaged over the coordinates of a target."""
    return (outputs.reshape(y.shape) - y).square().flatten(1).mean(1) if y.ndim > 1 else (outputs[:, 0] - y).square()


@dataclass(frozen=True)
class Smoothed:
    """The cross entropy with the target (1 - s) onehot(y) + s / classes, of the same shapes."""

    smoothing: float

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _cross_entropy(outputs, y, self.smoothing)


def _cross_entropy(outputs: Tensor, y: Tensor, smoothing: float) -> Tensor:
    """That of each sample; targets of tokens that are ignored have neither loss nor gradient."""
    if not per_token(y):
        return F.cross_entropy(outputs, y, reduction="none", label_smoothing=smoothing)
    losses = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none", label_smoothing=smoothing)
    return mean_over_tokens(losses.view(y.shape), y)


@dataclass(frozen=True)
class Task:
    """What is predicted: `classes` scores (0 for regression), and the losses of each sample.

    `loss` is trained, `scored` is what evaluations and methods that compare models look at; they differ where labels
    are smoothed. `name` is what people call the latter. Where targets are standardised, `unit` is the user's: losses
    are of what models train on, and evaluations take them in that unit.
    """

    classes: int
    loss: PerSample
    scored: PerSample
    name: str
    smoothing: float = 0.0
    unit: Unit | None = None

    @classmethod
    def of(
        cls, classes: int, loss: PerSample | None = None, smoothing: float = 0.0, unit: Unit | None = None
    ) -> Task:
        """The task of so many classes with its usual loss, or a user's own; `smoothing` is for the cross entropy."""
        scored = loss or (cross_entropy if classes else squared_error)
        return cls(classes, Smoothed(smoothing) if smoothing else scored, scored, loss_name(scored), smoothing, unit)

    def told(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample as people read it: in the user's unit, from outputs and targets of training."""
        if self.unit is None:
            return self.scored(outputs, y)
        return self.scored(self.unit.back(outputs.double()), self.unit.back(y.double()))


NAMELESS = "own loss"
"""What a loss is called that has no name of its own."""


def loss_name(loss: PerSample) -> str:
    """What people call a loss: `cross entropy`, `squared error`, or the name of a user's function."""
    if loss in (cross_entropy, squared_error):
        return loss.__name__.replace("_", " ")
    name = str(getattr(loss, "__name__", type(loss).__name__))
    return NAMELESS if name == "<lambda>" else name


class Net:
    """The user's module, called with a row. `net(row, x)` are its outputs; nothing is stored in the module.

    What is frozen stays in the module, once for all rows: under `vmap` it has no client axis.

    `features(row, x)` is the input of the head and `head(row, z)` the head alone. `loss(row, batch)` is the task's
    mean loss, `grad(row, batch, objective, given)` the gradient as a flat row, `uniform(shape)` noise of this batch.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, task: Task, bf16: bool = False, kernels: Kernels | None = None
    ) -> None:
        """`kernels` stand in for functions of PyTorch while the module runs stacked."""
        self.whole = duplicate(module)
        self.layout = layout
        self.ground = Ground(self.whole, layout)
        self.task = task
        self.stacked = True
        self.low_precision = bf16
        self.kernels: Kernels = kernels or {}
        self._key: Tensor | None = None
        self._draws = 0
        self._overrides = _Overrides(self)
        self._random = True  # until a probe shows that the forward pass draws nothing
        self._seeds = False  # whether the module draws from PyTorch's own generator, which only a loop can seed
        self._buffers = [entry.name for entry in layout.entries if entry.kind != "parameter"]
        self.takes(self.whole)

    def takes(self, module: nn.Module) -> None:
        """Call this module from now on: the whole one, or what of it follows a frozen prefix whose outputs are `x`."""
        self.module, layout = module, self.layout
        found = layout.head is not None and "head" in layout.parts
        self._head = self.module.get_submodule(layout.head or "") if found else None
        self._head_tensors = _names_in(self.module, self._head) if self._head is not None else {}
        frozen = frozen_layers(self.whole)
        self._normalisers = [m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        tracking = {m for m in self.module.modules() if getattr(m, "track_running_stats", False)}
        self._at_rest = [m for m in frozen if m in tracking]  # frozen normalisation is never in training mode
        moving = any(m not in frozen for m in self._normalisers) or bool(tracking - frozen)
        self.batch_statistics = moving or getattr(self.whole, "batch_statistics", False)
        if not all(m.track_running_stats for m in self._normalisers):
            raise CoterieError(
                "a BatchNorm layer without running statistics scores a sample by who else is in its batch, so results "
                "would depend on how clients are batched; set track_running_stats=True or use GroupNorm."
            )

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the module to a device, and what is frozen of it to the number format of rows, unless it is stored in
        another on purpose."""
        kept = stored.place(self.whole, dtype)
        for tensor in frozen_tensors(self.whole.to(device)).values():
            if tensor.is_floating_point() and id(tensor) not in kept:
                tensor.data = tensor.data.to(dtype)

    # -- what methods call -----------------------------------------------------------------------------------------

    def __call__(self, row: Row, x: Tensor, **options: Any) -> Tensor:
        """The module's outputs `[B, ...]`; options go to its forward. A flat row is only read, buffers included."""
        return self._forward(self.module, self._safe(row), x, options)

    def features(self, row: Row, x: Tensor) -> Tensor:
        """What enters the head `[B, features]`."""
        caught: list[Tensor] = []
        hook = self._require_head().register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            self(row, x)
        finally:
            hook.remove()
        return caught[0].to(torch.float32) if self.low_precision else caught[0]

    def head(self, row: Row, z: Tensor) -> Tensor:
        """The head's outputs for features `z [B, features]`."""
        head, tensors = self._require_head(), self._safe(row)
        mine = {inner: tensors[name] for inner, name in self._head_tensors.items() if name in tensors}
        return self._forward(head, mine, z, {})

    def tensors(self, row: Row) -> Mapping[str, Tensor]:
        """The row's named tensors; `net.tensors(row)['fc.weight']` is one of them."""
        return self.layout.views(row) if isinstance(row, Tensor) else row

    def loss(self, row: Row, batch: Batch) -> Tensor:
        """The task's mean loss over the batch, as it is trained, a scalar."""
        return batch.mean(self.task.loss(self(row, batch.x), batch.y))

    def grad(
        self, row: Tensor, batch: Batch, objective: Objective | None = None, given: Given | None = None
    ) -> Tensor:
        """The gradient of the objective (by default the loss) with respect to a flat row, `[D] -> [D]`.

        In training the row's running statistics move in place, as they do in plain training.
        """
        chosen = objective or default_objective
        trainable, fixed = self.split(self.layout.views(row), [e for e in self.layout.entries if e.trainable])
        with self.noise(batch.key):
            gradient, _ = self.grad_and_value(chosen, trainable, fixed, batch, given or Given())
        pieces = [
            gradient[e.name].reshape(-1) if e.trainable else torch.zeros_like(row[e.start : e.stop])
            for e in self.layout.entries
        ]
        return torch.cat(pieces)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Uniform noise on [0, 1) that belongs to this client, round, step and call."""
        if self._key is None:
            raise CoterieError("noise can be drawn inside an objective or a step only.")
        self._draws += 1
        return streams.uniform(streams.key(self._key, self._draws), shape)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal noise of this client, with the shape and type of a tensor (Box and Muller)."""
        one, two = self.uniform((2, *like.shape)).to(like.dtype)
        return (-2 * torch.log1p(-one)).sqrt() * torch.cos(2 * math.pi * two)

    def with_buffers(self, row: Tensor, moved: Tensor) -> Tensor:
        """`row [D]` with the running statistics of `moved [D]`, the model that saw the batch."""
        if not self._buffers:
            return row
        pieces = [(row if e.kind == "parameter" else moved)[e.start : e.stop] for e in self.layout.entries]
        return torch.cat(pieces)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Evaluation mode until the block ends, for models that are only compared with."""
        before = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, training in before:
                module.training = training

    def fits(self, module: nn.Module) -> bool:
        """Whether another module computes the same function of a row: its layout and what a row leaves out agree."""
        other = Layout.of(module)
        if (other.entries, other.frozen) != (self.layout.entries, self.layout.frozen):
            return False
        held = {entry.name for entry in self.layout.entries + self.layout.frozen}
        theirs = {name: b for name, b in module.named_buffers() if name not in held}
        mine = {name: b for name, b in self.whole.named_buffers() if name not in held}
        frozen = (dict(zip((e.name for e in one.frozen), one.values, strict=True)) for one in (self.layout, other))
        return same_values(*frozen) and same_values(mine, theirs)

    # -- what the engine calls -------------------------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Whether the module by itself answers as the net does: it draws no noise and computes in the row's format."""
        return not (self._random or self._seeds or self.low_precision)

    def grad_and_value(
        self, objective: Objective, trainable: Mapping[str, Tensor], fixed: Mapping[str, Tensor], batch: Batch,
        given: Given,
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Gradient of the objective with respect to the named tensors of one client, and its value."""
        moving = [name for name in self._buffers if name in fixed] if self.module.training else []

        def value(inner: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            # Running statistics move in copies: they share memory with the weights that the backward pass needs.
            buffers = {name: fixed[name].clone() for name in moving}
            return objective(self, {**inner, **fixed, **buffers}, batch, given), buffers

        gradient, loss, buffers = self._differentiate(value, trainable)
        for name in moving:
            fixed[name].copy_(buffers[name])
        return gradient, loss

    def _differentiate(
        self, value: Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]], trainable: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], Tensor, dict[str, Tensor]]:
        if self.stacked:
            gradient, (loss, buffers) = torch.func.grad_and_value(value, has_aux=True)(trainable)
            return gradient, loss, buffers
        nested = torch.is_grad_enabled()  # a method differentiates through this gradient
        with torch.enable_grad():
            leaves = {
                name: t if t.requires_grad else t.detach().requires_grad_(True) for name, t in trainable.items()
            }
            loss, buffers = value(leaves)
            found = torch.autograd.grad(loss, list(leaves.values()), create_graph=nested, allow_unused=True)
        pairs = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}, loss.detach(), buffers

    def split(
        self, tensors: Mapping[str, Tensor], trained: list[Entry]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Named tensors -> (those of the entries, all others)."""
        names = {entry.name for entry in trained}
        return ({n: t for n, t in tensors.items() if n in names}, {n: t for n, t in tensors.items() if n not in names})

    @contextmanager
    def noise(self, key: Tensor | None) -> Iterator[None]:
        """Draw from this key until the block ends."""
        before = self._key, self._draws
        self._key, self._draws = key, 0
        try:
            if key is None or self.stacked or not self._seeds:
                yield
            else:
                with _generators_kept(key.device):
                    torch.manual_seed(streams.integer(key))
                    yield
        finally:
            self._key, self._draws = before

    def mode(self, training: bool, single: bool = False) -> None:
        """Training or evaluation; batch statistics of a single sample do not exist, so it uses the running ones."""
        self.module.train(training)
        for module in self._at_rest:
            module.eval()
        if single:
            for module in self._normalisers:
                module.eval()

    def probe(self, row: Tensor, x: Tensor, y: Tensor, gradient_too: bool = True) -> str | None:
        """Try the module on two samples: learn whether it draws noise; return why it cannot be stacked, if so.

        Without `gradient_too` only the outputs are tried, for modules that are known to be stackable.
        """
        self.mode(training=True, single=len(x) == 1)
        weight = torch.ones(len(x), dtype=row.dtype, device=row.device)
        stream = streams.key("probe", torch.zeros((), dtype=torch.int64, device=row.device))

        def gradient(one: Tensor, xs: Tensor, ys: Tensor, k: Tensor) -> Tensor:
            return self.grad(one, Batch(xs, ys, weight, k))

        self.stacked = False
        self._overrides.used = False
        with _generators_kept(row.device):
            torch.manual_seed(0)
            seeded = generator_state(row.device)
            outputs = self._check(row.clone(), x, stream)
            self._seeds = not torch.equal(generator_state(row.device), seeded)
        wanted = (*(y.shape if per_token(y) else (len(x),)), self.task.classes)
        if self.task.classes and outputs.shape != wanted:
            raise CoterieError(
                f"the model gives outputs of shape {tuple(outputs.shape)} for {len(x)} samples; "
                f"the data have {self.task.classes} classes{' a token' if per_token(y) else ''}, so {wanted} was "
                f"expected{'; --model causal answers every token' if per_token(y) else ''}."
            )
        self._check_loss(outputs, y)
        if gradient_too:
            gradient(row.clone(), x, y, stream)
        self._random = self._overrides.used
        self.stacked = True
        if not gradient_too:
            return None
        two = (torch.stack([row, row]), torch.stack([x, x]), torch.stack([y, y]), torch.stack([stream, stream]))
        try:
            torch.func.vmap(gradient)(*two)
        except Exception as reason:
            if memory.exhausted(reason):
                raise
            self.stacked = False
            return _where(reason)
        return None

    def _check(self, row: Tensor, x: Tensor, stream: Tensor) -> Tensor:
        try:
            with self.noise(stream), torch.no_grad():
                return self(row, x)
        except (RuntimeError, TypeError, ValueError, IndexError) as reason:
            tokens = "" if x.is_floating_point() else (
                "; samples of whole numbers, such as texts, need a model that looks them up: --model fasttext")
            raise CoterieError(
                f"the model cannot take the data: one batch has shape {tuple(x.shape)} ({x.dtype}) and it says: "
                f"{str(reason).strip().splitlines()[0]}{tokens}"
            ) from reason

    def _check_loss(self, outputs: Tensor, y: Tensor) -> None:
        """A user's loss is refused where it fails or gives no number for each sample."""
        name = self.task.name
        try:
            found = self.task.scored(outputs, y)
        except Exception as reason:
            raise CoterieError(
                f"the loss {name} cannot take outputs {tuple(outputs.shape)} and labels {tuple(y.shape)} ({y.dtype}): "
                f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
            ) from reason
        if not isinstance(found, Tensor) or found.shape != (len(y),):
            said = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise CoterieError(
                f"the loss {name} gives {said} for {len(y)} samples; it must give one number for each, {(len(y),)}, "
                "without a mean over them."
            )

    def _forward(self, module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, options: dict[str, Any]) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.low_precision, cache_enabled=False):
            if (self._random and module.training) or (self.stacked and self.kernels):
                with self._overrides:
                    out = functional_call(module, dict(tensors), (x,), options)
            else:
                out = functional_call(module, dict(tensors), (x,), options)
        found = answer(out)
        return found.to(torch.float32) if self.low_precision else found

    def _safe(self, row: Row) -> Mapping[str, Tensor]:
        """The named tensors; those of a flat row with copies of the buffers, which a forward pass in training moves."""
        if not isinstance(row, Tensor):
            return row
        tensors = self.layout.views(row)
        copies = self._buffers if self.module.training else []
        return {**tensors, **{name: tensors[name].clone() for name in copies}}

    def _require_head(self) -> nn.Module:
        if self._head is None:
            self.layout.within("head")  # raises the sentence that explains how to name one
        assert self._head is not None
        return self._head


def answer(out: Any) -> Tensor:
    """The tensor in what a module's forward returned."""
    if not isinstance(out, Tensor):
        out = getattr(out, "logits", out)  # as the models of transformers answer
    if not isinstance(out, Tensor):
        raise CoterieError(f"the model returned {type(out).__name__}; its forward must return one tensor.")
    return out


def default_objective(net: Net, row: Row, batch: Batch, given: Given) -> Tensor:
    """The task's mean loss."""
    return net.loss(row, batch)


def _where(reason: Exception) -> str:
    """What `vmap` says, its first sentence, and the last line of the model's own code that led there."""
    said = str(reason).strip().splitlines()[0].split(". ")[0].removeprefix("vmap: ").rstrip(".")
    library, own = Path(torch.__file__).parent, Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(reason.__traceback__)):
        path = Path(frame.filename)
        if library in path.parents or path == Path(__file__) or own / "engine" in path.parents:
            continue
        return f"{said}, in {path.name} line {frame.lineno}: {frame.line}"
    return said


def generator_state(device: torch.device) -> Tensor:
    """The state of PyTorch's own generator on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """PyTorch's own generators end as they began."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _names_in(module: nn.Module, inner: nn.Module) -> dict[str, str]:
    """Every tensor of a submodule: its name there -> its name in the module (the first one, where it is tied)."""
    names = {id(t): name for name, t in [*module.named_parameters(), *module.named_buffers()]}
    own = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    return {name: names[id(t)] for name, t in own}


class _Overrides(TorchFunctionMode):
    """Stands in for PyTorch where stacking needs it: dropout, and the functions that the net has kernels for.

    Dropout draws from the batch's own stream: the global generator would make it depend on the stacking.
    """

    _WHOLE_CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d)

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is F.dropout or func in self._WHOLE_CHANNELS:
            return self._drop(func, *args, **options)
        if self.net.stacked and func in self.net.kernels:
            return self.net.kernels[func](*args, **options)
        return func(*args, **options)

    def _drop(
        self, func: Callable[..., Any], x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return x
        self.used = True
        shape = tuple(x.shape[:2]) + (1,) * (x.ndim - 2) if func in self._WHOLE_CHANNELS else tuple(x.shape)
        kept = self.net.uniform(shape) >= p
        return x * kept.to(x.dtype) / (1 - p) if p < 1 else x * 0
