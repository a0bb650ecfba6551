"""Runs: one method on one federation, comparisons, run folders, and going on with what was stopped."""
