"""Command line: thin commands, which parse, call and print.

Order of imports, each only of what stands before an arrow::

    checks, json_schema, lazy, rollouts, scripts -> measurements -> explain_batch, explain_text, plan_many, schemas
    -> explain, plan -> data, demo, doctor, fuzz, inspect_model, run, simulate -> bench -> app
"""

from treefx.extras import needs

try:
    with needs("cli", "the command treefx"):
        from treefx.cli.app import app, main
except ModuleNotFoundError as error:
    raise SystemExit(str(error)) from None

__all__ = ["app", "main"]
