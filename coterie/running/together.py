"""Several runs side by side: what their clients compute at the same time is computed as one stack.

A simulation asks for its clients' work by yielding a `Call` (see `Simulation.rounding`). `alone` answers the calls of
one run; a `Stack` drives several runs in step and answers calls of the same kind together, as one cohort of all their
clients. The client side works client by client, and every stream of randomness hangs on the run's own seed and the
client's name, so a run's results are those it would have alone.

Runs fit together when they differ in the seed, the aggregator, the server's optimizer or numbers of the method: these
never decide the shape of the work. A number that differs reaches functions that are written for one client
(`objective`, `correct`, `step`) as that client's own; anywhere else its use raises, and the work is then done run by
run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Generic, NoReturn, TypeVar, get_args

import torch
from torch import Tensor

from coterie.contract import records
from coterie.contract.cohort import Cohort, GivenLike, Members
from coterie.contract.method import Method
from coterie.contract.records import Record, Upload
from coterie.errors import CoterieError
from coterie.options import options

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What clients of one run are to compute: `function(method, cohort, *records)`, tensors `[C, ...]` in and out."""

    function: Callable[..., Any]
    method: Method
    cohort: Cohort
    records: tuple[Record, ...]

    @property
    def round(self) -> int:
        return self.cohort.round

    def compute(self) -> Any:
        self.cohort.spent = 0 * self.cohort.spent  # a joint attempt that was given up has left its steps
        return self.function(self.method, self.cohort, *self.records)


@dataclass(frozen=True)
class Settle:
    """The device is to finish what it was asked for. The answer is how many runs waited for it together."""

    device: torch.device
    round: int

    def compute(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1


@dataclass(frozen=True)
class News:
    """Something for whoever watches the run, which goes on once they have it."""

    what: Any


Request = Call | Settle
Step = Callable[[], Request | News]
Course = Generator[Request | News, Any, T]
"""The course of a run: it asks for what its clients compute, and is sent the answers; it also tells news."""
Told = Generator[Any, None, T]
"""News as they come, and the result at the end. What is thrown in is raised where the run told them."""


def telling(course: Course[T]) -> Told[T]:
    """One run to its end."""
    step: Step = partial(next, course)
    while True:
        try:
            request = step()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            if isinstance(request, News):
                yield request.what
                step = partial(next, course)
            else:
                step = partial(course.send, request.compute())
        except Exception as reason:
            step = partial(course.throw, reason)


def alone(course: Course[T]) -> T:
    """One run to its end, watched by nobody."""
    return result_of(telling(course))


def result_of(told: Told[T]) -> T:
    """What comes at the end, the news passed over."""
    while True:
        try:
            next(told)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Stack(Generic[T]):
    """Runs in step: those that are behind go first, and calls of one kind are computed together.

    `most` is the number of clients computed at once at most (a single run's are never cut here). A run that fails
    stops the others, by calling `stop`, at the end of their round; the first failure is then raised. Joined work that
    fails is done run by run from then on, and the reason is kept in `apart`. So is work that mixes clients, such as
    `payload.row[0]` for all of them: of each kind, the first is also done with the first run's inputs all NaN, which
    must not reach the others.
    """

    def __init__(self, most: int, stop: Callable[[], None] = lambda: None) -> None:
        self.most, self.stop = most, stop
        self.apart: dict[Hashable, Exception] = {}
        self.joined = 0  # calls that were computed together so far
        self._tried: set[Hashable] = set()

    def run(self, runs: Sequence[Course[T]]) -> list[T]:
        """All runs to their end, watched by nobody; their results in order."""
        return result_of(self.telling(runs))

    def telling(self, runs: Sequence[Course[T]]) -> Told[list[T]]:
        """All runs to their end; their results in order."""
        waiting: dict[int, Request] = {}
        ended: dict[int, T] = {}
        failures: list[Exception] = []

        def go_on(number: int, step: Step) -> Told[None]:
            waiting.pop(number, None)
            try:
                while isinstance(request := step(), News):
                    try:
                        yield request.what
                        step = partial(next, runs[number])
                    except Exception as reason:
                        step = partial(runs[number].throw, reason)
                waiting[number] = request
            except StopIteration as end:
                ended[number] = end.value
            except Exception as reason:
                failures.append(reason)
                self.stop()

        for number, run in enumerate(runs):
            yield from go_on(number, partial(next, run))
        while waiting:
            for kind, numbers in self._groups(waiting):
                answers = self._answers(kind, [waiting[number] for number in numbers])
                for number, answer in zip(numbers, answers, strict=True):
                    yield from go_on(number, answer(runs[number]))
        if failures:
            raise failures[0]
        return [ended[number] for number in range(len(runs))]

    def _groups(self, waiting: Mapping[int, Request]) -> list[tuple[Hashable, list[int]]]:
        """The runs that are furthest behind, by the kind of work they ask for, at most `most` clients together."""
        behind = min(request.round for request in waiting.values())
        kinds: dict[Hashable, list[list[int]]] = {}
        room: dict[Hashable, int] = {}
        for number, request in waiting.items():
            if request.round != behind:
                continue
            kind, clients = _kind(request), request.cohort.size if isinstance(request, Call) else 0
            groups = kinds.setdefault(kind, [])
            if not groups or clients > room[kind]:
                groups.append([])
                room[kind] = self.most
            groups[-1].append(number)
            room[kind] -= clients
        return [(kind, group) for kind, groups in kinds.items() for group in groups]

    def _answers(self, kind: Hashable, requests: list[Request]) -> list[Callable[[Course[T]], Step]]:
        """What each run goes on with: its answer, or the error that its work raised."""
        first = requests[0]
        if isinstance(first, Settle):
            first.compute()
            return [partial(_answer, len(requests))] * len(requests)
        calls = [request for request in requests if isinstance(request, Call)]
        if len(calls) > 1 and kind not in self.apart:
            try:
                poisoned = _together(calls, poison=True) if kind not in self._tried else None
                answers = _together(calls)
                if poisoned is not None and _spread_of_nan(answers[1:]) != _spread_of_nan(poisoned[1:]):
                    raise CoterieError("clients read what was sent to clients of another run.")
                self._tried.add(kind)
            except Exception as reason:
                self.apart[kind] = reason
            else:
                self.joined += len(calls)
                return [partial(_answer, answer) for answer in answers]
        if all(call.method == calls[0].method for call in calls):
            return [_done_or_failed(call) for call in calls]
        found: dict[int, Callable[[Course[T]], Step]] = {}  # the seeds of each method may still fit
        for method in dict.fromkeys(call.method for call in calls):
            places = [place for place, call in enumerate(calls) if call.method == method]
            parts = self._answers((kind, method), [calls[place] for place in places])
            found |= dict(zip(places, parts, strict=True))
        return [found[place] for place in range(len(calls))]


def _answer(answer: Any, course: Course[T]) -> Step:
    return partial(course.send, answer)


def _failure(reason: Exception, course: Course[T]) -> Step:
    return partial(course.throw, reason)


def _done_or_failed(call: Call) -> Callable[[Course[T]], Step]:
    try:
        return partial(_answer, call.compute())
    except Exception as reason:
        return partial(_failure, reason)


# -- which work fits together -----------------------------------------------------------------------------------------


@cache
def kin(method: Hashable) -> Hashable:
    """Methods with the same kin differ in the aggregator, the server's optimizer and in numbers at most, and train the
    same module; their clients train with the same options."""
    assert isinstance(method, Method)
    cls: Any = type(method)
    free = {"aggregator", "training", *(_numbers(cls) if cls.wrap is Method.wrap else ())}
    kept = ((f.name, getattr(method, f.name)) for f in fields(method))
    local = tuple((name, value) for name, value in method.training if name != "server")
    return (cls, local, *((name, value) for name, value in kept if name not in free or value is None))


@cache
def _numbers(cls: type[Method]) -> frozenset[str]:
    """The options that are numbers, not counts."""
    return frozenset(name for name, hint in options(cls).items() if float in (hint, *get_args(hint)))


def _kind(request: Request) -> Hashable:
    """Requests of one kind can be computed together."""
    if isinstance(request, Settle):
        return request
    cohort = request.cohort
    if request.method.moves:
        return id(cohort)  # each run stands on a backbone of its own, of which an engine has one at a time
    shapes = tuple(
        (type(record), *((n, t.shape[1:], t.dtype) for n, t in record.tensors().items())) for record in request.records
    )
    return request.function, kin(request.method), id(cohort.engine), cohort.members.alike, shapes


# -- one cohort of several runs ---------------------------------------------------------------------------------------


def _together(calls: Sequence[Call], poison: bool = False) -> list[Any]:
    """The answers of several calls of one kind, computed as one; `poison` makes the first one's inputs NaN."""
    method, values = _common(calls)
    cohort = Joined([call.cohort for call in calls], method, values)
    pairs = list(zip(*(call.records for call in calls), strict=True))
    if poison:
        pairs = [(parts[0].map(_poisoned), *parts[1:]) for parts in pairs]
    inputs = [type(parts[0]).of(records.concatenate([part.tensors() for part in parts])) for parts in pairs]
    out = calls[0].function(method, cohort, *inputs)
    answers, first = [], 0
    for call in calls:
        where = slice(first, first + call.cohort.size)
        call.cohort.spent, call.cohort.left = cohort.spent[where], _cut(cohort.left, where)
        if not poison:
            call.cohort.memory = _cut(cohort.memory, where)
        answers.append(_cut(out, where))
        first = where.stop
    return answers


def _common(calls: Sequence[Call]) -> tuple[Method, dict[str, Tensor]]:
    """The method with `Varying` in place of what differs, and the numbers that differ, one a client `[C]`."""
    first = calls[0].method
    if all(call.method == first for call in calls[1:]):
        return first, {}
    names = [f.name for f in fields(first) if f.name != "training"]  # for kin they differ at the server alone
    differ = [n for n in names if any(getattr(call.method, n) != getattr(first, n) for call in calls[1:])]
    sizes = torch.tensor([call.cohort.size for call in calls])
    numbers = {n: [float(getattr(call.method, n)) for call in calls] for n in differ if n != "aggregator"}
    values = {n: torch.tensor(each, dtype=torch.float64).repeat_interleave(sizes) for n, each in numbers.items()}
    changed: dict[str, Any] = {n: Varying(n) for n in differ}
    return replace(first, **changed), values


def _cut(value: Any, where: slice) -> Any:
    """One run's clients out of everything that has the clients as first axis."""
    if isinstance(value, Record | Upload):
        return type(value).of({name: t[where] for name, t in value.tensors().items()})
    if isinstance(value, dict):
        return {name: _cut(inner, where) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cut(inner, where) for inner in value)
    return None if value is None else value[where]


def _poisoned(t: Tensor) -> Tensor:
    return torch.full_like(t, torch.nan) if t.is_floating_point() else t


def _spread_of_nan(value: Any) -> list[int]:
    """How many numbers of each tensor are not numbers."""
    if isinstance(value, Record | Upload):
        return _spread_of_nan(value.tensors())
    if isinstance(value, dict | tuple | list):
        return [n for inner in (value.values() if isinstance(value, dict) else value) for n in _spread_of_nan(inner)]
    return [int(value.isnan().sum())] if isinstance(value, Tensor) else []


class Varying:
    """Stands for an option whose value differs between joined runs. Whatever is done with it raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Varying):
            return self.name == other.name
        self._refuse()

    def _refuse(self, *given: Any, **options: Any) -> NoReturn:
        raise CoterieError(f"'{self.name}' differs between runs that are computed together.")

    __bool__ = __float__ = __int__ = __index__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise CoterieError("an option that differs between runs that are computed together cannot meet a tensor.")


@dataclass(frozen=True)
class _WithOwnValues:
    """A function of the method, written for one client, that finds the client's own values in `given`."""

    function: Callable[..., Any]
    method: Method
    names: tuple[str, ...]

    def __call__(self, *inputs: Any) -> Any:
        given = inputs[-1].__dict__
        mine = replace(self.method, **{name: given[f"method.{name}"] for name in self.names})
        return self.function(mine, *inputs)


class Joined(Cohort):
    """The clients of several runs as one cohort: seeds, initial rows and differing values are each client's own."""

    def __init__(self, cohorts: Sequence[Cohort], method: Method, values: Mapping[str, Tensor]) -> None:
        super().__init__(cohorts[0].engine, Members.together([cohort.members for cohort in cohorts]))
        if cohorts[0].memory is not None:
            self.memory = records.concatenate([cohort.memory or {} for cohort in cohorts])
        self._method = method
        self._values = {name: t.to(self.engine.device) for name, t in values.items()}

    # What follows hands each client its own values, where functions of the method are written for one client.

    def total(self, fn: Any, rows: Tensor, given: GivenLike = None, *more: Any, **others: Any) -> Any:
        return super().total(self._own(fn), rows, self._with_values(given), *more, **others)

    def grad(self, rows: Tensor, given: GivenLike = None, objective: Any = None, *more: Any, **others: Any) -> Tensor:
        return super().grad(rows, self._with_values(given), self._own(objective), *more, **others)

    def train_watched(
        self, rows: Tensor, given: GivenLike = None, *, lr: Any = None, correct: Any = None, objective: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        return super().train_watched(
            rows, self._with_values(given), lr=self._rate(lr), correct=self._own(correct),
            objective=self._own(objective), **others,
        )

    def loop(self, step: Any, state: Any, given: GivenLike = None, *, lr: Any = None, **others: Any) -> Any:
        return super().loop(self._own(step), state, self._with_values(given), lr=self._rate(lr), **others)

    def _own(self, function: Any) -> Any:
        bound = getattr(function, "__self__", None) is self._method and self._values
        return _WithOwnValues(function.__func__, self._method, tuple(self._values)) if bound else function

    def _with_values(self, given: GivenLike) -> GivenLike:
        if not self._values:
            return given
        dtype = self.engine.dtype
        named = given.tensors() if isinstance(given, Record) else dict(given or {})
        return {**named, **{f"method.{name}": t.to(dtype) for name, t in self._values.items()}}

    def _rate(self, lr: Any) -> Any:
        return self._values[lr.name] if isinstance(lr, Varying) else lr
