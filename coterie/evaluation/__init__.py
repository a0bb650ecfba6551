"""One evaluator for every method: stages, scores per client, and what they add up to."""
