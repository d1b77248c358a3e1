"""Detect weights that change while parts of a plan run, which would mix two models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from treefx.errors import UnsupportedError
from treefx.inspection.compiled_modules import modules_of

__all__ = ["weights_unchanged"]

_CHANGED = (
    "all parts of a plan need the same weights, but {} changed while they ran, in the loss, in logprobs, in a hook, or "
    "on another thread; change weights after treefx.forward_backward, or in a hook on a parameter's gradient, which "
    "runs after the last part"
)


@contextmanager
def weights_unchanged(compiled: Any) -> Iterator[None]:
    """Refuse a change of a compiled model's weights in a block.

    A change in place is found by the tensor's version, another tensor as `.data` by its address; a change in place
    through `.data` has neither.

    Raises:
        UnsupportedError: a weight was changed; the message names it.
    """
    modules = modules_of(compiled)
    named = {p: name.removeprefix("_orig_mod.") for module in modules for name, p in module.named_parameters()}
    before = {p: _state(p) for p in named}

    def changed() -> UnsupportedError | None:
        found = [named[p] for p, state in before.items() if _state(p) != state]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return UnsupportedError(_CHANGED.format(", ".join(found[:3]) + more)) if found else None

    try:
        yield
    except RuntimeError as error:  # autograd's own, that a saved weight was changed in place
        refusal = changed()
        if refusal is not None:
            raise refusal from error
        raise
    refusal = changed()
    if refusal is not None:
        raise refusal


def _state(parameter: Tensor) -> tuple[int, int]:
    """Return a fingerprint of a parameter: its version, and its address if there is one."""
    plain = type(parameter.data) is Tensor
    return parameter._version, parameter.data_ptr() if plain else 0
