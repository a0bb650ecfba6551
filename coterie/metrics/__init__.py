"""One file per metric or family of metrics; each is found by its presence in this folder."""
