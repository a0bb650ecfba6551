"""Data sources, partitions and the federation they make."""

from coterie.data.federation import Federation
from coterie.data.partition import (
    PARTITIONS,
    dirichlet,
    extended_dirichlet,
    iid,
    natural,
    partition,
    pathological,
    permuted_groups,
    rotated_groups,
)
from coterie.data.sources import READERS, SOURCES, Source, digits, load, load_as, npz, spelled, textbook_clients
from coterie.data.splits import SPLITS
from coterie.data.summary import label_distance

__all__ = [
    "PARTITIONS",
    "READERS",
    "SOURCES",
    "SPLITS",
    "Federation",
    "Source",
    "digits",
    "dirichlet",
    "extended_dirichlet",
    "iid",
    "label_distance",
    "load",
    "load_as",
    "natural",
    "npz",
    "partition",
    "pathological",
    "permuted_groups",
    "rotated_groups",
    "spelled",
    "textbook_clients",
]
