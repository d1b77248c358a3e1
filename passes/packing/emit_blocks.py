"""Emit attention within blocks: later keys of a block are appended as boundary keys.

In packed order a block is a run of tokens, each the only child of the one before it, since tokens are equal only if
their whole blocks are. Query q sees the later key k of its block iff ``first[k] <= q < k``, with the first token of the
block of each token: a boundary (``treefx.kernels.ops``) of all keys once more, empty for tokens outside of blocks::

    out = treefx.tree_attention(q, k, v, subtree_end, [twice], None, score, "auto", k, v, first, arange(N))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from treefx.kernels.common import Boundary
from treefx.kernels.score import Expr, walk
from treefx.passes.packing.emitters import Packer
from treefx.passes.scores.blocks import Blocks

__all__ = ["boundary_of_blocks", "with_outside"]


def boundary_of_blocks(
    packer: Packer, blocks: Blocks, key: Tensor, value: Tensor, evaluate: Callable[[Expr], Tensor]
) -> Boundary:
    """Build the boundary: all keys and values again, visible to earlier queries of the block.

    Args:
        packer: The packer of the graph, with the trie.
        blocks: Conditions that put tokens into one block.
        key: Keys [1, H, N, D].
        value: Values [1, H, N, D].
        evaluate: Evaluates an expression of one token at all tokens, [N].
    """
    own = torch.arange(packer.metadata.tokens, dtype=torch.int32, device=key.device)
    firsts = packer.once("firsts_of_blocks", blocks, lambda: _find_firsts(packer, blocks, own, evaluate))
    return Boundary(key, value, firsts, own)


def _find_firsts(packer: Packer, blocks: Blocks, own: Tensor, evaluate: Callable[[Expr], Tensor]) -> Tensor:
    """Find the first token of each token's block, int32 [N]; without a block the token."""
    is_next = packer.metadata.subtree_end[:-1] > own[1:]  # in the order of the tree: the child of the token before
    for member in map(evaluate, (*blocks.of_queries, *blocks.of_keys)):
        is_next = is_next & member[:-1].to(torch.bool) & member[1:].to(torch.bool)
    for number in map(evaluate, blocks.numbers):
        is_next = is_next & (number[:-1] == number[1:])
    starts = torch.where(torch.nn.functional.pad(~is_next, (1, 0), value=True), own, 0)
    return starts.cummax(0).values


def with_outside(score: Expr, buffers: list[Tensor]) -> list[Tensor]:
    """Repeat the buffers that a score reads by token, once for the boundary keys."""
    loads = [item for item in walk(score) if item[0] == "load"]
    by_token = {number for _, number, *indices in loads if indices[0] in (("q",), ("k",))}
    return [torch.cat([x, x]) if number in by_token else x for number, x in enumerate(buffers)]
