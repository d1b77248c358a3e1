"""Command line: thin commands, which parse, call and print.

Order of imports, each only of what stands before an arrow::

    checks, lazy -> plan_many -> plan -> data, demo, doctor, fuzz, inspect_model, run, simulate -> bench -> app
"""

from treefx.cli.app import app, main

__all__ = ["app", "main"]
