"""The forest of the current call: how the native level hands a tree to the compiled graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from treefx.errors import ForestError
from treefx.forest import Forest

__all__ = ["current_forest", "use"]

_CURRENT: ContextVar[Forest | None] = ContextVar("treefx_forest", default=None)


@contextmanager
def use(forest: Forest) -> Iterator[Forest]:
    """Run calls of compiled models on `forest`: their inputs are its packed row, [1, N].

    Contexts nest, the innermost counts; each thread and each asyncio task has its own.

    Args:
        forest: the forest whose `model_inputs()` the calls inside get.

    Raises:
        ForestError: `forest` is not a Forest.

    Example:
        >>> with treefx.use(forest):
        ...     out = compiled(**forest.model_inputs(), use_cache=False)
    """
    if not isinstance(forest, Forest):
        raise ForestError(
            f"treefx.use expected a Forest, got {type(forest).__name__}; build one with Forest.from_sequences"
        )
    token = _CURRENT.set(forest)
    try:
        yield forest
    finally:
        _CURRENT.reset(token)


def current_forest() -> Forest | None:
    """Return the forest of the innermost `use` of this thread, None outside of one."""
    return _CURRENT.get()
