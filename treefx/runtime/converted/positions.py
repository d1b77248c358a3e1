"""Trace lookups in place of modules that make values of positions and read numbers on the host.

A rotary embedding that keeps a table reads how long the table must be (``positions.max().item()``), and no trace goes
on behind that. ``find_tables`` runs such modules of the copy on made-up positions. A module whose every result follows
from the token's own position, whatever stands next to it and whatever calls came before, is traced as one lookup per
result. The trace only shows which results depend on which tokens: every call runs the module itself, and ``frame``
compares the values that the blocks get from it.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from treefx.runtime.converted.readers import changed_names, replaced

__all__ = ["Tables", "find_tables"]

_ENTRIES = 16
"""Rows of the tables, which nothing reads."""
_TABLE = "treefx_table_{}"
"""Names of the buffers of a copy that hold them."""
_LONGEST = 2**18
"""Positions up to which a module is tried; longer contexts take too much memory."""
_CONTEXT = 8192
"""Where a configuration has no ``max_position_embeddings``."""
_SMALL = [[0, 1, 2, 3, 4, 5]]
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class _Call:
    """Arguments of a module in a call on rows, and where its positions and its vectors are among them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def with_positions(self, positions: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for other positions, and for other vectors of as many tokens."""
        leaves, shape = tree_flatten((self.args, dict(self.kwargs)))
        made = [self._other(x, positions) for x in leaves]
        args, kwargs = tree_unflatten(made, shape)
        return args, kwargs

    @staticmethod
    def _other(x: Any, positions: Tensor) -> Any:
        if not isinstance(x, Tensor):
            return x
        if _are_positions(x):
            return positions.to(x.dtype)
        return torch.randn(*positions.shape, *x.shape[2:], dtype=torch.float64).to(x.dtype)

    @property
    def is_of_positions(self) -> bool:
        """Whether there is one tensor of positions [L, T], and all others are vectors [B, T, ...]."""
        tensors = [x for x in tree_flatten((self.args, dict(self.kwargs)))[0] if isinstance(x, Tensor)]
        vectors = [x for x in tensors if not _are_positions(x)]
        return len(tensors) - len(vectors) == 1 and all(x.dim() >= 3 and x.is_floating_point() for x in vectors)


def _are_positions(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and x.dtype in _INTEGERS


class Tables:
    """Modules of a copy that are traced as lookups, and what calls may leave in them.

    Attributes:
        kept: Names of attributes and buffers that their calls change.
        longest: The largest position that was tried.
    """

    def __init__(self, longest: int) -> None:
        self.kept: frozenset[str] = frozenset()
        self.longest = longest
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._forwards)

    def add(self, module: nn.Module, results: Sequence[Tensor], shape: Any, kept: Collection[str]) -> None:
        """Trace a module as lookups that return results in their shape."""
        names = [_TABLE.format(i) for i in range(len(results))]
        for name, x in zip(names, results, strict=True):  # an input of the graph would be taken for one of the batch
            module.register_buffer(name, torch.zeros(_ENTRIES, *x.shape[2:], dtype=x.dtype), persistent=False)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            (positions,) = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == 2]
            return tree_unflatten([getattr(self, name)[positions] for name in names], shape)

        self._forwards[module] = types.MethodType(forward, module)
        self.kept |= frozenset(kept)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Within, the modules are lookups."""
        with ExitStack() as stack:
            for module, forward in self._forwards.items():
                stack.enter_context(replaced(module, forward))
            yield


def find_tables(owner: nn.Module, blocks: Collection[str], run: Callable[[], Any]) -> Tables:
    """Find modules outside of the blocks that compute each result of a token's position alone.

    Args:
        owner: A skeleton of the module that takes the ids.
        blocks: Names of its blocks.
        run: Calls it on made-up rows, without its blocks.
    """
    context = (getattr(getattr(owner, "config", None), "max_position_embeddings", None) or _CONTEXT) + 8
    found, calls = Tables(context), dict[str, list[_Call]]()
    with ExitStack() as stack:
        for name, module in owner.named_modules():
            if _may_read_positions(name, module, blocks):
                stack.enter_context(replaced(module, _noting(module, calls.setdefault(name, []))))
        run()
    for name, made in calls.items():
        module = owner.get_submodule(name)
        if not made or context > _LONGEST or not all(call.is_of_positions for call in made):
            continue
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            proofs = [_prove(module, call, context) for call in made]
        if all(proof is not None and _alike(proof, proofs[0]) for proof in proofs):
            results, shape, _ = proofs[0]  # type: ignore[misc]
            kept = {f"{name}.{key}" for proof in proofs if proof is not None for key in proof[2]}
            found.add(module, results, shape, kept)
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether two calls have results of the same form, for which one lookup can stand."""
    forms = ([(x.shape, x.dtype) for x in results] for results, *_ in (one, other))
    return one[1] == other[1] and next(forms) == next(forms)


def _may_read_positions(name: str, module: nn.Module, blocks: Collection[str]) -> bool:
    around = any(block == name or block.startswith(f"{name}.") or name.startswith(f"{block}.") for block in blocks)
    return bool(name) and not around and next(module.parameters(), None) is None and not _is_container(module)


def _is_container(module: nn.Module) -> bool:
    return inspect.getattr_static(type(module), "forward", None) is nn.Module.forward


def _noting(module: nn.Module, calls: list[_Call]) -> Callable[..., Any]:
    forward = module.forward

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(_Call(args, kwargs))
        return forward(*args, **kwargs)

    return note


def _prove(module: nn.Module, call: _Call, context: int) -> tuple[list[Tensor], Any, list[str]] | None:
    """Return results on six positions, their structure, and what calls change; None if the law does not hold."""
    try:
        tried = copy.deepcopy(module)
        first, shape = _results(tried, call, torch.tensor(_SMALL))
        for later in (tried, copy.deepcopy(module)):  # one with a short table, one with none
            for positions in _positions(context):
                found, other = _results(later, call, positions)
                if other != shape or not all(map(_agree, first, found, [positions] * len(first))):
                    return None
        left, same = (
            _left_by(module, call, torch.tensor(rows)) for rows in ([_SMALL[0][:5] + [context]], [[context, 7]])
        )
    except Exception:  # what it cannot run on is not proved
        return None
    if left.keys() != same.keys() or not all(_equal(left[name], same[name]) for name in left):
        return None  # something of the tokens is kept, which a caller may read
    return first, shape, list(left)


def _left_by(module: nn.Module, call: _Call, positions: Tensor) -> dict[str, Any]:
    """Return the attributes and buffers that a first call changes."""
    tried = copy.deepcopy(module)
    changed = changed_names(tried)
    _results(tried, call, positions)
    return {name: getattr(tried, name) for name in changed()}


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype is y.dtype and torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)


def _positions(context: int) -> Iterator[Tensor]:
    """Positions in other orders, alone, in rows, and next to the largest one; the small ones again at the end."""
    for rows in ([[5, 3, 1, 0, 2, 4]], [[4]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2, 3, 4, context]], _SMALL):
        yield torch.tensor(rows)


def _results(module: nn.Module, call: _Call, positions: Tensor) -> tuple[list[Tensor], Any]:
    args, kwargs = call.with_positions(positions)
    leaves, shape = tree_flatten(module(*args, **kwargs))
    for x in leaves:
        if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[:2] != positions.shape or x.requires_grad:
            raise ValueError("no result per position")
    return leaves, shape


def _agree(first: Tensor, found: Tensor, positions: Tensor) -> bool:
    """Whether results are those of the same positions among the first six."""
    known = positions < len(_SMALL[0])
    same = torch.allclose(first[0][positions[known]], found[known], rtol=1e-6, atol=0, equal_nan=True)
    return same and first.dtype is found.dtype
