"""The forest of the current call: how the native level hands a tree to the compiled graph.

Also the tree of the forward that is running under ``treefx.distribute``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from treefx.errors import ForestError
from treefx.forests.forest import Forest

__all__ = ["RunningTree", "current_forest", "current_tree", "set_tree", "use"]


@dataclass(frozen=True)
class RunningTree:
    """Figures of the tree on which a model under ``treefx.distribute`` is running its forward."""

    raw_tokens: int
    tokens: int
    parameters: tuple[Tensor, ...]
    """The model's parameters as its owner sees them: FSDP swaps others in while a block runs."""


_TREE: ContextVar[RunningTree | None] = ContextVar("treefx_tree", default=None)
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


def set_tree(tree: RunningTree | None) -> None:
    """Begin (or end, with None) the forward of a model on a tree; ``treefx.distribute`` calls it."""
    _TREE.set(tree)


def current_tree() -> RunningTree | None:
    """Return the tree of the forward that is running, None outside of one."""
    return _TREE.get()
