"""Run modules with recurrences or convolutions along tokens on rows: the paths of the tree.

Such a module mixes the tokens of a row in ways that a converted model cannot state as a score. It gets its own rows
back: one per leaf of the tree, the path from the root. The analysis of the model proves that a token's result depends
on the tokens up to it alone, so that any row through a token has its result.

Tree ``a (b c (d, e), f)``, and the rows of the module::

    a b c d
    a b c e
    a f . .

The tree comes as the module's mask, as attention gets it; its last entry is the mask of the call at each token.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from treefx.errors import UnsupportedError
from treefx.kernels.memory import Bounded, Known, on_host
from treefx.kernels.recurrence.tree_conv import find_depths
from treefx.passes.causal.tree_mixers import LibraryTree, TreeConvolution, TreeScan, Vanishing
from treefx.passes.labels.facts import fact_of
from treefx.passes.scores.attention_facts import Attention
from treefx.runtime.converted.seam import mark_copy, own_forward, put_forward, running_on_tree
from treefx.runtime.converted.sizes import module_of

__all__ = ["count_leaves", "find_mixers", "run_on_paths"]

_MIXERS = (LibraryTree, TreeConvolution, TreeScan, Vanishing)


def find_mixers(nodes: Sequence[fx.Node], blocks: set[str]) -> set[str]:
    """Return the names of the modules in blocks that hold a recurrence or a convolution along tokens.

    Args:
        nodes: The operators of a labelled graph.
        blocks: The names of the blocks.

    Raises:
        UnsupportedError: One is outside of the blocks, or holds an attention too.
    """
    laws = [(module_of(node), fact_of(node).law) for node in nodes if node.op == "call_function"]
    found = {_below(name, blocks) for name, law in laws if isinstance(law, _MIXERS)}
    for name, law in laws:
        if isinstance(law, Attention) and any(is_inside(name, mixer) for mixer in found):
            raise UnsupportedError(f"{name or 'the module that takes the ids'} holds a recurrence and an attention")
    return found


def is_inside(name: str, module: str) -> bool:
    """Return whether the name of a module is another one's, or that of a module in it."""
    return name == module or name.startswith(f"{module}.")


def _below(name: str, blocks: set[str]) -> str:
    """The child of a block that a module stands in, or the block itself."""
    block = next((item for item in blocks if is_inside(name, item)), None)
    if block is None:
        raise UnsupportedError(f"{name or 'the module that takes the ids'} has a recurrence outside of the blocks")
    return block if name == block else f"{block}.{name[len(block) + 1 :].split('.')[0]}"


# Paths ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Paths:
    """The rows of a tree.

    Attributes:
        token_of: The token at each place [L, D]; N behind the end of a path.
        place_of: A place of each token [N], of all L D.
        mask: The call's mask at each place [L, D]; 0 behind the end of a path.
    """

    token_of: Tensor
    place_of: Tensor
    mask: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """[1, N, ...] -> [L, D, ...], with zeros behind the end of a path."""
        return torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])[self.token_of]

    def tokens(self, x: Any) -> Any:
        """[L, D, ...] -> [1, N, ...]."""
        if not isinstance(x, Tensor):
            return x
        if x.shape[:2] != self.token_of.shape:
            raise UnsupportedError(_OTHER_SHAPE.format(tuple(x.shape), *self.token_of.shape))
        return x.flatten(0, 1)[self.place_of][None]


_KNOWN: Bounded[int, tuple[Known, _Paths]] = Bounded(8)
"""By the identity of a tree: all modules of a call read the same one."""


def _paths_of(tree: Tensor) -> _Paths:
    known = _KNOWN.get(id(tree))
    if known is not None and known[0].is_still(tree):
        return known[1]
    end, mask = on_host(tree)[[0, -1], 0, 0].unbind()
    token_of, place_of = _lines(end)
    filled = torch.cat([mask, mask.new_zeros(1)]).to(torch.int64)
    found = _Paths(*(x.to(tree.device) for x in (token_of, place_of, filled[token_of])))
    _KNOWN[id(tree)] = Known.of(tree), found
    return found


def count_leaves(subtree_end: Tensor) -> int:
    """Return how many rows ``run_on_paths`` runs for a tree, int [N]."""
    return max(2, int(_is_leaf(subtree_end).sum()))


def _is_leaf(end: Tensor) -> Tensor:
    return end == torch.arange(1, len(end) + 1)


def _lines(end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of each path [L, D], at least two paths, and one of its places for each token [N]."""
    count, depth = len(end), find_depths(end)
    index, leaves = torch.arange(count), torch.nonzero(_is_leaf(end)).flatten()
    # The ancestor of a leaf in some depth is the last token of that depth up to the leaf: found in (depth, index).
    order = torch.argsort(depth, stable=True)
    keys, level = (depth * count + index)[order], torch.arange(int(depth.max()) + 1)
    found = torch.searchsorted(keys, level * count + leaves[:, None], right=True) - 1
    lines = order[found].masked_fill(level > depth[leaves][:, None], count)
    place_of = torch.searchsorted(leaves, index) * len(level) + depth
    # One row is a special case in the code of models: their masks hide nothing then.
    return (lines if len(lines) > 1 else lines.repeat(2, 1)), place_of


# Modules -------------------------------------------------------------------------------------------------------------


def run_on_paths(module: nn.Module) -> None:
    """Make a module run on the paths of a tree that it gets as its mask."""
    slot, function = own_forward(module)
    if function is not None:
        put_forward(module, slot, _on_paths(function))


def _on_paths(function: Callable[..., Any]) -> types.FunctionType:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, shape = tree_flatten((args, kwargs))
        tree = next(filter(_may_be_tree, leaves), None)
        if tree is None:
            if running_on_tree():
                raise UnsupportedError(_CHANGED.format(type(self).__name__))
            return function(self, *args, **kwargs)
        paths = _paths_of(tree)
        args, kwargs = tree_unflatten(list(_given(leaves, tree, paths)), shape)
        return tree_map(paths.tokens, function(self, *args, **kwargs))

    made: types.FunctionType = mark_copy(forward, function)
    return made


def _given(leaves: Sequence[Any], tree: Tensor, paths: _Paths) -> Iterator[Any]:
    for x in leaves:
        if x is tree:
            yield paths.mask
        elif isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == (1, tree.shape[3]):
            yield paths.rows(x)
        else:
            yield x


def _may_be_tree(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dtype is torch.int32
        and x.dim() == 4
        and x.shape[0] > 1
        and x.shape[1] == x.shape[2] == 1
    )


_CHANGED = (
    "under treefx.convert a module with a recurrence gets a tree in place of its mask, and the code around {} changes "
    "or drops it. Change masks in the code around the blocks, or call treefx.unconvert(model)"
)
_OTHER_SHAPE = (
    "under treefx.convert a module with a recurrence must return a value per token, but a result has the shape {} on "
    "rows [{}, {}]. Call treefx.unconvert(model), or torch.compile(model, backend='treefx')"
)
