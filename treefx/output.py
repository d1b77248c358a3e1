"""Output of all commands: text, tables, JSON, progress, and the line of a refusal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from treefx.errors import TreefxError

__all__ = [
    "Waiting", "console", "count", "fits", "make_table", "notes", "print_json", "print_line",
    "refusals_end_the_command", "waiting", "watch",
]  # fmt: skip

_T = TypeVar("_T")
_SECONDS_BETWEEN_LINES = 30.0
"""Where standard error is no terminal, progress is one line per this time at most."""

console = Console(highlight=False)
"""Results: standard output."""

notes = Console(stderr=True, highlight=False)
"""Progress, warnings and errors: standard error, so that ``--json`` output stays clean."""


def print_json(value: Mapping[str, Any] | Sequence[Mapping[str, Any]], schema: str) -> None:
    """Write one JSON document to standard output, without colours or wrapping.

    Args:
        value: A record, or a list of records.
        schema: Name and version of their form (``treefx.cli.schemas``), which becomes the first key of each.
    """
    named = [{"schema": schema, **record} for record in ([value] if isinstance(value, Mapping) else value)]
    typer.echo(json.dumps(named[0] if isinstance(value, Mapping) else named, indent=2))


def count(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: ``1 tree``, ``2 trees``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, tight: bool = False) -> Table:
    """Make a table with text in the first column and right-aligned figures in the others.

    Where the terminal is narrow, text folds between words, and inside of a word rather than lose letters.

    Args:
        title: A line above.
        columns: Headings.
        rows: Cells, written by ``str``.
        tight: One space between columns, for tables that need the width of a terminal.
    """
    padding = 0 if tight else (0, 0, 0, 1)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=padding)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def fits(table: Table) -> bool:
    """True if the terminal is wide enough for a table without folding its cells."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width


def print_line(text: str, style: str | None = None) -> None:
    """Write one line to standard output verbatim, without markup or wrapping."""
    console.print(text, style=style, markup=False, soft_wrap=True)


class Waiting:
    """Progress of one command, as ``waiting`` shows it."""

    def __init__(self, bar: Progress | None, what: str, total: int | None, quiet: bool) -> None:
        self._bar, self._total, self._quiet = bar, total, quiet
        self._task = None if bar is None else bar.add_task(what, total=total)
        self._what, self._done, self._told = what, 0, time.monotonic()

    def tell(self, what: str) -> None:
        """Name the work that begins now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)
        elif what != self._what and not self._quiet:
            self._what = what
            self._line()

    def advance(self, steps: int = 1) -> None:
        """Count pieces of work that are done."""
        self._done += steps
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, steps)
        elif not self._quiet and time.monotonic() - self._told >= _SECONDS_BETWEEN_LINES:
            self._line()

    def each(self, items: Iterable[_T]) -> Iterator[_T]:
        """Hand items on, and count each when the next one is wanted."""
        for item in items:
            yield item
            self.advance()

    def _line(self) -> None:
        self._told = time.monotonic()
        counted = f", {self._done} of {self._total}" if self._total and self._done else ""
        notes.print(f"{self._what}{counted} ...", markup=False, soft_wrap=True)


@contextmanager
def waiting(what: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Waiting]:
    """Show the progress of a command on standard error, until the block ends.

    A terminal gets a spinner or, with ``total``, a bar, with the seconds; anything else one plain line.

    Args:
        what: Name of the work that begins.
        total: Number of pieces, where it is known.
        quiet: Show nothing, as under ``--json``.
    """
    if quiet or not notes.is_terminal:
        progress = Waiting(None, what, total, quiet)
        if not quiet:
            progress._line()
        yield progress
        return
    counted = () if total is None else (BarColumn(), MofNCompleteColumn())
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), *counted, TimeElapsedColumn(),
        console=notes, transient=True,
    ) as bar:  # fmt: skip
        yield Waiting(bar, what, total, quiet)


def watch(items: Iterable[_T], what: str, *, total: int | None = None, quiet: bool = False) -> Iterator[_T]:
    """Yield items under the progress of ``waiting``, counted against ``total``."""
    if total is None and isinstance(items, Sequence):
        total = len(items)
    with waiting(what, total=total, quiet=quiet) as progress:
        yield from progress.each(items)


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
