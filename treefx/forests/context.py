"""The forest of the current call: how the native level hands a tree to the compiled graph.

Also the tree of the forward that is running under ``treefx.distribute``.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from treefx.errors import ForestError
from treefx.forests.forest import Forest

__all__ = ["RunningTree", "current_forest", "current_tree", "ran_on_forest", "set_tree", "use"]

_NOTHING_RAN = (
    "a forest was in use, and no compiled model ran on it: any other lets the rows of a packed row see each other. "
    "Call the compiled model inside of the context (Dynamo runs a model uncompiled that it has compiled too often: "
    "raise torch._dynamo.config.recompile_limit)"
)


@dataclass(frozen=True)
class RunningTree:
    """Figures of the tree on which a model under ``treefx.distribute`` is running its forward."""

    raw_tokens: int
    tokens: int
    parameters: tuple[Tensor, ...]
    """The model's parameters as its owner sees them: FSDP swaps others in while a block runs."""


@dataclass
class _Use:
    """A forest in use, and whether a compiled model has run on it."""

    forest: Forest
    ran: bool = False


_TREE: ContextVar[RunningTree | None] = ContextVar("treefx_tree", default=None)
_CURRENT: ContextVar[_Use | None] = ContextVar("treefx_forest", default=None)


@contextmanager
def use(forest: Forest) -> Iterator[Forest]:
    """Run calls of compiled models on `forest`: their inputs are its packed row, [1, N].

    Contexts nest, the innermost counts; each thread and each asyncio task has its own.

    Args:
        forest: the forest whose `model_inputs()` the calls inside get.

    Raises:
        ForestError: `forest` is not a Forest.

    Warns:
        UserWarning: No compiled model ran inside; any other lets the rows of the forest see each other.

    Example:
        >>> with treefx.use(forest):
        ...     out = compiled(**forest.model_inputs(), use_cache=False)
    """
    if not isinstance(forest, Forest):
        raise ForestError(
            f"treefx.use expected a Forest, got {type(forest).__name__}; build one with Forest.from_sequences"
        )
    current = _Use(forest)
    token = _CURRENT.set(current)
    try:
        yield forest
    finally:
        _CURRENT.reset(token)
    if not current.ran:
        warnings.warn(_NOTHING_RAN, stacklevel=3)


def current_forest() -> Forest | None:
    """Return the forest of the innermost `use` of this thread, None outside of one."""
    current = _CURRENT.get()
    return None if current is None else current.forest


def ran_on_forest() -> None:
    """Note that a compiled graph has run on the forest in use."""
    current = _CURRENT.get()
    assert current is not None
    current.ran = True


def set_tree(tree: RunningTree | None) -> None:
    """Begin (or end, with None) the forward of a model on a tree; ``treefx.distribute`` calls it."""
    _TREE.set(tree)


def current_tree() -> RunningTree | None:
    """Return the tree of the forward that is running, None outside of one."""
    return _TREE.get()
