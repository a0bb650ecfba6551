"""What an engine is: four primitives on rows of clients, which carry every method.

A cohort asks an engine for everything its clients compute: scores (`measure`), sums over a split (`total`), local SGD
(`train`) and a method's own inner step (`loop`). `engine.reference` is the readable implementation, `engine.stacked`
the fast one; whatever else implements `Engine` can stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.contract.layout import Layout
from coterie.contract.metric import Tally
from coterie.contract.net import Batch, Given, Net, Objective
from coterie.contract.optimizer import Optimizer

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]
Tensors = Mapping[str, Tensor]
Split = Literal["train", "val", "test"]

Correct = Callable[[Tensor, Tensor, Given], Tensor]
"""Element-wise hook `(gradient, row, given) -> gradient`, called tensor by tensor; rows in `given` are cut alike."""
Step = Callable[[Net, Given, Any, Given], Mapping[str, Tensor]]
"""A method's own inner step `(net, state, batch, given) -> state` of one client; several streams come as a tuple."""
Sum = Callable[[Net, Tensor, Batch, Given], Any]
"""What is added up over a split, `(net, row, batch, given)` of one client: a tensor or a dictionary of such."""
Until = Callable[[Given], Tensor]
"""Which clients are done after a pass: `state [C, ...] -> [C]`."""
Rate = float | Tensor
"""A learning rate: one for all, or one a client `[C]`."""


@dataclass(frozen=True)
class Effort:
    """How much local work: epochs or steps of which batch size, from which stream of randomness.

    A client's samples are shuffled anew each pass by a hash of (key, stream, copy, pass, sample number); a step's noise
    is drawn from the key of (key, stream, copy, step number). `engine.packing` lays both out.
    """

    batch: int  # 0 is the full batch
    epochs: int
    steps: int | None  # instead of epochs
    keys: Tensor  # [C] int64, on the host
    pace: FloatArray | None = None  # [C] fraction of the steps a straggler manages
    distinct: bool = False  # each of a client's K models has an order of its own
    fraction: float = 1.0  # of the samples that are used
    streams: int = 1  # independent batches a step, for `loop`


class Engine(Protocol):
    """Clients' data on a device, the net, and what is computed with them.

    `ids [C]` are places in the data, in any order, and a client may stand there more than once: runs that are computed
    together share an engine. Rows are `[C, D]`, or `[C, K, D]` for K models a client; tensors of `given` and `state`
    are `[C, ...]`. Nothing that comes in is changed, and no client's result depends on who else is in the call.

    What is written for one client (`objective`, `correct`, `step`, `fn`) is called with `net`, that client's slice of
    the tensors and its batch; how many clients a call serves at once is the engine's own affair. Batches are those of
    `Effort`; one that is not full may be filled up with samples of weight 0, except for models with batch statistics.
    While it computes, an engine sets the arithmetic it was built with (TF32, bfloat16, kernels) and puts PyTorch's
    switches back: engines of different precision live side by side.
    """

    net: Net
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    x: Tensor  # [samples, ...], all clients', where the engine reads them; `net` may take what a prefix makes of them
    y: Tensor  # [samples, ...]
    evaluation_batch: int  # samples of a client that are scored at once at most

    @property
    def pending(self) -> int:
        """Bytes that the net's inputs will still take, where they are not the samples themselves."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """The engine's own arithmetic, for a while: the primitives set it; set it where `net` is called elsewhere."""
        ...

    def sizes(self, ids: IntArray, split: Split) -> IntArray:
        """Samples of each client in a split `[C]`."""
        ...

    def counts(self, ids: IntArray, split: Split) -> IntArray:
        """What the means over a split are divided by `[C]`: its samples or, with classes of tokens, counted tokens."""
        ...

    def samples(self, ids: IntArray, split: Split, raw: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Raw `(x, y)` of a split, client by client; not `raw`, x is what the net takes."""
        ...

    def example(self) -> Tensor:
        """What the net takes of one sample, `[1, ...]`."""
        ...

    def steps(self, ids: IntArray, effort: Effort) -> IntArray:
        """Local steps each client takes `[C]`; a straggler manages a part of them, but at least one."""
        ...

    def measure(
        self, ids: IntArray, rows: Tensor, split: Split, tallies: Sequence[Tally] = ()
    ) -> dict[str, Tensor]:
        """Sums over a split of the task's `loss`, as it is scored, and with classes of right answers, `accuracy`; each
        `[C, (K)]`. Every sample (of texts with classes of tokens, every counted token) counts once, whatever the class
        weights.

        Beside them the sums of `tallies`, float64, by `tally.sum`, `[C, (K,) ...]`.
        """
        ...

    def total(self, ids: IntArray, fn: Sum, rows: Tensor, given: Tensors, split: Split) -> dict[str, Tensor]:
        """The sum over a split of `fn(net, row, batch, given)`, by name (a lone tensor is named ""), `[C, (K,) ...]`.

        The module is in evaluation mode. A client without samples has 0. `net.loss` and `net.grad` are those of
        training, class weights included; images are as they are.
        """
        ...

    def train(
        self, ids: IntArray, rows: Tensor, given: Tensors, effort: Effort, lr: Rate, part: str = "all",
        correct: Correct | None = None, objective: Objective | None = None, clip: float | None = None,
        watch: bool = True, optimizer: Optimizer | None = None, memory: Tensors | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Local steps along `clipped(correct(gradient))`, on the trainable tensors of `part`: plain SGD, or the
        `optimizer`'s, from the `memory` that an earlier call returned or from a fresh one.

        Returns the trained rows, the mean loss of the last pass `[C, (K)]`, 0 where nobody watches it, and the memory:
        the optimizer's slots `[C, (K,) D]` and `count [C, (K)]`. Running statistics move with every batch of more than
        one sample. Images are augmented, as in `loop`, where the run asked for it.
        """
        ...

    def loop(
        self, ids: IntArray, step: Step, state: Tensors, given: Tensors, effort: Effort, lr: Rate,
        until: Until | None = None,
    ) -> tuple[dict[str, Tensor], IntArray]:
        """`state <- step(net, state, batch, given)` on every batch: the state `[C, ...]` and the steps taken `[C]`.

        `given.lr` is the learning rate. `until` is asked after each pass which clients are done.
        """
        ...
