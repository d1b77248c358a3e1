"""Substitute functions that Dynamo traces, by two wrapped methods for all of them.

Code of libraries that would cut a graph in two (flash attention, heads without logits, fused norms) is known by the
function or the ``autograd.Function`` that is called, and another function is traced in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import RestartAnalysis, Unsupported
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable

from treefx.torch_patches.patch import is_ours

__all__ = ["Substitute", "retry_where_cut", "substitute_applied", "substitute_called", "wrap_applied", "wrap_called"]

Substitute = Callable[[Any, Any, Any, Any], tuple[Any, list[Any], dict[str, Any]] | None]
"""Function, translator, arguments, keyword arguments -> the call in its place, or None.

The object of a bound method is its first argument."""

_called: list[Substitute] = []
_applied: list[Substitute] = []
_cut: list[Callable[[Any, Any, Any, Any], bool]] = []


def substitute_called(substitute: Substitute) -> Substitute:
    """Register a substitute for calls of Python functions; the first non-None answer wins."""
    _called.append(substitute)
    return substitute


def substitute_applied(substitute: Substitute) -> Substitute:
    """Register a substitute for the ``apply`` of an ``autograd.Function``, given as a class."""
    _applied.append(substitute)
    return substitute


def retry_where_cut(may_retry: Callable[[Any, Any, Any, Any], bool]) -> None:
    """Register a function that decides whether a trace starts over after a call that would cut the graph.

    It gets the called function, the translator, arguments and keyword arguments. If it returns true, a substitute must
    stand in place of the call in the next trace.
    """
    _cut.append(may_retry)


def wrap_called() -> None:
    """Let Dynamo ask the substitutes of functions, also where one cannot be traced."""
    original = UserFunctionVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = [*self.self_args(), *args]
        found = _instead(_called, self.fn, tx, given, kwargs)
        if found is not None:
            return found
        start = tx.speculation_log.index
        try:
            return original(self, tx, args, kwargs)
        except Unsupported:
            if is_ours(tx) and any(retry(self.fn, tx, given, kwargs) for retry in _cut):
                del tx.speculation_log.entries[start:]  # of the call, which the next trace does not make
                raise RestartAnalysis(restart_reason="a call that cuts the graph has a substitute") from None
            raise

    UserFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def wrap_applied() -> None:
    """Let Dynamo ask the substitutes of ``autograd.Function`` s."""
    original = AutogradFunctionVariable.call_apply

    @functools.wraps(original)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = _instead(_applied, self.fn_cls, tx, args, kwargs)
        return original(self, tx, args, kwargs) if found is None else found

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]


def _instead(substitutes: list[Substitute], function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of the call in place of a function; None to call it unchanged."""
    if not is_ours(tx):
        return None
    for substitute in substitutes:
        found = substitute(function, tx, args, kwargs)
        if found is not None:
            other, given, named = found
            return UserFunctionVariable(other).call_function(tx, given, named)
    return None
