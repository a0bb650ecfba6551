"""Which parameters train, chosen by name: `freeze` and `train`, for people who do not want to write requires_grad_."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from coterie.contract.frozen import duplicate
from coterie.contract.layout import adapters_of, declare_head, part_of, parts_of
from coterie.errors import CoterieError, unknown
from coterie.options import require_few


@dataclass(frozen=True)
class Extended:
    """A module as it was given, and what is done to each draw of it; called, it gives the first."""

    module: nn.Module
    extend: Callable[[nn.Module], nn.Module]

    def __call__(self) -> nn.Module:
        return self.extend(duplicate(self.module))

    def further(self, extend: Callable[[nn.Module], nn.Module]) -> Extended:
        """With something done to it after that."""
        return Extended(self.module, lambda module: extend(self.extend(module)))


Built = nn.Module | Callable[[], nn.Module]


def partly(model: Built, freeze: str = "", train: str = "", head: str | None = None) -> Built:
    """The model, a module or a function that builds one, of which only a part trains.

    With `train` all else is frozen; what `freeze` names is frozen in any case. Both are patterns joined by `+`: a part
    (`base`, `head`, `adapters`, or one that the module declares), or the name of a module or parameter, in which `*`
    stands for any text. `head` names the layer that makes the scores when the last linear layer is not it.
    """
    if not (freeze or train):
        return model
    if isinstance(model, nn.Module):
        return _choose(duplicate(model), freeze, train, head)

    def choose(module: nn.Module) -> nn.Module:
        return _choose(module, freeze, train, head)

    if isinstance(model, Extended):
        return model.further(choose)
    build = model
    return lambda: choose(build())


def _choose(module: nn.Module, freeze: str, train: str, head: str | None) -> nn.Module:
    """The same module, with requires_grad of every parameter as the patterns say."""
    if head is not None:
        declare_head(module, head)
    trained, stopped = matching(module, train, "train"), matching(module, freeze, "freeze")
    for name, parameter in module.named_parameters():
        wanted = (name in trained if train else parameter.requires_grad) and name not in stopped
        parameter.requires_grad_(wanted)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        said = " and ".join(f"{word}={text}" for word, text in (("train", train), ("freeze", freeze)) if text)
        raise CoterieError(f"{said} freezes every parameter of the model, so nothing would be trained; name less to "
                           "freeze, e.g. freeze=base, or what is to train, e.g. train=head.")
    return module


def matching(module: nn.Module, patterns: str, word: str) -> set[str]:
    """The names of the parameters that patterns joined by `+` stand for; `word` is the option they come from."""
    names, prefixes = [name for name, _ in module.named_parameters()], parts_of(module)[0]
    factors = {name for name in names if name.rpartition(".")[0] in adapters_of(module)}
    found: set[str] = set()
    wanted = [pattern for pattern in patterns.split("+") if pattern]
    require_few(wanted, word)
    for pattern in wanted:
        mine = {name for name in names if part_of(name, prefixes) == pattern}
        mine = mine or (factors if pattern == "adapters" else set())
        mine = mine or {name for name in names if any(fnmatchcase(level, pattern) for level in _levels(name))}
        if not mine:
            known = {level for name in names for level in _levels(name)} | {part_of(name, prefixes) for name in names}
            listed = ", ".join(sorted(level for level in known if "." not in level))
            raise unknown(f"part or parameter to {word}", pattern, known, listed=f"the model consists of: {listed}.")
        found |= mine
    return found


def _levels(name: str) -> list[str]:
    """A parameter's name and those of the modules around it: a.b.weight, a.b, a."""
    pieces = name.split(".")
    return [".".join(pieces[:count]) for count in range(len(pieces), 0, -1)]
