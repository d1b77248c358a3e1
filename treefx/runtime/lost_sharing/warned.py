"""Warn once per compiled object that its calls share less than they could."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from treefx.errors import SharingWarning, shorten
from treefx.reason_codes import with_code
from treefx.runtime.lost_sharing.distinct_tokens import Counts
from treefx.runtime.lost_sharing.graph_breaks import is_entry

__all__ = ["is_warned", "warn_once"]

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_MORE = "print(treefx.inspect(model).summary()) shows more; ignore treefx.SharingWarning to hide this"
_warned: MutableMapping[Any, None] = weakref.WeakKeyDictionary()
"""Compiled objects that had their warning."""


def is_warned(owner: Any) -> bool:
    """Return whether a compiled object had its warning.

    False for None and for objects without weak references.
    """
    try:
        return owner is not None and owner in _warned
    except TypeError:
        return False


def warn_once(owner: Any, what: str, reason: str, counts: Counts, code: str = "") -> None:
    """Warn unless a compiled object had its warning.

    Args:
        owner: the module or function that the user compiled or converted; None warns in any case.
        what: the part that runs on rows, with ``{}`` for the object's name.
        reason: why, with the user's line.
        counts: the tokens of the call.
        code: of the reason, see ``treefx.reason_codes``.
    """
    if is_warned(owner):
        return
    if owner is not None:
        with suppress(TypeError):  # without a hash or weak references: the caller's own record has to do
            _warned[owner] = None
    name = "a model" if owner is None else getattr(owner, "__qualname__", type(owner).__name__)
    loss = (
        f"this call has {counts.raw_tokens:,} tokens, of which {counts.distinct_tokens:,} are distinct "
        f"(sharing ratio {counts.ratio:.2f})"
    )
    text = f"treefx computes {what.format(name)}: {with_code(shorten(reason), code)}; {loss}; {_MORE}"
    warnings.warn(text, SharingWarning, _level(owner))


def _level(owner: Any) -> int:
    """The stack level of the user's line that called the compiled or converted object."""
    stack: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    entries = [i for i, item in enumerate(stack) if is_entry(item) or item.f_locals.get("self") is owner is not None]
    entry = max(entries, default=0)
    callers = (i for i in range(entry, len(stack)) if not stack[i].f_code.co_filename.startswith(_LIBRARIES))
    return 1 + next(callers, 0)
