"""Command line."""

from treefx.cli.app import app, main

__all__ = ["app", "main"]
