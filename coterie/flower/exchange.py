"""Questions and answers between experiments and sites, over any transport.

An experiment is an `Exchange`: it yields an `Ask` and is sent the answers, so that `drive` can put the tasks of many
experiments into one message a site: on Flower a message costs seconds, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from coterie.flower.wire import Failure, Parcel

Replies = Sequence[Parcel | Failure]
"""A site's answers to the tasks of one message, in their order; one that is no good spoils no other."""


class Transport(Protocol):
    """How messages reach sites."""

    def sites(self) -> set[str]:
        """The names of the sites that are there now."""
        ...

    def ask(
        self, messages: Mapping[str, Sequence[Parcel]], deadline: float, enough: Callable[[set[str]], bool]
    ) -> dict[str, Replies | Failure]:
        """Each site's answer, parcel for parcel, or what went wrong; sites that have not answered yet are left out.

        Returns when everybody answered, after `deadline` seconds, or when those who have `answered` are `enough`.
        """
        ...


def answered(found: Mapping[str, Replies | Failure]) -> set[str]:
    """The sites whose answers can be used. One that says it failed is no answer: others are waited for."""
    return {name for name, replies in found.items() if not isinstance(replies, Failure)
            and not any(isinstance(one, Failure) or "error" in one.meta for one in replies)}


Answers = Mapping[str, Parcel | Failure]
"""Of every site that was asked: what it answered, or why there is no answer."""


@dataclass(frozen=True)
class Ask:
    """A task for each of some sites, and how many of which answers are enough."""

    parcels: Mapping[str, Parcel]
    counted: frozenset[str]
    wanted: int

    def enough(self, answered: set[str]) -> bool:
        return len(self.counted & answered) >= self.wanted


Exchange = Generator[Ask, Answers, None]


def drive(exchanges: Sequence[Exchange], transport: Transport, deadline: float) -> None:
    """Let experiments go in step: what they ask for at the same time is one message a site."""
    asks: dict[int, Ask] = {}
    for number, exchange in enumerate(exchanges):
        _advance(asks, number, exchange, None)
    while asks:
        now = dict(asks)
        order: dict[str, list[int]] = {}
        for number, ask in now.items():
            for name in ask.parcels:
                order.setdefault(name, []).append(number)
        messages = {name: [now[number].parcels[name] for number in numbers] for name, numbers in order.items()}

        def enough(names: set[str], waiting: Mapping[int, Ask] = now) -> bool:
            return all(ask.enough(names) for ask in waiting.values())

        found = transport.ask(messages, deadline, enough)
        early = enough(answered(found))
        late = Failure("late", "enough others had answered." if early else f"no answer within {deadline:g} s.")
        for number, ask in now.items():
            mine = {name: _own(found.get(name, late), order[name], number) for name in ask.parcels}
            del asks[number]
            _advance(asks, number, exchanges[number], mine)


def _own(answer: Replies | Failure, numbers: Sequence[int], number: int) -> Parcel | Failure:
    """What a site answered to one of the experiments whose tasks its message held."""
    if isinstance(answer, Failure):
        return answer
    if len(answer) != len(numbers):
        return Failure("mismatch", f"{len(answer)} answers came for {len(numbers)} tasks.", "header")
    return answer[numbers.index(number)]


def _advance(asks: dict[int, Ask], number: int, exchange: Exchange, answers: Answers | None) -> None:
    with suppress(StopIteration):
        asks[number] = next(exchange) if answers is None else exchange.send(answers)
