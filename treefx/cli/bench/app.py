"""The group of commands, and how their records are printed."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from treefx.output import console, make_table, notes, print_json

__all__ = ["Json", "bench", "format_cell", "show"]

bench = typer.Typer(
    no_args_is_help=True, help="Measure: building forests, attention over a tree, a whole training step."
)

Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON.")]


def show(title: str, records: Sequence[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(records)
        return
    if not records:
        notes.print("nothing was measured")
        return
    # Many figures of few cases: one line per figure fits a terminal where one per case does not.
    names, *fields = list(records[0])
    if len(fields) > len(records):
        headers = [names, *(str(record[names]) for record in records)]
        rows = [[field.replace("_", " "), *(format_cell(record.get(field)) for record in records)] for field in fields]
    else:
        headers = [field.replace("_", " ") for field in (names, *fields)]
        rows = [[format_cell(record.get(field)) for field in (names, *fields)] for record in records]
    console.print(make_table(title, headers, rows))


def format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
