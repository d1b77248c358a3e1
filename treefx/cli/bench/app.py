"""The group of commands, and how their records are printed."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from treefx.output import console, fits, make_table, notes, print_json

__all__ = ["Json", "bench", "format_cell", "schema_of", "show"]

bench = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure: building forests, attention over a tree, a whole training step.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON.")]


def schema_of(command: str) -> str:
    """The form of the records of a measurement, see ``treefx.cli.schemas``."""
    return f"treefx.bench.{command}/1"


def show(title: str, records: Sequence[dict[str, Any]], json: bool, command: str) -> None:
    """Print measurements: as JSON, or as a table.

    Args:
        title: Of the table.
        records: Figures by name, the first of which names the case.
        json: Whether to print JSON.
        command: Name of the measurement.
    """
    if json:
        print_json(records, schema_of(command))
        return
    if not records:
        notes.print("nothing was measured")
        return
    names, *fields = list(records[0])
    headers = [field.replace("_", " ") for field in (names, *fields)]
    rows = [[format_cell(record.get(field)) for field in (names, *fields)] for record in records]
    table = make_table(title, headers, rows)
    if len(fields) > len(records) or not fits(table):
        _show_by_figure(title, records)
    else:
        console.print(table)


def _show_by_figure(title: str, records: Sequence[dict[str, Any]]) -> None:
    """Print one line per figure, with as many records side by side as the terminal fits."""
    names, *fields = list(records[0])

    def table(part: Sequence[dict[str, Any]]) -> Table:
        headers = [names.replace("_", " "), *(str(record[names]) for record in part)]
        rows = [[field.replace("_", " "), *(format_cell(record.get(field)) for record in part)] for field in fields]
        return make_table(title if part[0] is records[0] else "", headers, rows)

    left = list(records)
    while left:
        size = next((size for size in range(len(left), 1, -1) if fits(table(left[:size]))), 1)
        console.print(table(left[:size]))
        left = left[size:]


def format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
