"""What all commands share: where text goes, tables, JSON, and how a refusal ends a command."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from treefx.errors import TreefxError

__all__ = ["console", "make_table", "notes", "print_json", "print_line", "refusals_end_the_command"]

console = Console(highlight=False)
"""Results: standard output."""

notes = Console(stderr=True, highlight=False)
"""Progress, warnings and errors: standard error, so that ``--json`` output stays clean."""


def print_json(value: Any) -> None:
    """Write one JSON document to standard output, without colours or wrapping."""
    typer.echo(json.dumps(value, indent=2))


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose first column is text and whose other columns are figures, aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def print_line(text: str, style: str | None = None) -> None:
    """Write one line to standard output as it is: no markup, and no line breaks where the terminal ends."""
    console.print(text, style=style, markup=False, soft_wrap=True)


@contextmanager
def refusals_end_the_command() -> Iterator[None]:
    """Turn a ``TreefxError`` into one red line and exit status 2.

    Anything else is a bug and keeps its traceback.
    """
    try:
        yield
    except TreefxError as error:
        notes.print(f"[bold red]{type(error).__name__}[/]:", end=" ")
        notes.print(str(error), markup=False, soft_wrap=True)
        raise SystemExit(2) from None
