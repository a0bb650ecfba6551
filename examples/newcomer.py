"""A client arrives after training: it gets its model, the model becomes a file, and the file predicts.

    python examples/newcomer.py [FOLDER]

The commands are what one would type. The last step needs PyTorch only, not coterie.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from coterie.data import digits


def coterie(*words: str | Path) -> None:
    print("$ coterie", *words, flush=True)
    subprocess.run([sys.executable, "-m", "coterie", *map(str, words)], check=True)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    x, y = digits()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
    x, y = x[order], y[order]
    small = y < 5

    # Eight clients: four have the digits 0 to 4, four have 5 to 9. The newcomer has 0 to 4.
    names = [f"{'small' if small[i] else 'large'}{i % 4}" for i in range(1400)]
    np.savez(folder / "clients.npz", x=x[:1400], y=y[:1400], client=names)
    rest = 1400 + small[1400:].nonzero().flatten()
    known, later = rest[:80], rest[80:]
    np.savez(folder / "newcomer.npz", x=x[known], y=y[known])

    coterie("run", "ifca:models=2", "--data", folder / "clients.npz", "--model", "mlp:hidden=32", "--rounds", "20",
            "--set", "lr=0.1", "--out", folder / "run")
    coterie("personalize", folder / "run", "--data", folder / "newcomer.npz", "--future", str(len(later)),
            "-o", folder / "newcomer.safetensors")
    coterie("export", folder / "newcomer.safetensors", "-o", folder / "newcomer.pt2", "--format", "torch-export")

    low, high = json.loads((folder / "newcomer.json").read_text())["estimate"]["interval"]
    network = torch.export.load(folder / "newcomer.pt2").module()
    with torch.no_grad():
        found = network(x[later]).argmax(1)
    accuracy = float((found == y[later]).float().mean())
    print(f"{len(later)} samples that came later: accuracy {accuracy:.3f}; {low:.3f} to {high:.3f} was expected")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "newcomer"))
