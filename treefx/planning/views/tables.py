"""Tables, bytes and seconds as views of plans and profiles write them."""

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["format_bytes", "format_seconds", "make_figures", "make_texts", "render_tables"]


def render_tables(*items: str | Table) -> str:
    """Plain text: tables as wide as they need, and lines that only the terminal wraps."""
    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False, color_system=None, markup=False)
    for item in items:
        console.print(item, soft_wrap=isinstance(item, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def make_figures(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of text on the left and figures aligned to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def make_texts(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of texts, aligned to the left, that fold."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def format_bytes(value: float) -> str:
    """Bytes with a binary unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    place = 0
    while abs(value) >= 1024 and place < len(units) - 1:
        value, place = value / 1024, place + 1
    return f"{value:,.0f} B" if place == 0 else f"{value:,.2f} {units[place]}"


def format_seconds(value: float) -> str:
    """Seconds, or milliseconds where they are few."""
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.2f} ms"
