"""One file per method; each is found by its presence in this folder."""
