"""A progress bar over the bytes of files, on a terminal; elsewhere nothing is written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["byte_progress"]


@contextmanager
def byte_progress(
    total: int, enabled: bool = True, console: "Console | None" = None
) -> Iterator[Callable[[int, str], None]]:
    """Yield a function of the bytes done and the current file; the bar disappears at the end.

    Args:
        total: bytes in all.
        enabled: False writes nothing, nor does anything where rich is not installed.
        console: where to; standard error when None. Written to only if it is a terminal.
    """
    if not enabled or find_spec("rich") is None:
        yield lambda done, name: None
        return
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("reading", total=total)
    try:
        bar.start()
    except LiveError:  # the caller shows a bar of their own
        bar.disable = True
    try:
        yield lambda done, name: bar.update(task, completed=done, description=name)
    finally:
        bar.stop()
