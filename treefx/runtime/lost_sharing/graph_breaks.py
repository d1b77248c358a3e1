"""Find the graph break that keeps token ids away from a graph.

Dynamo cuts a function in two where it cannot trace a line; inside of a loop it skips the whole function, and compiles
the functions that it calls. A graph behind the cut gets hidden states instead of token ids. Dynamo records the line in
two places: ``graph_break_reasons`` for a function that it cuts, the compilation metrics for one that it skips. The
Python stack above a compilation says which of these functions runs uncompiled around the graph.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import utils as dynamo_utils

__all__ = ["Break", "call_of_entry", "find_break", "find_ending", "is_entry", "object_of_entry"]

_TORCH = str(Path(torch.__file__).parent)
_TREEFX = str(Path(__file__).parents[2])
_COMPILES = str(Path(_TORCH, "_dynamo", "convert_frame.py"))
_RESUMED = "torch_dynamo_resume_in_"
_ENTRY = ("eval_frame.py", "compile_wrapper")
"""Where the call of a compiled object enters Dynamo."""
_MODULE_CALL = ("module.py", "_call_impl")


@dataclass(frozen=True)
class Break:
    """A line that Dynamo could not trace.

    Attributes:
        function: the function that Dynamo cut or skipped, with the class of its module.
        place: ``file:line`` of the line.
        code: the line.
        reason: Dynamo's reason, one line.
        compiled: the function that Dynamo compiled instead; None for the rest of ``function``.
    """

    function: str
    place: str
    code: str
    reason: str
    compiled: str | None = None

    def __str__(self) -> str:
        code = f" `{self.code}`" if self.code else ""
        instead = f"compiled {self.compiled} separately" if self.compiled else "compiled the rest separately"
        return (
            f"Dynamo could not capture {self.function} as one graph (graph break at {self.place}{code}: {self.reason}) "
            f"and {instead}, without token ids; move that line out of the model, or use treefx.convert(model)"
        )


def find_ending(gm: fx.GraphModule) -> Break | None:
    """The graph break behind a graph; None if the graph ends where its function returns."""
    ending = getattr(gm, "compile_subgraph_reason", None)
    if ending is None or not getattr(ending, "graph_break", False) or not getattr(ending, "user_stack", None):
        return None
    frame = next((frame for frame in _uncompiled() if _is_call(frame, _MODULE_CALL)), None)
    owner = None if frame is None else frame.f_locals.get("self")
    return _of_reason(_name(ending.user_stack[0].name, owner), ending)


def find_break(gm: fx.GraphModule) -> Break | None:
    """The graph break because of which a graph is compiled apart from its caller.

    Call it while Dynamo compiles the graph: the functions that Dynamo cut or skipped are then on the stack.
    """
    frames = [frame for frame in _uncompiled() if not frame.f_code.co_filename.startswith(_TORCH)]
    for frame in reversed(frames):
        found = _recorded(frame)
        if found is not None:
            _known[frame.f_code] = found
            return replace(found, compiled=_compiled_instead())
    return None


def object_of_entry() -> Any:
    """Return the compiled module or function of the caller; None if not on the stack."""
    entry = _entry()
    function = None if entry is None else entry.f_locals.get("fn")
    return getattr(function, "__self__", function)


def call_of_entry() -> Mapping[str, Any]:
    """Return the arguments of the compiled object's call by name.

    Arguments of functions that run uncompiled in it are included.
    """
    found: dict[str, Any] = {}
    for frame in _frames():
        local = frame.f_locals
        if is_entry(frame):
            given, named = local.get("args"), local.get("kwargs")
            by_place = {f"argument_{i}": x for i, x in enumerate(given)} if isinstance(given, tuple) else {}
            return found | by_place | (named if isinstance(named, dict) else {})
        if not frame.f_code.co_filename.startswith((_TORCH, _TREEFX)):
            nested = [x for x in local.values() if isinstance(x, Mapping)]
            found = {str(name): x for part in [*nested, local] for name, x in part.items()} | found
    return {}


_known: MutableMapping[CodeType, Break] = weakref.WeakKeyDictionary()
"""By function: Dynamo analyses a function that it skips once, and keeps records of the last compilations only."""


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_entry(frame: FrameType) -> bool:
    """Whether a frame is where the call of a compiled object enters Dynamo."""
    return _is_call(frame, _ENTRY)


def _is_call(frame: FrameType, place: tuple[str, str]) -> bool:
    code = frame.f_code
    return code.co_name == place[1] and code.co_filename.startswith(_TORCH) and code.co_filename.endswith(place[0])


def _entry() -> FrameType | None:
    return next((frame for frame in _frames() if is_entry(frame)), None)


def _uncompiled() -> list[FrameType]:
    """List the frames between the compilation and the entry of the compiled object.

    Innermost first.
    """
    found: list[FrameType] = []
    for frame in _frames():
        if is_entry(frame):
            return found
        compiles = frame.f_code.co_filename == _COMPILES
        found = [] if compiles else [*found, frame]
    return []


def _compiled_instead() -> str | None:
    """Return the module whose forward Dynamo compiles now; None if it resumes the caller."""
    first = next(iter(_uncompiled()), None)
    if first is None or not _is_call(first, _MODULE_CALL):
        return None
    module = first.f_locals.get("self")
    return f"{type(module).__name__}.forward" if isinstance(module, nn.Module) else None


def _recorded(frame: FrameType) -> Break | None:
    """Return Dynamo's record of its last analysis of a frame's function, or an earlier one."""
    code = frame.f_code
    name = _name(code.co_name, frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None)
    last = _last_metrics(code)
    if last is not None and last.fail_user_frame_filename:
        place = last.fail_user_frame_filename, last.fail_user_frame_lineno
        return Break(name, *_place(*place), _first_line(last.fail_reason))
    if last is None and code in _known:
        return _known[code]
    for reason in reversed(getattr(dynamo_utils, "graph_break_reasons", [])):
        stack = getattr(reason, "user_stack", None)
        if stack and stack[0].filename == code.co_filename and _plain(stack[0].name) == _plain(code.co_name):
            return _of_reason(name, reason)
    return _known.get(code)


def _last_metrics(code: CodeType) -> Any:
    """Dynamo's record of its last analysis of a function, failed or not; None if it is gone."""
    metrics: list[Any] = getattr(dynamo_utils, "get_compilation_metrics", list)()
    wanted = code.co_filename, code.co_name, code.co_firstlineno
    found = (item for item in reversed(metrics) if (item.co_filename, item.co_name, item.co_firstlineno) == wanted)
    return next(found, None)


def _of_reason(name: str, reason: Any) -> Break:
    line = reason.user_stack[-1]
    return Break(name, *_place(line.filename, line.lineno), _first_line(reason.reason))


def _place(filename: str, number: int | None) -> tuple[str, str]:
    return f"{filename}:{number}", linecache.getline(filename, number or 0).strip()


def _first_line(reason: Any) -> str:
    return next(iter(str(reason).splitlines()), "").strip() or "no reason given"


def _plain(name: str) -> str:
    """Return the name of a function without Dynamo's suffix for resumed code."""
    return name.removeprefix(_RESUMED).rpartition("_at_")[0] if name.startswith(_RESUMED) else name


def _name(function: str, owner: Any) -> str:
    return f"{type(owner).__name__}.{_plain(function)}" if isinstance(owner, nn.Module) else _plain(function)
