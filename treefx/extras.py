"""Name the extra that installs a missing library, and the installed version of treefx."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["installed_version", "needs"]

_LIBRARIES = {"cli": ("rich", "typer"), "plot": ("matplotlib",), "rl": ("safetensors",)}
"""Extra of ``pyproject.toml`` -> its libraries; ``[tools]`` installs all of them."""


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Name the missing extra when an import fails; a context or a decorator.

    Args:
        extra: a name of ``_LIBRARIES``.
        what: purpose of the library, for the message.

    Raises:
        ModuleNotFoundError: a library of the extra is not installed.

    Example:
        >>> with needs("plot", "a picture"):
        ...     from matplotlib.figure import Figure
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _LIBRARIES[extra]:
            raise
        text = f"{what} needs {library}, which is not installed: pip install 'treefx[{extra}]'"
        raise ModuleNotFoundError(text, name=error.name) from None


def installed_version() -> str:
    """Return the version in pyproject.toml, as the installer wrote it down."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("treefx")
    except PackageNotFoundError:  # a checkout on the path that was never installed
        return "0+unknown"
