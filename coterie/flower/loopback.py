"""Sites in the server's own process: the same messages without a network, for tests and rehearsals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from coterie.flower import wire
from coterie.flower.exchange import Replies, answered
from coterie.flower.site import Site
from coterie.flower.wire import Failure, Parcel


class Loopback:
    """A transport to sites of this process. Everything is packed and unpacked as on a network."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.by_name = {site.name: site for site in sites}
        self.messages = 0

    def sites(self) -> set[str]:
        return set(self.by_name)

    def ask(
        self, messages: Mapping[str, Sequence[Parcel]], deadline: float, enough: Callable[[set[str]], bool]
    ) -> dict[str, Replies | Failure]:
        """All sites answer, one after another, until those who did are enough; `deadline` plays no part."""
        answers: dict[str, Replies | Failure] = {}
        for name, parcels in messages.items():
            self.messages += 1
            answers[name] = self.deliver(name, through(parcels))
            if enough(answered(answers)):
                break
        return answers

    def deliver(self, name: str, parcels: list[Parcel]) -> list[Parcel] | Failure:
        """One site's answer; a test overrides this to let things go wrong."""
        return through(self.by_name[name].answer(parcels))


def through(parcels: Sequence[Parcel]) -> list[Parcel]:
    """What arrives of parcels that were sent: the same values in memory of their own."""

    def copied(t: Tensor) -> Tensor:
        return torch.from_numpy(t.detach().cpu().contiguous().numpy().copy())

    tensors, text = wire.pack(parcels)
    return wire.unpack({name: copied(t) for name, t in tensors.items()}, text)
