"""What tests that compute a method's rounds by hand have in common."""

import torch

from coterie import registry

MODELS = ["mlp", "dropout", "bn"]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def assert_close(found, expected, **tolerance):
    """Equal up to the rounding of float64, unless told otherwise."""
    torch.testing.assert_close(found, expected, **(EXACT | tolerance))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def rounds(sim, count):
    """The simulation after `count` more rounds."""
    for _ in range(count):
        sim.round()
    return sim


def adapter_for(method, alpha=1):
    """The `--adapter` with which a method can run: none, or one beside which everything else goes on training, unless
    the method adds to what is frozen."""
    chosen = registry.method(method) if isinstance(method, str) else method
    base = "frozen" if chosen.moves else "trains"
    return f"lora:rank=2,alpha={alpha},base={base}" if chosen.adapters else ""
