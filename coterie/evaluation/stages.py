"""The stages a model is scored in: names with fixed meanings, in the order of every table.

`served` is what `deploy` gives before any training in the round; `adapted` is the same row after the run's local
epochs on the round's own training stream; `unseen_served` and `unseen_adapted` are both on clients kept out of
training. The test split is only looked at, the validation split chooses.
"""

from __future__ import annotations

STAGES = ("served", "adapted", "unseen_served", "unseen_adapted")
