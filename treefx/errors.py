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
    """Raised for an option that is unknown, of the wrong type, or in conflict with another."""


class InputError(TreefxError):
    """Raised for an argument of the wrong type, shape, device or values."""


class RecordError(InputError):
    """Raised for a record of a file that cannot be used.

    ``path``, ``line`` and ``field`` say where it stands; the message also says why.
    """

    def __init__(self, message: str, path: str = "", line: int | None = None, field: str = "") -> None:
        super().__init__(message)
        self.path, self.line, self.field = path, line, field


class ForestError(InputError):
    """Raised for sequences, weights or masks that form no forest, or for a wrong forest."""


class UnsupportedError(TreefxError):
    """Raised for a computation that treefx cannot run exactly.

    The message names it, the way out, and its code.

    Args:
        text: The message.
        code: Of ``treefx.reason_codes`` or ``treefx.refusal_codes``; by default that of the module that refuses.
    """

    def __init__(self, text: str = "", code: str = "") -> None:
        super().__init__(text)
        self.code = code or code_of_module(sys._getframe(1).f_globals.get("__name__", ""))

    @property
    def text(self) -> str:
        """Return the message without its code."""
        return super().__str__()

    def __str__(self) -> str:
        return with_code(self.text, self.code)


class CoupledLossError(UnsupportedError):
    """Raised when a loss of whole rows is called on the edges of one part of a forest."""


class MemoryLimitError(TreefxError):
    """Raised when no plan runs within the memory limit.

    The message names the token path and the bytes it needs.
    """


class RankError(TreefxError):
    """Another rank failed in a step that all ranks run together; the message names it."""


class SharingWarning(UserWarning):
    """Warned when rows share prefixes but a compiled model computes them on every row.

    The message says why and how many tokens are lost.

    Results are exact all the same. ``warnings.simplefilter("ignore", treefx.SharingWarning)`` hides it.
    """


def shorten(text: str, most: int = 1000) -> str:
    """Cut the middle out of a text longer than ``most`` characters, for messages."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} ... {text[len(text) - (most - head - 5) :]}"
