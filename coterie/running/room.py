"""What to try where a run ran out of memory."""

from __future__ import annotations

from coterie.engine import waves
from coterie.errors import NoMemory
from coterie.running.training import Training

FEWER = 16
"""A run that ran out of memory is told to compute so many times fewer clients at once, or samples."""


def refusal(training: Training, wave: int = 0, runs: int = 1) -> NoMemory:
    """The sentence for a run of so many clients at once (0: not known), or several runs in one stack, that ran out of
    memory: fewer clients at once, which computes the same; where there is but one, smaller batches, which do not.

    Nothing is tried out here: libraries that find no memory may wait for it for ever.
    """
    wave = wave or training.wave or waves.MOST
    together = ["together=off"] if runs > 1 else []
    if wave > 1 or together:
        settings = [*together, f"wave={max(1, wave // FEWER)}"]
        return NoMemory(f"memory ran out while {wave} clients were computed at once; {' and '.join(settings)} takes "
                        f"about {max(1, wave // FEWER) / wave:.0%} of that.", settings)
    if training.batch != 1:
        batch = max(1, (training.batch or 16 * FEWER) // FEWER)
        return NoMemory(f"memory ran out for one client at a time; a batch of {batch} takes less, and changes the "
                        "results.", [f"batch={batch}"], anew=True)
    return NoMemory("memory ran out for one client at a time and batches of one sample; it takes a smaller model, "
                    "fewer clients a round (participation) or more memory.")
