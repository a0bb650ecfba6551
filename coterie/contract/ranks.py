"""Unequal ranks: of an adapter's R ranks each client has so many as it can bear.

Rank j is row j of A and column j of B, in every layer that has as many. A client whose rows hold zeros in both trains
none of it: the gradient of the one is a product with the other. So a padded row, which lies in a stack like any other,
trains as the smaller adapter would, and of it the columns of the client's own ranks travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.contract import sent
from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads, enrol
from coterie.contract.records import Each, Model, Record, Upload
from coterie.errors import CoterieError
from coterie.options import pieces, require_few

ALL = "all"


# -- words on columns --------------------------------------------------------------------------------------------------


def numbers(layout: Layout) -> Tensor:
    """`[D]`: which rank of its adapter each column belongs to, from 0; -1 for columns of no adapter."""
    found = torch.full((layout.size,), -1)
    for pair in layout.pairs:
        for entry, axis in ((pair.a, 0), (pair.b, 1)):
            along = [pair.rank if dim == axis else 1 for dim in range(len(entry.shape))]
            each = torch.arange(pair.rank).view(along).expand(entry.shape)
            found[entry.start : entry.stop] = each.flatten()
    return found


def within(rank: Tensor, layout: Layout) -> Tensor:
    """`[C, 1] -> [C, D]`: the columns that clients of these ranks have; whatever is no adapter's, all have."""
    return numbers(layout).to(rank.device) < rank


def among(modules: Tensor, layout: Layout) -> Tensor:
    """`[C, R] -> [C, D]`: the columns of the ranks that are 1 in `modules`, and whatever is no adapter's."""
    return torch.cat([torch.ones_like(modules[:, :1]), modules], 1)[:, numbers(layout).to(modules.device) + 1] > 0


# -- who has which -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranked(Method):
    """Methods on low-rank adapters in which clients may have ranks of their own."""

    ranks: str = "1/4+1/2+all"
    """The ranks that clients have, joined by `+`: whole numbers, shares of the adapter's rank such as 1/2, or `all` of
    it. One that stands twice is twice as frequent."""
    dealt: Literal["drawn", "inturn"] = "drawn"
    """How clients come by them: each draws one evenly, from the run's seed and its own name; or, for ranks that are
    given client by client, client 0 has the first, client 1 the second, and so on, and over again."""

    adapters = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_few(pieces(self.ranks, "+"), f"{self.name}'s ranks")
        if not self.ranks.strip("+ "):
            raise CoterieError(f"{self.name}'s ranks names none; write ranks=2+4+8, or ranks=all for equal ones.")
        for piece in pieces(self.ranks, "+"):
            self._rank(piece, 1)

    @property
    def unequal(self) -> bool:
        """Whether clients have ranks of their own."""
        return self.ranks != ALL

    def check(self, population: int, layout: Layout) -> None:
        self.refuse_unpaired(layout)
        most = layout.rank
        for rank in self.choice(layout):
            if rank > most:
                raise CoterieError(f"{self.name}'s ranks={self.ranks} names rank {rank}, and the model's adapters have "
                                   f"rank {most}; give smaller ones, or adapters of that rank: "
                                   f"--adapter lora:rank={rank}.")

    def choice(self, layout: Layout) -> list[int]:
        """The ranks that are drawn from or dealt."""
        return [self._rank(piece, layout.rank) for piece in pieces(self.ranks, "+")]

    def _rank(self, piece: str, most: int) -> int:
        """A rank from its spelling, where the adapter's is `most`; part of a rank counts as a whole one."""
        try:
            share = Fraction(1) if piece == ALL else Fraction(piece)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        whole = "/" not in piece and piece != ALL
        if share <= 0 or (whole and share.denominator > 1) or (not whole and share > 1):
            raise CoterieError(f"{self.name}'s ranks={self.ranks} holds '{piece}'; a rank is a whole number from 1 on, "
                               "a share of the adapter's, such as 1/2, or all: ranks=2+4+8.")
        return int(share) if whole else ceil(share * most)

    def rank_of(self, cohort: Cohort) -> Tensor:
        """r_i `[C, 1]`, the same in every round; a newcomer knows its own as everybody does."""
        choice = torch.tensor(self.choice(cohort.layout), device=cohort.ids.device)
        if self.dealt == "inturn":
            return choice[cohort.ids % len(choice)][:, None]
        return choice[(cohort.chance("rank", once=True) * len(choice)).long()]


@dataclass(frozen=True)
class Cut(Model):
    """A model `row [D]` and clients' ranks: of all `[M, 1]` at the server, of the receiver `[C, 1]` in a payload; none
    where ranks are equal."""

    rank: Tensor | None = None


@dataclass(frozen=True)
class Truncated(Ranked):
    """Methods in which a client of rank r_i gets, trains and sends the first r_i ranks, and the server knows its rank.

    A client tells its rank when it arrives, and with what it uploads, as that may have changed.
    """

    uploads = sent.fields(update=sent.Vectors(), rank=sent.Ranks())
    introduces = sent.fields(rank=sent.Ranks())
    down = up = "its ranks"

    def start(self, init: Init) -> Record:
        return Cut(init.row, torch.zeros(0, 1, dtype=torch.int64, device=init.row.device) if self.unequal else None)

    def introduce(self, cohort: Cohort, hello: Any) -> Upload:
        return Upload(rank=self.rank_of(cohort)) if self.unequal else Upload()

    def admit(self, server: Cut, ids: Tensor, introductions: Any) -> Cut:
        return server if server.rank is None else replace(server, rank=enrol(server.rank, ids, introductions.rank))

    def send(self, server: Cut, ids: Tensor) -> Cut:
        if server.rank is None:
            return server
        return replace(server, rank=Each(server.rank[ids]))  # type: ignore[arg-type]

    def local(self, cohort: Cohort, payload: Cut, mine: Record) -> tuple[Upload, Record]:
        if payload.rank is None:
            return super().local(cohort, payload, mine)
        begun = self.deploy(cohort, payload, mine)
        return Upload(update=self.train(cohort, begun) - begun, rank=payload.rank), mine

    def deploy(self, cohort: Cohort, payload: Cut, mine: Record) -> Tensor:
        return payload.row if payload.rank is None else torch.where(within(payload.rank, cohort.layout), payload.row, 0)

    def columns(self, tensors: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
        return within(tensors["rank"], layout) if "rank" in tensors else None

    def report(self, server: Cut, up: Uploads) -> dict[str, Tensor]:
        """How many clients have each rank, from 0 on."""
        if server.rank is None:
            return {}
        most = up.layout.rank
        return {"clients_per_rank": torch.bincount(server.rank[:, 0].clamp(max=most), minlength=most + 1)}

    # -- words for `merge` -----------------------------------------------------------------------------------------

    def held(self, up: Uploads) -> Tensor:
        """The ranks `[m, 1]` of the participants."""
        if self.unequal:
            return up.rank
        return torch.full((len(up.update), 1), up.layout.rank, device=up.update.device)

    def padded(self, server: Cut, up: Uploads, updates: Tensor) -> Tensor:
        """`[m, D]`: the participants' models after these updates, with zeros in the ranks that they have not."""
        return torch.where(within(self.held(up), up.layout), server.row, 0) + updates

    def moved(self, server: Cut, up: Uploads) -> Tensor:
        """`[m, D]`: from the server's model to the padded ones; nowhere in ranks that no participant has."""
        mine = within(self.held(up), up.layout)
        return torch.where(mine, up.update, torch.where(mine.any(0), -server.row, 0))
