"""Libraries that only a part of treefx needs, by the extra that installs them; the version that is installed."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["installed_version", "needs"]

_LIBRARIES = {"cli": ("rich", "typer"), "plot": ("matplotlib",), "rl": ("safetensors",)}
"""What each extra of ``pyproject.toml`` brings; ``[tools]`` brings all."""


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Say which extra is missing, where a library is. A context, or a decorator of what imports it.

    Args:
        extra: a name of ``_LIBRARIES``.
        what: what the library is needed for.

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
