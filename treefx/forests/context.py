"""The forest of the current call: how the native level hands a tree to the compiled graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import WeakSet

from treefx.errors import ForestError, UnsupportedError
from treefx.forests.forest import Forest
from treefx.torch_patches.columns import COLUMNS_IN_USE

__all__ = [
    "check_run",
    "current_forest",
    "raised_on_forest",
    "ran_on_forest",
    "use",
]

_NOTHING_RAN = (
    "treefx.use(forest) expects that a model compiled with backend='treefx' runs on the forest inside of the context, "
    "and none did: any other model lets the rows of a packed row see each other. Compile the model "
    "(model.compile(backend='treefx')) and call it with **forest.model_inputs() inside of the context. Dynamo runs a "
    "model uncompiled that it has compiled too often: raise torch._dynamo.config.recompile_limit"
)
_NOT_OF_A_RUN = (
    "expected logits or hidden states of a compiled model that ran on the forest, but the forest is or was in use, and "
    "no compiled model has run on it: call model.compile(backend='treefx'), then the model inside of treefx.use(forest)"
)


@dataclass
class _Use:
    """A forest in use, and whether a compiled model has run on it, or has raised."""

    forest: Forest
    ran: bool = False
    raised: bool = False


IN_USE: ContextVar[_Use | None] = ContextVar("treefx_forest", default=None)
"""The forest of this thread's innermost `use`; None outside of one."""
_USED: WeakSet[Forest] = WeakSet()
"""Forests whose context ended without a run."""
_RAN: WeakSet[Forest] = WeakSet()
"""Forests on which a compiled model has run."""


@contextmanager
def use(forest: Forest) -> Iterator[Forest]:
    """Run calls of compiled models on `forest`: their inputs are its packed row, [1, N].

    Contexts nest, the innermost counts; each thread and each asyncio task has its own. In each context at least one
    compiled model must run: an uncompiled one would read the packed row as one sequence.

    Args:
        forest: the forest; calls inside receive its `model_inputs()`.

    Returns:
        A context manager, which yields the forest.

    Raises:
        ForestError: `forest` is not a Forest.
        UnsupportedError: The context ends, without an exception, and no compiled model ran on the forest inside, nor
            raised.

    Example:
        >>> with treefx.use(forest):
        ...     out = compiled(**forest.model_inputs(), use_cache=False)
    """
    if not isinstance(forest, Forest):
        raise ForestError(
            f"treefx.use expected a Forest, got {type(forest).__name__}; build one with Forest.from_sequences"
        )
    current = _Use(forest)
    token, columns = IN_USE.set(current), COLUMNS_IN_USE.set(forest.num_tokens)
    try:
        yield forest
    finally:
        COLUMNS_IN_USE.reset(columns)
        IN_USE.reset(token)
    if not current.ran:  # not reached by an exception, which propagates unchanged
        _USED.add(forest)
        if not current.raised:  # else the caller has caught that, and has no logits
            raise UnsupportedError(_NOTHING_RAN)


def current_forest() -> Forest | None:
    """Return the forest of the innermost `use` of this thread, None outside of one.

    Returns:
        The forest that calls run on, or None.
    """
    current = IN_USE.get()
    return None if current is None else current.forest


def ran_on_forest() -> None:
    """Note that a compiled graph has run on the forest in use."""
    current = IN_USE.get()
    assert current is not None
    current.ran = True
    _RAN.add(current.forest)


def raised_on_forest() -> None:
    """Note that a compiled or converted model has raised; nothing happens outside of `use`."""
    current = IN_USE.get()
    if current is not None:
        current.raised = True


def check_run(forest: Forest) -> None:
    """Check that values of a forest can come from a compiled model.

    The contexts of the forest are the evidence.

    Raises:
        UnsupportedError: The forest is in use, or was, and no compiled model has ever run on it.
    """
    current = IN_USE.get()
    in_use = current is not None and current.forest is forest
    if (in_use or forest in _USED) and forest not in _RAN:
        raise UnsupportedError(_NOT_OF_A_RUN)
