"""Command line: thin commands, which parse, call and print."""

from treefx.cli.app import app, main

__all__ = ["app", "main"]
