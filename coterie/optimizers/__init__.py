"""One file per optimizer, for clients and for the server; each is found by its presence in this folder."""
