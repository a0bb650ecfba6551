"""The same methods on real machines, with Flower as the carrier. Importing this package alone does not need flwr."""

from __future__ import annotations

from coterie.errors import CoterieError

INSTALL = "pip install 'coterie[flower]'"


def missing(package: str) -> CoterieError:
    """The error for an optional package that is not installed."""
    return CoterieError(f"this needs the package {package}, which is not installed; run: {INSTALL}")
