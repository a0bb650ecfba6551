"""The frozen prefix of a model: layers whose outputs are the same in every round, so that they are computed once.

That is exact where nothing in them is random, none of their normalisation layers looks at a batch, they work sample by
sample, and the rest of the model takes nothing but their output. The graph of the module says where the last such
place is; where it cannot be traced, the order in which whole frozen submodules are called. Either way the two halves
are tried on some samples, together and one by one, and where they do not give what the whole model gives, there is no
prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coterie import memory
from coterie.contract.frozen import frozen_layers
from coterie.contract.layout import under
from coterie.contract.net import Net, generator_state
from coterie.contract.stored import is_stored
from coterie.engine.arithmetic import Arithmetic
from coterie.errors import counted

TRIED = 64
"""Samples on which the two halves are compared with the whole, at most; they are spread over all data."""
BATCH = 256
"""Samples whose outputs are computed at once."""
TOLERANCE = {torch.float64: 1e-9}
"""Largest difference, relative to the largest value (at least 1); 1e-4 where rows are float32."""
DRAWING = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
    torch.dropout, torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal, torch.rand,
    torch.randn, torch.randint, torch.randperm, "bernoulli", "bernoulli_", "normal_", "uniform_", "random_",
    "exponential_",
}
"""Functions and methods that draw random numbers."""


@dataclass(frozen=True)
class Prefix:
    """The two halves of a module: `rest(first(x))` is what the whole gives."""

    first: nn.Module
    rest: nn.Module
    until: str  # the name of its last layer

    def outputs(self, x: Tensor, dtype: torch.dtype, bf16: bool = False) -> Tensor:
        """`[samples, ...]` -> what the rest takes, `[samples, ...]`, a batch at a time."""
        self.first.eval()
        found: Tensor | None = None
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            for start in range(0, max(len(x), 1), BATCH):
                some = self.first(x[start : start + BATCH])
                if found is None:
                    found = torch.empty(len(x), *some.shape[1:], device=some.device,
                                        dtype=dtype if some.is_floating_point() else some.dtype)
                found[start : start + BATCH] = some
        assert found is not None
        return found


@dataclass(frozen=True)
class PrefixPlan:
    """Whether the outputs of a prefix are kept, and what that takes."""

    until: str
    samples: int
    numbers: int  # of one sample
    size: int  # bytes of all
    free: int  # bytes that could still be allocated

    @property
    def fits(self) -> bool:
        return 2 * self.size <= self.free

    @property
    def note(self) -> str:
        """What is said before they are computed."""
        what = f"the outputs of the frozen layers up to '{self.until}'"
        if self.fits:
            return (f"{what} are computed once and kept: {counted(self.samples, 'sample')} x {self.numbers} numbers, "
                    f"{self.size / 1e6:.1f} MB (prefix=off computes them in every step instead)")
        return (f"{what} would take {self.size / 1e9:.2f} GB, and half of the free memory is {self.free / 2e9:.2f} GB: "
                "they are computed in every step")


def planned(found: Prefix, x: Tensor, samples: int, dtype: torch.dtype, bf16: bool) -> PrefixPlan:
    """What keeping the outputs of `samples` samples like `x [n, ...]` takes."""
    one = found.outputs(x[:1], dtype, bf16)
    return PrefixPlan(found.until, samples, one.numel(), samples * one.nbytes, memory.free(x.device))


def prefix_of(net: Net, row: Tensor, x: Tensor) -> Prefix | None:
    """The longest frozen prefix that is exact for samples like `x [n, ...]`; None where there is none."""
    declared = getattr(net.whole, "batch_statistics", False)
    if not net.layout.frozen or net.layout.head == "" or declared or not len(x):
        return None
    for way in (_traced, _called):
        try:
            found = way(net, row, x)
            if found is not None and _exact(net, found, row, x):
                return found
        except Exception:  # whatever a user's module does when it is traced or cut: it is called whole then
            continue
        finally:
            net.takes(net.whole)
    return None


def _exact(net: Net, found: Prefix, row: Tensor, x: Tensor) -> bool:
    """Whether the halves give what the whole gives, alike in training, and sample by sample.

    They are compared on another row than the initial one, in which what trains may be 0 and so show nothing: the factor
    B of an adapter, the last scale of a residual block.
    """
    row = _anywhere(net, row)
    with Arithmetic().set(), torch.no_grad():
        net.mode(training=False)
        whole, seen = net(row, x), _features(net, row, x)
        z = found.outputs(x, row.dtype)
        apart = torch.cat([found.outputs(one, row.dtype) for one in torch.split(x, 1)])
        wholes = torch.cat([net(row, one) for one in torch.split(x, 1)])
        net.mode(training=True)
        generator = generator_state(x.device)
        z_training = found.first(x)
        drawn = not torch.equal(generator, generator_state(x.device))
        net.takes(found.rest)
        net.mode(training=False)
        halves, features = net(row, z), _features(net, row, z)
        singles = torch.cat([net(row, one) for one in torch.split(z, 1)])
    names = {name for name, _ in [*found.rest.named_parameters(), *found.rest.named_buffers()]}
    complete = all(entry.name in names for entry in net.layout.entries)
    pairs = ((whole, halves), (wholes, singles), (seen, features), (z, apart), (z, z_training.to(z.dtype)))
    return complete and not drawn and len(z) == len(x) and all(_close(*pair) for pair in pairs)


def _anywhere(net: Net, row: Tensor) -> Tensor:
    """A row `[D]` in which everything that trains is drawn anew around where it stands."""
    noise = torch.randn(row.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(row)
    found = row.clone()
    for entry in net.layout.entries:
        if entry.trainable:
            found[entry.start : entry.stop] += 0.3 * noise[entry.start : entry.stop]
    return found


def _features(net: Net, row: Tensor, x: Tensor) -> Tensor:
    """What enters the head; where there is none, nothing."""
    return row[:0] if net.layout.head is None else net.features(row, x)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    apart = (a - b).abs().max() if a.is_floating_point() else (a != b).any()
    return bool(apart <= TOLERANCE.get(a.dtype, 1e-4) * max(1.0, float(a.abs().max())))


# -- by the module's graph ---------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """The head stays one call, whatever it is: a net looks at what enters it. So does a layer that widens its weights
    by what it is given."""

    def __init__(self, head: str | None) -> None:
        super().__init__()
        self.head = head

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name == self.head or is_stored(m) or super().is_leaf_module(m, module_qualified_name)


def _traced(net: Net, row: Tensor, x: Tensor) -> Prefix | None:
    """Cut the graph at the last tensor that depends on frozen layers alone and is all that follows needs."""
    whole = net.whole
    parameters = (list(whole.named_parameters(remove_duplicate=unique)) for unique in (True, False))
    tied = len({len(named) for named in parameters}) > 1
    if tied or any(m._forward_hooks or m._forward_pre_hooks for m in whole.modules()):
        return None
    graphs = []
    for training in (True, False):
        net.mode(training)
        graphs.append(_Tracer(net.layout.head).trace(whole))
    graph, same = graphs[1], str(graphs[0]) == str(graphs[1])
    if not same or len([n for n in graph.nodes if n.op == "placeholder"]) != 1:
        return None  # it branches on the mode, or takes more than samples
    for last in reversed(_places(graph, net)):
        found = _split(whole, graph, last)
        with torch.no_grad():
            out = found.first.eval()(x)
        if isinstance(out, Tensor) and out.ndim > 1 and len(out) == len(x):
            return found
    return None


def _places(graph: fx.Graph, net: Net) -> list[fx.Node]:
    """The nodes behind frozen layers that everything after them depends on, and on no other that depends on samples."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    found: list[fx.Node] = []
    moving, before, frozen = set[fx.Node](), list[fx.Node](), False
    for number, node in enumerate(graph.nodes):
        sampled = node.op == "placeholder" or any(n in before or n in moving for n in node.all_input_nodes)
        if node.op == "output":
            break
        if _moves(node, net) or any(n in moving for n in node.all_input_nodes):
            moving.add(node)
            if any(n in before for n in node.all_input_nodes):
                break  # what trains, or draws, has met the samples
            continue
        if not sampled:
            continue  # a constant
        before.append(node)
        frozen = frozen or _is_frozen(node, net) or any(_is_frozen(n, net) for n in node.all_input_nodes)
        crossing = [n for n in before if any(order[user] > number for user in n.users)]
        if frozen and crossing == [node]:
            found.append(node)
    return found


def _moves(node: fx.Node, net: Net) -> bool:
    """Whether a node's value is random, or depends on what rows hold or on the other samples of a batch, or is the
    head's."""
    name = str(node.target)
    if node.op == "call_module":
        rows = any(under(entry.name, name) for entry in net.layout.entries)
        return rows or _of_head(name, net) or not _still(net.whole.get_submodule(name), net)
    if node.op == "get_attr":
        return any(entry.name == name for entry in net.layout.entries)
    return node.op in ("call_function", "call_method") and node.target in DRAWING


def _of_head(name: str, net: Net) -> bool:
    """Whether a module is the head or lies in it."""
    return net.layout.head is not None and under(name, net.layout.head)


def _is_frozen(node: fx.Node, net: Net) -> bool:
    """Whether a node is a frozen parameter, or a layer that has such."""
    if node.op not in ("call_module", "get_attr"):
        return False
    return any(under(entry.name, str(node.target)) for entry in net.layout.frozen)


def _still(module: nn.Module, net: Net) -> bool:
    """Whether a module draws nothing and no normalisation in it looks at batches."""
    frozen = frozen_layers(net.whole)

    def moves(m: nn.Module) -> bool:
        if isinstance(m, nn.modules.dropout._DropoutNd):
            return m.p > 0
        if isinstance(m, nn.MultiheadAttention | nn.RNNBase):
            return float(m.dropout) > 0
        return isinstance(m, nn.RReLU) or (bool(getattr(m, "track_running_stats", False)) and m not in frozen)

    return not any(moves(m) for m in module.modules())


def _split(whole: nn.Module, graph: fx.Graph, last: fx.Node) -> Prefix:
    """The module up to a node, and from there on."""
    end = next(node for node in graph.nodes if node.op == "output")
    first, rest = fx.Graph(), fx.Graph()
    below = _copied(graph, first, last, {})
    first.output(below[last])
    _copied(graph, rest, end, {last: rest.placeholder("x")})
    named = [str(node.target) for node in first.nodes if node.op == "call_module"]
    halves = [fx.GraphModule(whole, half, type(whole).__name__) for half in (first, rest)]
    return Prefix(halves[0], halves[1], named[-1] if named else last.name)


def _copied(graph: fx.Graph, into: fx.Graph, wanted: fx.Node, known: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """What a node is computed from, up to what is known, copied into another graph."""
    needed, left = set[fx.Node](), [wanted]
    while left:
        node = left.pop()
        if node not in known and node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    for node in graph.nodes:
        if node in needed:
            known[node] = into.node_copy(node, known.__getitem__)
    return known


# -- by the order of calls ---------------------------------------------------------------------------------------------


class _Call:
    """One call of a submodule: its name, what it got and what it gave."""

    def __init__(self, name: str, given: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        self.name, self.out = name, out
        self.got = given[0] if len(given) == 1 and not options else None


def _called(net: Net, row: Tensor, x: Tensor) -> Prefix | None:
    """Whole frozen submodules, the first of which gets the samples and each further one what the one before gave."""
    whole, calls = net.whole, list[_Call]()
    outer: list[str] = []
    for name, module in whole.named_modules():
        rows = any(under(entry.name, name) for entry in net.layout.entries)
        inside = any(under(name, other) for other in outer)
        if name and not rows and not inside and not _of_head(name, net) and _still(module, net):
            outer.append(name)

    def noting(name: str) -> Any:
        return lambda module, given, options, out: calls.append(_Call(name, given, options, out))

    hooks = [whole.get_submodule(name).register_forward_hook(noting(name), with_kwargs=True) for name in outer]
    try:
        net.mode(training=False)
        with torch.no_grad():
            net(row, x)
    finally:
        for hook in hooks:
            hook.remove()
    chain: list[str] = []
    current: Any = x
    for call in calls:
        if call.got is not current or not isinstance(call.out, Tensor) or call.name in chain:
            break
        chain, current = [*chain, call.name], call.out
    if len({call.name for call in calls}) < len(calls) or not any(
        under(entry.name, name) for entry in net.layout.frozen for name in chain
    ):
        return None
    first = nn.Sequential(*(whole.get_submodule(name) for name in chain))
    return Prefix(first, _without(whole, chain), chain[-1])


def _without(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """The module with these submodules handing on what they get; all others, and all tensors, are the same objects."""
    made = copy.copy(module)
    made._modules, made._parameters = dict(module._modules), dict(module._parameters)
    made._buffers = dict(module._buffers)
    for child in {name.partition(".")[0] for name in names}:
        deeper = [name.partition(".")[2] for name in names if name.partition(".")[0] == child]
        inner = module._modules[child]
        assert inner is not None
        made._modules[child] = nn.Identity() if "" in deeper else _without(inner, deeper)
    return made
