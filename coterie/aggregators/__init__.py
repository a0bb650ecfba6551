"""One file per aggregator; each is found by its presence in this folder."""
