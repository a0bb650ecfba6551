"""Data sources, partitions and the federation they make."""

from coterie.data.federation import SPLITS, Federation, label_distance
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
from coterie.data.sources import READERS, SOURCES, Source, digits, load, npz, spelled, textbook_clients

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
    "natural",
    "npz",
    "partition",
    "pathological",
    "permuted_groups",
    "rotated_groups",
    "spelled",
    "textbook_clients",
]
