"""Every error treefx raises on purpose, and its warning about lost sharing.

Each message says what was expected, what came, and what to do. Errors of this family are refusals or bad input;
anything else that escapes treefx is a bug of treefx.
"""

import sys

from treefx.reason_codes import with_code
from treefx.refusal_codes import code_of_module

__all__ = [
    "ConfigError",
    "CoupledLossError",
    "ForestError",
    "InputError",
    "MemoryLimitError",
    "RankError",
    "RecordError",
    "SharingWarning",
    "TreefxError",
    "UnsupportedError",
    "shorten",
]


class TreefxError(Exception):
    """Base of every error treefx raises on purpose."""


class ConfigError(TreefxError):
    """An option of the backend is unknown, has the wrong type, or contradicts another one."""


class InputError(TreefxError):
    """A tensor or argument handed to treefx has the wrong type, shape, device or values."""


class RecordError(InputError):
    """A record of a file cannot be used: ``path``, ``line`` and ``field`` say where it stands, the message also why."""

    def __init__(self, message: str, path: str = "", line: int | None = None, field: str = "") -> None:
        super().__init__(message)
        self.path, self.line, self.field = path, line, field


class ForestError(InputError):
    """Sequences, weights or masks from which no forest can be built, or a forest used with the wrong input."""


class UnsupportedError(TreefxError):
    """A computation that treefx cannot run exactly; the message names it, the way out, and its code.

    Args:
        text: The message.
        code: Of ``treefx.reason_codes`` or ``treefx.refusal_codes``; by default that of the module that refuses.
    """

    def __init__(self, text: str = "", code: str = "") -> None:
        super().__init__(text)
        self.code = code or code_of_module(sys._getframe(1).f_globals.get("__name__", ""))

    @property
    def text(self) -> str:
        """The message without its code."""
        return super().__str__()

    def __str__(self) -> str:
        return with_code(self.text, self.code)


class CoupledLossError(UnsupportedError):
    """A loss that reads whole rows was called on the edges of one part of a forest."""


class MemoryLimitError(TreefxError):
    """No plan runs within the memory limit; the message names the token path and the bytes it needs."""


class RankError(TreefxError):
    """Another rank failed in a step that all ranks run together; the message names it."""


class SharingWarning(UserWarning):
    """Rows share prefixes, and a compiled model computes them on every row: the message says why and how much is lost.

    Results are exact all the same. ``warnings.simplefilter("ignore", treefx.SharingWarning)`` hides it.
    """


def shorten(text: str, most: int = 1000) -> str:
    """A text without its middle where it is longer than ``most`` characters: messages quote what others wrote."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} ... {text[len(text) - (most - head - 5) :]}"
