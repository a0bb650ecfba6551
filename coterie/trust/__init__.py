"""What may run: a user's Python files, loaded through one gate, and the digests that this user has trusted."""
