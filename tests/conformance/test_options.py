"""Every number that a method, an aggregator, an optimizer or a metric takes: its range holds, and holds up.

Values inside a range are run: a tiny federation for two rounds, in float32 as users have it. Every row and loss is
finite afterwards, or the run can be called diverged. Values outside are refused in a sentence that names the option,
by whatever way they come. All draws follow from the option's name, so they are the same every time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from by_hand import adapter_for
from torch import nn

import coterie
from coterie import BelowOne, Count, CountOrZero, NonNegative, Positive, Range, Share, registry
from coterie.contract.aggregator import Aggregator
from coterie.contract.local import LocalOptions
from coterie.contract.method import Method
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.options import in_words, options, ranges, spelled
from coterie.running.experiment import Experiment, with_settings
from coterie.running.outcome import diverged
from coterie.running.training import Training

CLASSES: dict[str, dict[str, Any]] = {
    "method": registry.methods(), "aggregator": registry.aggregators(), "optimizer": registry.optimizers(),
    "metric": registry.metrics(),
}
INSIDE, FAST, OUTSIDE = 30, 6, 28
"""Draws for each option: inside its range, how many of them in every run of the tests, and outside."""
FREE = {"split_after", "smallest", "received", "every", "selected", "common_rounds"}
"""Counts that cost nothing however large; time or memory grows with the others, which are drawn small."""
SMALL = 12


def numeric(cls: type[Any]) -> list[str]:
    """The options that are numbers, or numbers or none."""
    kinds = {name: (hint, *get_args(hint)) for name, hint in options(cls).items()}
    return [name for name, hints in kinds.items() if int in hints or float in hints]


OPTIONS = [(kind, name, option) for kind, known in CLASSES.items() for name, cls in known.items()
           for option in numeric(cls)]
COUNTED = [one for one in OPTIONS if one[0] in ("method", "aggregator")]


# -- draws ------------------------------------------------------------------------------------------------------------


def whole(cls: type[Any], option: str) -> bool:
    hint = options(cls)[option]
    return int in (hint, *get_args(hint))


def edges(held: Range) -> list[float]:
    """The values next to the bounds that are still inside, and the largest and smallest there are."""
    found = [held.at_least, held.at_most]
    found += [math.nextafter(held.above, math.inf) or 1e-30] if held.above is not None else []
    found += [math.nextafter(held.below, -math.inf)] if held.below is not None else []
    found += [math.inf, -math.inf] if held.infinite else []
    found += [1e30, -1e30, 1e20, 1e-20, 1e-30, 0, 1]  # float32 holds no square of the first; a number may be whole
    return [value for value in found if value is not None and value in held]


def spread(held: Range, chance: random.Random) -> float:
    """A number inside, log-uniform over many magnitudes from either bound, or even between two of them."""
    low = held.above if held.above is not None else held.at_least
    high = held.below if held.below is not None else held.at_most
    size = 10.0 ** chance.uniform(-12, 12)
    if low is not None and high is not None:
        near = (high - low) * 10.0 ** chance.uniform(-12, 0)
        value = chance.choice([low + near, high - near, chance.uniform(low, high)])
    elif low is not None:
        value = low + size
    else:
        value = chance.choice([-size, size])
    return value if value in held else spread(held, chance)


def inside(cls: type[Any], option: str, chance: random.Random, first: int | None = None) -> Any:
    """A value in the range; the `first` ones are its edges, and none where that is a value."""
    held, hint = ranges(cls)[option], options(cls)[option]
    ends: list[Any] = [None] if type(None) in get_args(hint) else []
    if whole(cls, option):
        assert held.at_least is not None
        low, high = int(held.at_least), int(held.at_most) if held.at_most is not None else None
        ends += [low, low + 1] if high is None else range(low, high + 1)
        ends += [10**9] if option in FREE else []
        top = high if high is not None else round(10 ** chance.uniform(0, 9)) if option in FREE else low + SMALL
        drawn: Any = chance.randint(low, max(low, top))
    else:
        ends += edges(held)
        drawn = spread(held, chance)
    return ends[first] if first is not None and first < len(ends) else drawn


def outside(cls: type[Any], option: str, chance: random.Random, number: int) -> Any:
    """A value that the range refuses: next to a bound, far from it, NaN, infinite where that is none; or a word."""
    held = ranges(cls)[option]
    size = 10.0 ** chance.uniform(0, 12)
    found: list[Any] = [math.nan]
    if whole(cls, option):
        found += [low - step for low in [held.at_least] if low is not None for step in (1, 2, round(size))]
        found += [high + step for high in [held.at_most] if high is not None for step in (1, 2, round(size))]
        found += [1.5, chance.uniform(1, 9), math.inf, -math.inf]
    else:
        found += [held.above, held.below, math.inf, -math.inf, -1e31, 1e31, 1e-31, -1e-31]
        found += [value for low in (held.above, held.at_least) if low is not None
                  for value in (math.nextafter(low, -math.inf), low - 1 / size, low - size)]
        found += [value for high in (held.below, held.at_most) if high is not None
                  for value in (math.nextafter(high, math.inf), high + 1 / size, high + size)]
    refused: list[Any] = [value for value in found if value is not None and not admitted(cls, option, value)]
    refused += ["many", True] + ([None] if type(None) not in get_args(options(cls)[option]) else [])
    return refused[number] if number < len(refused) else chance.choice(refused)


def admitted(cls: type[Any], option: str, value: float) -> bool:
    return value in ranges(cls)[option] and (not whole(cls, option) or (math.isfinite(value) and value == int(value)))


def chosen(cls: type[Any], chance: random.Random) -> dict[str, Any]:
    """Words and switches at random: some numbers matter under one of them alone."""
    found: dict[str, Any] = {}
    for name, hint in options(cls).items():
        if name in ("validation", "printed", "aggregator", "keep"):
            continue
        if get_origin(hint) is Literal:
            found[name] = chance.choice(get_args(hint))
        elif hint is bool:
            found[name] = chance.random() < 0.5
    return found


@cache
def plan(kind: str, name: str, option: str) -> list[dict[str, Any]]:
    """The options of each run: edges first, then draws; half with other words, a quarter with other numbers too."""
    cls, chance = CLASSES[kind][name], random.Random(f"{kind} {name} {option}")
    found = []
    for number in range(INSIDE):
        given = {option: inside(cls, option, chance, number)}
        if number % 2:
            given = {**chosen(cls, chance), **given}
        if number % 4 == 3:
            given = {**{other: inside(cls, other, chance) for other in numeric(cls) if other != option}, **given}
        found.append(given)
    return found


# -- inside -----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@cache
def federation() -> Federation:
    """Six clients that differ, one with a single sample; enough for every aggregator as it comes."""
    generator = torch.Generator().manual_seed(0)

    def pair(client: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 4, generator=generator) + 0.3 * client
        return x, (torch.randint(0, 3, (n,), generator=generator) + client * (torch.arange(n) % 2)) % 3

    def split(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair(client, n) for client, n in enumerate(sizes)]

    return Federation.from_splits(split(7, 12, 1, 5, 6, 4), split(*[3] * 6), split(2, 2, 0, 2, 2, 2), classes=3)


def trained(kind: str, name: str, given: dict[str, Any], number: int) -> coterie.Result:
    """Two rounds with these options; an optimizer steps the clients or the server in turn, a metric is watched."""
    made = CLASSES[kind][name](**given)
    run: dict[str, Any] = {"rounds": 2, "batch": 4, "lr": 0.1, "device": "cpu"}
    method: Any = made
    if kind == "aggregator":
        method = replace(registry.method("fedavg"), aggregator=made)
        run |= {"sampling": "poisson"} if made.private else {}
    if kind == "optimizer":
        place = "server" if made.lr is not None or number % 2 else "optimizer"
        method, run[place] = "fedavg", replace(made, lr=made.lr or 0.1) if place == "server" else made
    if kind == "metric":
        method, run["watch"] = "fedavg", (registry.called(made),)
    return coterie.run(method, mlp, federation(), adapter=adapter_for(method), **run)


def wrong(result: coterie.Result) -> str:
    """What stays silent in a run: a row, loss or state that is not finite in a run that is not called diverged."""
    sim: Any = result.simulation
    loss = result.at(when="last").test["loss"]  # [clients]
    if not np.isfinite(loss).all() and not diverged(result):
        return f"the losses are {loss}, and the run is not called diverged"
    rows = torch.stack([sim.row(client) for client in range(len(loss))])
    silent = ~torch.isfinite(rows).all(1).numpy() & np.isfinite(loss)
    if silent.any():
        return f"the rows of clients {np.flatnonzero(silent).tolist()} are not finite, and their losses are {loss}"
    states = sim.snapshot()[0]
    broken = [name for name, t in states.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if broken and np.isfinite(loss).all():
        return f"{broken} are not finite, and all losses are"
    return ""


def hold_up(kind: str, name: str, option: str, numbers: range) -> None:
    ran = 0
    for number in numbers:
        given = plan(kind, name, option)[number]
        try:
            result = trained(kind, name, given, number)
        except CoterieError:
            continue  # options that do not go together, or not with six clients; what is not a sentence fails here
        ran += 1
        assert not (said := wrong(result)), f"{name} with {given}: {said}"
    assert ran or numbers.start, "of the first ones, the range's edges among them, none is run"


@pytest.mark.parametrize(("kind", "name", "option"), OPTIONS)
def test_what_is_inside_trains_or_is_seen_to_diverge(kind, name, option):
    hold_up(kind, name, option, range(FAST))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name", "option"), OPTIONS)
def test_more_of_what_is_inside_trains_or_is_seen_to_diverge(kind, name, option):
    hold_up(kind, name, option, range(FAST, INSIDE))


@pytest.mark.parametrize(("kind", "name", "option"), COUNTED)
def test_what_is_inside_is_spelled_so_that_it_is_read_again(kind, name, option):
    """Run folders hold the spelling: `fedavg+normclip:bound=1e+20` has a plus in a number."""
    for given in plan(kind, name, option):
        try:
            made = CLASSES[kind][name](**given)
        except CoterieError:
            continue
        method = made if kind == "method" else replace(registry.method("fedavg"), aggregator=made)
        assert registry.method(registry.spelling(method)) == method, given


# -- outside ----------------------------------------------------------------------------------------------------------


def ways(kind: str, name: str, option: str, value: Any) -> list[Callable[[], Any]]:
    """Every way to make it with this value: the constructor, a copy, a spelling, that of a preset, a setting."""
    cls, text = CLASSES[kind][name], f"{option}={spelled(value)}"
    found = [lambda: cls(**{option: value}), lambda: replace(cls(), **{option: value})]
    if kind == "method":
        spellings = [f"{name}:{','.join([*preset, text])}" for preset in ([], *([one] for one in cls.presets))]
        found += [partial(registry.method, spelling) for spelling in spellings]
        found.append(lambda: with_settings(Experiment(methods=(name,)), [f"{name}.{text}"]))
    elif kind == "aggregator":
        spellings = [f"{name}:{','.join([*preset, text])}" for preset in ([], *([one] for one in cls.presets))]
        found += [partial(registry.method, f"fedavg+{spelling}") for spelling in spellings]
    elif kind == "optimizer":
        found.append(lambda: registry.optimizer(f"{name}({text})", server=True))
    else:
        found.append(lambda: registry.metric(f"{name}({text})"))
    return found


@cache
def refusals(kind: str, name: str, option: str) -> list[Any]:
    cls, chance = CLASSES[kind][name], random.Random(f"{kind} {name} {option} outside")
    return [outside(cls, option, chance, number) for number in range(OUTSIDE)]


@pytest.mark.parametrize(("kind", "name", "option"), OPTIONS)
def test_what_is_outside_is_refused_in_a_sentence_that_names_the_option(kind, name, option):
    """Each value by two of the ways, so that every way meets many values."""
    for number, value in enumerate(refusals(kind, name, option)):
        known = ways(kind, name, option, value)
        if value is None and kind == "optimizer":
            known = known[:2]  # `lr=none` is a spelling of its default
        for way in {number % len(known), (3 * number + 1) % len(known)}:
            with pytest.raises(CoterieError) as refused:
                known[way]()
            assert f"{name}'s {option} must be " in str(refused.value), value
            assert str(refused.value).endswith("."), value


# -- what is covered --------------------------------------------------------------------------------------------------


def test_every_numeric_option_of_methods_and_aggregators_is_drawn():
    """At least 5,000 draws, of which a third is inside and run; no option of the registry is left out."""
    there = {(kind, name, option) for kind, known in (("method", registry.methods()),
                                                      ("aggregator", registry.aggregators()))
             for name, cls in known.items() for option, hint in options(cls).items()
             if get_origin(hint) is not Literal and ("int" in str(hint) or "float" in str(hint))}
    assert set(COUNTED) == there
    run, refused = (sum(len(draws(*one)) for one in COUNTED) for draws in (plan, refusals))
    assert run + refused >= 5000
    assert run >= (run + refused) / 3
    assert all(given[option] is None or admitted(CLASSES[kind][name], option, given[option])
               for kind, name, option in COUNTED for given in plan(kind, name, option))


@pytest.mark.parametrize("cls", [*(cls for known in CLASSES.values() for cls in known.values()), LocalOptions,
                                 Training])
def test_every_number_has_a_range(cls):
    """So that a page can list it and a value outside is refused; and defaults are inside, or they could not be made."""
    assert set(ranges(cls)) == set(numeric(cls))
    assert cls()


# -- a method of one's own --------------------------------------------------------------------------------------------


def test_a_number_without_a_range_may_be_anything():
    @dataclass(frozen=True)
    class Free(Method):
        rate: float = 1.0

    assert math.isnan(Free(rate=math.nan).rate)
    assert ranges(Free) == {}


def test_ranges_of_a_class_in_a_file(tmp_path):
    """Aliases and `Range`, optional or not, written as text or not; and what the page says of them."""
    file = tmp_path / "mine.py"
    file.write_text("""
from dataclasses import dataclass
from typing import Annotated

from coterie import Positive, Range
from coterie.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    rate: Positive = 0.5
    bound: "Annotated[float, Range(at_least=-2, below=3)] | None" = None
    few: Annotated[int | None, Range(at_least=1, at_most=4)] = 2
    any: float = 1.0
""")
    cls = type(registry.method(f"{file}:Mine"))
    assert ranges(cls) == {
        "rate": Range(above=0), "bound": Range(at_least=-2, below=3), "few": Range(at_least=1, at_most=4)
    }
    assert [in_words(cls, name) for name in ("rate", "bound", "few", "any")] == [
        "above 0", "at least -2 and below 3, or none", "a whole number, from 1 to 4, or none", ""
    ]
    for given, said in (("rate=0", "rate must be above 0, not 0.0"), ("bound=3", "below 3 or none, not 3.0"),
                        ("few=5", "few must be from 1 to 4 or none, not 5")):
        with pytest.raises(CoterieError, match=said):
            registry.method(f"{file}:Mine:{given}")
    assert registry.method(f"{file}:Mine:bound=-2,few=none,any=inf").any == math.inf


def test_an_aggregator_with_checks_of_its_own_keeps_its_ranges():
    @dataclass(frozen=True)
    class Paired(Aggregator):
        low: Share = 0.1
        high: Share = 0.9

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.low > self.high:
                raise CoterieError("low above high.")

    for given, said in (({"low": 2.0}, "low must be from 0 to 1"), ({"low": 0.95}, "low above high")):
        with pytest.raises(CoterieError, match=said):
            Paired(**given)


@pytest.mark.parametrize(("hint", "inside", "outside"), [
    (Positive, [1e-30, 1, 1e30], [0, -1, 1e-31, 1e31, math.inf, math.nan, 10**400]),
    (NonNegative, [0, 0.0, 5], [-1e-9, math.inf, math.nan]),
    (Share, [0, 0.5, 1], [-0.1, math.nextafter(1, 2), math.nan]),
    (BelowOne, [0, math.nextafter(1, 0)], [1, -0.1]),
    (Count, [1, 10**9], [0, -1]),
    (CountOrZero, [0, 10**9], [-1]),
    (Annotated[float, Range(at_least=0, infinite=True)], [0, math.inf], [-math.inf, math.nan, 1e31]),
    (Annotated[float, Range()], [-1e30, 0, 3], [math.nan, math.inf]),
])
def test_what_is_in_a_range(hint, inside, outside):
    held = get_args(hint)[1]
    assert all(value in held for value in inside)
    assert not any(value in held for value in outside)
