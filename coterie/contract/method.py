"""The contract: a personalized-learning method is a handful of small pure functions on rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from coterie.contract import sent
from coterie.contract.aggregator import Aggregator
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.local import LocalOptions
from coterie.contract.mean import Mean
from coterie.contract.records import Model, Models, Nothing, Record, Upload
from coterie.errors import CoterieError, unknown
from coterie.options import require_ranges

Trained = TypeVar("Trained", bound=LocalOptions)


@dataclass(frozen=True)
class Uploads:
    """What `merge` sees: the participants' uploads stacked over clients, `up.update [m, ...]`, and who sent them."""

    tensors: Mapping[str, Tensor]
    ids: Tensor  # [m] client numbers
    n: Tensor  # [m] training samples, or tokens; with a robust aggregator alike for all, see `Server.weighed`
    share: Tensor  # [m] n / sum of n over the participants, float64
    population: int  # M, clients admitted so far
    round: int
    layout: Layout

    @property
    def even(self) -> Tensor:
        """`[m]`: 1 / m, for methods in which clients count alike."""
        return torch.full_like(self.share, 1 / len(self.share))

    @property
    def finite(self) -> Tensor:
        """`[m]`: whose uploads hold finite numbers alone; one that diverged would spread by sums, even at weight 0."""
        told = [t.flatten(1) for t in self.tensors.values() if t.is_floating_point() and t.shape[1:].numel()]
        return torch.stack([torch.isfinite(t).all(1) for t in told]).all(0)

    @property
    def learned(self) -> Tensor:
        """The `update` `[m, ...]`, with 0 for those who sent a number that is not finite."""
        update = self.tensors["update"]
        return torch.where(self.finite.view(-1, *[1] * (update.ndim - 1)), update, 0)

    def of(self, members: Tensor) -> Uploads:
        """The uploads of some of the participants, by a mask `[m]`, whose shares are of what these have."""
        share, tensors = self.share[members], {name: t[members] for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, ids=self.ids[members], n=self.n[members], share=share / share.sum())

    def share_in(self, cluster: Tensor, clusters: int, weighted: bool = True) -> Tensor:
        """`[m] -> [m, K]`: n_i / n_k (1 / m_k unless `weighted`) for client i of cluster k, and 0 in other clusters."""
        member = torch.nn.functional.one_hot(cluster, clusters).double()
        mass = member * self.n[:, None] if weighted else member
        return mass / mass.sum(0).clamp(min=1)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["tensors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"the uploads hold {sorted(self.__dict__.get('tensors', {}))}, not '{name}'") from None


class Pooled(Uploads):
    """With privacy on, what `merge` sees: the clients' noisy mean as the upload `[1, ...]` of nobody in particular."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("ids", "n"):
            raise CoterieError(f"its server asks for the clients' {name}, and only their mean is known.")
        return super().__getattribute__(name)


@dataclass(frozen=True)
class Method:
    """Base of every method. Subclasses are frozen dataclasses of hyperparameters in files of `coterie/methods`.

    A method holds no loop, no evaluator, no device code and no file access. The server calls `start`, `hello`,
    `admit`, `send` and `merge`; the client calls `introduce`, `join`, `local` and `deploy`, with all clients of a
    cohort at once (first axis `C`). Unless a method says otherwise there is one model: clients receive it, `train` it,
    upload how it moved, and use it as received. Only `merge` must be written.
    """

    aggregator: Aggregator = field(default_factory=Mean, kw_only=True)
    """How the server averages what clients send; chosen behind a plus, as in `fedavg+confree`."""
    validation: bool = field(default=True, kw_only=True)
    """Whether clients keep a validation split; released programs do not."""
    printed: str = field(default="", kw_only=True)
    """The stage that the paper's table printed, named by presets that reproduce its program."""
    training: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True, metadata={"option": False})
    """Training options that it has of its own, name and value; spelled among its options, as in `fedper:lr=0.1`."""

    name: ClassVar[str]
    family: ClassVar[str] = "other"
    shared: ClassVar[str] = ""
    keeps: ClassVar[str] = "nothing"
    down: ClassVar[str] = "1"
    up: ClassVar[str] = "1"
    newcomer: ClassVar[str] = ""
    cite: ClassVar[str] = ""
    uploads: ClassVar[Mapping[str, sent.Values]] = sent.fields(update=sent.Vectors())
    """What the tensors of an `Upload` may hold, by name, see `contract.sent`; one that is not named: finite numbers."""
    introduces: ClassVar[Mapping[str, sent.Values]] = sent.fields()
    """The same of what `introduce` returns."""
    averages: ClassVar[bool] = True
    """Whether an aggregator other than the mean can be plugged in."""
    products: ClassVar[bool] = False
    """Whether its server averages products of factors, with which aggregators that combine directions of whole rows do
    not go together."""
    running_mean: ClassVar[bool] = False
    """Whether its server adds clients' moves up to a mean over all clients, which an aggregator has to keep; a robust
    one does by `follow`."""
    soft: ClassVar[bool] = False
    """Whether a client counts in several models at once, by its shares in them, which an aggregator has to keep to."""
    adapters: ClassVar[bool] = False
    """Whether it works on the factors of low-rank adapters, and so on adapted models alone."""
    moves: ClassVar[bool] = False
    """Whether its server moves the backbone, so that clients compute over frozen weights with R added; see `moving`."""
    per_token: ClassVar[bool] = True
    """Whether it takes data in which each token has a class; what looks at the features or the class of a whole sample
    does not."""
    period: ClassVar[int] = 1
    """After how many rounds clients upload tensors of the same shapes again."""
    unprotected: ClassVar[str] = ""
    """What its server takes from clients that goes through no aggregator, and what one client can do with it."""
    private: ClassVar[str] = ""
    """The spelling of a variant that uploads updates alone, where the method itself uploads more."""
    presets: ClassVar[tuple[str, ...]] = ()
    """Class methods that build a named variant, e.g. `official`: the program its authors released; not inherited."""
    hook: ClassVar[str] = ""
    """What the method does to gradients, and what that means where the optimizer is not plain SGD."""
    by_model: ClassVar[str] = ""
    """The name under which `report` says how much each of the few models was used in the round, `[K]`."""
    rates: ClassVar[tuple[str, ...]] = ()
    """Options that are learning rates of its own: given, they are the same in every round, whatever the schedule."""
    steps_itself: ClassVar[str] = ""
    """Why a server optimizer has no place in a method that averages: a clause with a verb."""
    FORMER: ClassVar[tuple[tuple[str, str], ...]] = ()
    """What options were called, and are now, or `name=text` with `{}` for the value; both are read."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        if "presets" not in cls.__dict__:
            cls.presets = ()  # a variant of a method is none of those that are made of it

    def __post_init__(self) -> None:
        require_ranges(self)

    # -- server ----------------------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module) -> nn.Module:
        """The user's module with the parts this method adds; how it predicts is its `forward`."""
        return module

    def start(self, init: Init) -> Record:
        """Fresh rows -> server state; by default one model."""
        return Model(init.row)

    def hello(self, server: Any) -> Record:
        """What a client is told at first contact, before it introduces itself."""
        return Nothing()

    def admit(self, server: Any, ids: Tensor, introductions: Any) -> Any:
        """Clients arrive -> server state; for unseen clients it acts on a copy that is thrown away."""
        return server

    def send(self, server: Any, ids: Tensor) -> Any:
        """Server state -> payload; by default the whole state, alike for every client."""
        return server

    def merge(self, server: Any, up: Uploads) -> Record:
        """Uploads of the participants -> new server state."""
        raise NotImplementedError

    def turn(self, t: int) -> int:
        """A round in which clients upload tensors of the same names and shapes as in round t; see `period`."""
        return t % self.period

    # -- client ----------------------------------------------------------------------------------------------------

    def introduce(self, cohort: Cohort, hello: Any) -> Upload:
        """First contact -> small tensors that leave the client once."""
        return Upload()

    def join(self, cohort: Cohort, payload: Any) -> Record:
        """After admission -> the client's own state `[C, ...]`."""
        return Nothing()

    def local(self, cohort: Cohort, payload: Any, mine: Any) -> tuple[Upload, Record]:
        """One round of a client -> what it uploads and its new own state; by default how `train` moved the row."""
        return Upload(update=self.train(cohort, payload.row) - payload.row), mine

    def train(self, cohort: Cohort, rows: Tensor) -> Tensor:
        """How a client trains the rows it received, `[C, D] -> [C, D]`; by default SGD on its loss."""
        return cohort.train(rows)

    def deploy(self, cohort: Cohort, payload: Any, mine: Any) -> Tensor:
        """The row this client uses `[C, D]`; by default the one it received."""
        row: Tensor = payload.row
        return row

    # -- words every method has ------------------------------------------------------------------------------------

    def only_plain(self) -> str:
        """Why clients can take no steps but plain SGD's, `row - lr * gradient`; empty where any optimizer will do."""
        return ""

    def check(self, population: int, layout: Layout) -> None:
        """Raise a CoterieError before the first round if this method cannot run with these clients or this model."""

    def training_in(self, run: Trained) -> Trained:
        """The training options it has in a run: the run's, with its own in their place; own epochs replace steps."""
        own = dict(self.training)
        for name in own:
            if name not in (known := [f.name for f in fields(LocalOptions)]):
                raise unknown(f"training option of {self.name} alone", name, known)
        if "epochs" in own:
            own.setdefault("steps", None)
        try:
            return replace(run, **own) if own else run
        except CoterieError as reason:
            raise CoterieError(f"{self.name}: {reason}") from reason

    @property
    def unsteppable(self) -> str:
        """Why no server optimizer may step its models, a clause; empty where one may."""
        return self.steps_itself if self.averages else "it averages nothing"

    def averaged(self, server: Any, layout: Layout) -> dict[str, Layout]:
        """The fields of the server's state that are averaged models, `[d]` or `[K, d]`, and what their columns are.

        A server optimizer steps these. By default it is the model, or the models, by the state's type.
        """
        return {"row": layout} if isinstance(server, Model) else {"rows": layout} if isinstance(server, Models) else {}

    def travels(self) -> str:
        """The part of a row that the tensors hold which server and clients exchange, unless they hold whole rows."""
        return "all"

    def columns(self, tensors: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
        """Of whole rows among a payload's or an upload's `tensors [C, ...]`, the columns that travel, `[C, D]`; by
        default all, which is None. What does not travel is filled in by whoever receives the row."""
        return None

    def refuse_frozen(self, layout: Layout, part: str, does: str) -> None:
        """Raise if nothing trains in a part of the model that the method `does` something with; for `check`."""
        if layout.is_frozen(part):
            raise CoterieError(
                f"what {self.name} {does} ({part.removeprefix('~~')}) is frozen; let some of it train, or take another "
                "method: fedavg shares, and local keeps, whatever trains."
            )

    def refuse_unpaired(self, layout: Layout) -> None:
        """Raise if the model has no low-rank adapters whose factors train; for `check` of methods on `adapters`."""
        if not layout.pairs:
            raise CoterieError(f"{self.name} works on the two factors of low-rank adapters, and this model has none "
                               "that train; give it some, e.g. --adapter lora:rank=8.")

    def report(self, server: Any, up: Uploads) -> dict[str, Tensor]:
        """Numbers worth recording each round (before `merge`), e.g. an objective or a cluster's size."""
        return {}

    def fallback(self, server: Any, init: Init, report: Mapping[str, Any]) -> Tensor:
        """The row `[D]` of a newcomer that brings no labels, so that nothing can be chosen or trained for it.

        By default it is the server's whole model, the first of several. `report` are the last round's numbers.
        """
        rows = self.whole(server, init.layout)
        if rows is None:
            raise CoterieError(
                f"{self.name} does not say what a newcomer without labels gets: its server keeps no whole model (a "
                "Model or Models), so it has to write `fallback`."
            )
        return rows[0]

    def whole(self, server: Any, layout: Layout) -> Tensor | None:
        """The whole models that the server keeps, `[K, D]`, by its state's type; None where it keeps parts, or none."""
        rows = server.row[None] if isinstance(server, Model) else server.rows if isinstance(server, Models) else None
        return rows if rows is not None and rows.shape[1] == layout.size else None

    def residual(self, server: Any) -> Tensor | None:
        """What a server that moves the backbone adds to frozen weights of adapted layers, `[S, 1]`; see `ground`."""
        return None

    def clusters(self, server: Any) -> Tensor | None:
        """The cluster of every client `[M]`, where each is in one; the few models are theirs, in the same order."""
        return None

    def few(self, server: Any) -> Tensor | None:
        """The few models `[K, D]` that clients choose from or mix, where the method has such; read by the report."""
        return None

    def uses(self, server: Any, up: Uploads) -> dict[str, Tensor]:
        """How much each participant uses each of the few models, `w [m, K]` with rows that sum to 1, and, where clients
        count unequally, their `alpha [m]`; recorded in rounds that are evaluated."""
        return {}

    def aggregate(self, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """`[m, d], [m] -> [d]`: the update the server applies; model by model for weights `[m, K]`, with the same
        updates `[m, d]` for all K models or their own `[m, K, d]`, `-> [K, d]`.

        The weights' sum is the mass: the result is mass * aggregator(updates, weights / mass). Clients of weight 0 are
        absent; mass 0 gives 0. Buffers are not directions: whatever the mass, running statistics take the weighted
        mean and counters the maximum, over the clients that a robust aggregator keeps. With privacy on they stay as
        they are, and so do parameters that are not trained.
        """
        if weights.ndim == 1:
            return aggregate(self.aggregator, updates, weights, layout)
        own = updates.unbind(1) if updates.ndim == 3 else [updates] * weights.shape[1]
        return torch.stack([self.aggregate(u, w, layout) for u, w in zip(own, weights.unbind(1), strict=True)])

    def kept(self, *values: Tensor) -> Tensor:
        """`[m]`: the clients of whom a robust aggregator keeps all these `values [m, ...]`; everybody, for others."""
        even = values[0].new_full((len(values[0]),), 1 / len(values[0]))
        return torch.stack([self.aggregator.keeps(value.flatten(1), even) for value in values]).all(0)

    def drawn_in(self, values: Tensor) -> Tensor:
        """`[m, d] -> [m, d]`: with a robust aggregator none further from what it makes of all than the median one of
        those that it keeps, and NaN for the others; as they are without one. For values that are used one by one: whom
        it keeps may lie FAR times as far off."""
        kept = self.kept(values)
        if not (self.aggregator.robust and kept.any()):
            return values
        even = values.new_full((len(values),), 1 / len(values))
        centre = self.aggregator.aggregate(values, even, Layout.flat(values.shape[1]))
        far = torch.linalg.vector_norm(values - centre, dim=1, keepdim=True)
        nearer: Tensor = (far[kept].median() / far.clamp(min=1e-30)).clamp(max=1)
        return torch.where(kept[:, None], centre + (values - centre) * nearer, torch.nan)

    def follow(self, held: Tensor, values: Tensor, up: Uploads) -> Tensor:
        """`[d], [m, d] -> [d]`: held + (m / M) (mean of the kept values - held), for a robust aggregator.

        For a mean over all M clients that the server holds, of which m come with new values. The sum of their changes
        would stay that mean only if nobody were ever left out.
        """
        kept = values[self.kept(values)]
        return held + len(values) / up.population * (kept.mean(0) - held) if len(kept) else held

    def class_sums(self, sums: Tensor, counts: Tensor, up: Uploads) -> tuple[Tensor, Tensor]:
        """`[m, classes, d], [m, classes] -> [classes, d], [classes]`: sums over clients, and the samples behind them.

        With a robust aggregator, over clients whose means of all classes it keeps; none counts for more than n_i.
        """
        if self.aggregator.robust:
            kept = self.kept(sums / counts.clamp(min=1)[:, :, None]) & torch.isfinite(counts).all(1)
            excess = (counts.sum(1) / up.n).clamp(min=1)[kept].to(counts.dtype)
            sums, counts = sums[kept] / excess[:, None, None], counts[kept].clamp(min=0) / excess[:, None]
        return sums.sum(0), counts.sum(0)

    def recentre(self, rows: Tensor, theta: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """`[K, d], [m, d], [m, K] -> [K, d]`: model k moves to sum_i w_ik theta_i; it stays where its weights are 0."""
        moved = [old + self.aggregate(theta - old, w, layout) for old, w in zip(rows, weights.unbind(1), strict=True)]
        return torch.stack(moved)


# -- words on rows and tables ------------------------------------------------------------------------------------------


def aggregate(aggregator: Aggregator, updates: Tensor, weights: Tensor, layout: Layout) -> Tensor:
    """One model's update from `updates [m, d]` and `weights [m]`, see `Method.aggregate`."""
    mass, kept = weights.sum(), weights > 0
    updates = torch.where(kept[:, None], updates, 0)  # 0 times a diverged client's NaN would not be 0
    if isinstance(aggregator, Mean):  # the mean needs no filtering, and so no answer from the device
        out = weights.to(updates.dtype) @ updates
    elif not kept.any():
        return torch.zeros_like(updates[0])
    else:
        mass, kept = weights[kept].sum(), kept & _there(aggregator, updates, kept)
        if not kept.any():
            return torch.zeros_like(updates[0])
        updates, weights = updates[kept], weights[kept]
        weights = weights * (mass / weights.sum())
        directions = layout.cut(updates, "parameters")
        move = aggregator.aggregate(directions, (weights / mass).to(updates.dtype), layout.only("parameters"))
        out = layout.put(torch.zeros_like(updates[0]), "parameters", mass.to(updates.dtype) * move)
    if aggregator.private:
        for entry in layout.entries:
            if entry.kind != "parameter" or not entry.trainable:
                out[entry.start : entry.stop] = 0  # nobody sends anything there, and noise would do harm
        return out
    buffers = [entry for entry in layout.entries if entry.kind != "parameter"]
    parts = (weights / torch.where(mass > 0, mass, 1)).to(updates.dtype) if buffers else weights
    if buffers and aggregator.robust:
        kept = _ordinary(aggregator, updates, parts, layout)
        updates, parts = updates[kept], parts[kept] / parts[kept].sum()
    for entry in buffers if len(updates) else []:
        columns = slice(entry.start, entry.stop)
        out[columns] = updates[:, columns].amax(0) if entry.kind == "counter" else parts @ updates[:, columns]
    return out


def _there(aggregator: Aggregator, updates: Tensor, kept: Tensor) -> Tensor:
    """`[m]`: who counts, for a robust aggregator: clients whose updates are finite, where these are enough for it.

    It can bear a few others, but in a model of few takers they may be too many.
    """
    there = torch.isfinite(updates).all(1) | (not aggregator.robust)
    count = int((there & kept).sum())
    return there if count == 0 or count >= aggregator.minimum else torch.ones_like(there)


def _ordinary(aggregator: Aggregator, updates: Tensor, parts: Tensor, layout: Layout) -> Tensor:
    """`[m]`: whose parameters and running statistics a robust aggregator keeps.

    Statistics are averaged over these clients and do not go through the aggregator: it need not keep a variance
    positive. Where nobody is kept they stay as they are.
    """
    kept = torch.isfinite(updates).all(1)
    for kind in ("parameter", "statistic"):
        found = [updates[:, entry.start : entry.stop] for entry in layout.entries if entry.kind == kind]
        kept = kept & aggregator.keeps(torch.cat(found, 1), parts) if found else kept
    return kept


def enrol(table: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """A server table `[M, ...]` with `values [m, ...]` written at the clients' numbers, grown where they are new."""
    size = max(len(table), int(ids.max()) + 1 if len(ids) else 0)
    grown = table.new_zeros(size, *values.shape[1:])
    grown[: len(table)] = table
    grown[ids] = values
    return grown


def pick(rows: Tensor, choice: Tensor) -> Tensor:
    """`rows [C, K, ...], choice [C] -> [C, ...]`: each client's chosen model."""
    return rows[torch.arange(len(rows), device=rows.device), choice]
