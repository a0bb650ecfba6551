"""MiniLM with adapters in its last block: a round with the outputs of the frozen blocks kept, and without.

    python benchmarks/pretrained.py
    python benchmarks/pretrained.py --backbone bfloat16

Needs the package that minilm's weights come in. Samples are random tokens, as time does not depend on which they are.
The two ways take turns, so that other work on the machine meets both; the ratio is that of their medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from coterie import models, registry
from coterie.data import Federation
from coterie.models.lora import adapted
from coterie.running.simulation import Simulation
from coterie.running.training import Training

WORDS, CLASSES = 30_522, 4
TARGETS = "blocks.5.q+blocks.5.v"


def federation(options: argparse.Namespace) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, WORDS, (options.clients * options.samples, options.length), generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    deal = torch.arange(len(x)).view(options.clients, -1).numpy()
    return Federation.from_assignment(x, y, list(deal), val=0.0, test=0.2, classes=CLASSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=40, help="of each client; a fifth is for testing")
    parser.add_argument("--length", type=int, default=24, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backbone", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    data = federation(options)
    build = adapted(models.model("minilm", (options.length,), CLASSES),
                    f"lora:rank=8,targets={TARGETS},backbone={options.backbone}")
    built, first = {}, {}
    for prefix in ("auto", "off"):
        training = Training(device=options.device, precision="float32", engine="stack", batch=options.batch,
                            prefix=prefix)  # type: ignore[arg-type]
        built[prefix] = Simulation(registry.method("fedavg"), build, data, training)
    print(f"{options.clients} clients, {options.samples} texts of {options.length} tokens each, batches of "
          f"{options.batch}, backbone in {options.backbone}, {torch.get_num_threads()} threads: "
          f"{built['off'].layout.size:,} numbers in a row", flush=True)
    took: dict[str, list[float]] = {prefix: [] for prefix in built}
    for number in range(options.rounds + 1):
        for prefix, sim in built.items():
            start = time.perf_counter()
            sim.round()
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if number:
                took[prefix].append(seconds)
            else:
                first[prefix] = seconds
    kept, off = (statistics.median(took[prefix]) for prefix in ("auto", "off"))
    apart = (built["auto"].server.state.row - built["off"].server.state.row).abs().max()  # type: ignore[attr-defined]
    print(f"first round (with the outputs computed) {first['auto']:.2f} s, off {first['off']:.2f} s")
    print(f"a round: outputs kept {kept:.3f} s, prefix=off {off:.3f} s; off / kept {off / kept:.1f}; rows apart at "
          f"most {apart:.1g}")


if __name__ == "__main__":
    main()
