"""Parts as Flower's records: one ArrayRecord with a named array for each tensor, one ConfigRecord with the json."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from coterie.errors import CoterieError
from coterie.flower import wire
from coterie.flower.wire import Parcel

ARRAYS, HEADER = "arrays", "header"


class Encoder:
    """Encodes the messages of one round; a tensor that goes to several sites is encoded once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Tensor, Array]] = {}  # the tensor is held, so that its id stays its own

    def records(self, parcels: Sequence[Parcel]) -> RecordDict:
        tensors, text = wire.pack(parcels)
        arrays = {name: self._array(t) for name, t in tensors.items()}
        return RecordDict({ARRAYS: ArrayRecord(arrays), HEADER: ConfigRecord({"parts": text})})

    def _array(self, t: Tensor) -> Array:
        if id(t) not in self._done:
            self._done[id(t)] = (t, Array(t.detach().cpu().contiguous().numpy()))
        return self._done[id(t)][1]


def parcels_of(content: RecordDict) -> list[Parcel]:
    """The parcels of a message that arrived."""
    try:
        arrays, text = content.array_records[ARRAYS], content.config_records[HEADER]["parts"]
        tensors = {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}
    except (KeyError, TypeError, ValueError) as reason:
        raise CoterieError(f"the message is not one of coterie's ({reason}).") from reason
    return wire.unpack(tensors, str(text))
