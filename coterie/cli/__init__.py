"""The command line: a module for each group of commands."""

from coterie.cli.app import app, main

__all__ = ["app", "main"]
