"""Hold the tree of a call, which layers look up by the attention mask that encodes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.errors import UnsupportedError
from treefx.kernels.memory import Known

__all__ = ["Tree", "Trees", "first_places", "is_tree"]


@dataclass(frozen=True, eq=False)
class Tree:
    """The N distinct tokens of a call with rows [B, T].

    Attributes:
        subtree_end: int32 [N], passed through the layers as ``attention_mask``.
        depth: int64 [N], the row of the rotary table that a token reads.
        token_TB: int64 [T, B], the token of each position, -1 where a position was dropped. Sequence first, as
            Megatron's hidden states are.
        first_N: int64 [N], where in ``token_TB``, flattened, each token stands first; anywhere for filler tokens.
        padding_mask: bool [B, T] as the caller gave it for the routers, True at padding; None without one.
    """

    subtree_end: Tensor
    depth: Tensor
    token_TB: Tensor
    first_N: Tensor
    padding_mask: Tensor | None = None


class Trees:
    """Hold the trees that a forward or a recomputation may still need, while their masks live."""

    def __init__(self) -> None:
        self._known: list[tuple[Known, Tree | None]] = []
        self.now: Tree | None = None
        """The tree of the layer that runs; None on rows."""

    def add(self, tree: Tree) -> None:
        """Remember a tree by its mask, without keeping the mask."""
        others = [(known, other) for known, other in self._known if not known.is_gone()]
        self._known = [(Known.of(tree.subtree_end), _without_mask(tree)), *others]
        self.now = tree

    def enter(self, mask: object) -> None:
        """Make the tree that an attention mask stands for the one of the layer that runs now.

        Recomputation hands a detached tensor of the same memory, by which the tree is found.
        """
        if not is_tree(mask):
            self.now = None
            return
        assert isinstance(mask, Tensor)
        found = next((tree for known, tree in self._known if known.is_still(mask)), None)
        if found is None:
            raise UnsupportedError(_COPIED)
        self.now = found

    def current(self) -> Tree:
        """The tree of the layer that runs."""
        assert self.now is not None
        return self.now


def is_tree(mask: object) -> bool:
    """Return whether an attention mask encodes a tree.

    Megatron's own are boolean and have two dimensions or four.
    """
    return isinstance(mask, Tensor) and mask.dim() == 1 and mask.dtype is torch.int32


def first_places(token_TB: Tensor, count: int) -> Tensor:
    """Return the first place of each of ``count`` tokens; filler tokens get the last place."""
    flat = token_TB.reshape(-1)
    first = torch.full((count + 1,), flat.numel() - 1, dtype=torch.int64, device=flat.device)
    first.scatter_reduce_(0, torch.where(flat < 0, count, flat), torch.arange(len(flat), device=flat.device), "amin")
    return first[:-1]


def _without_mask(tree: Tree) -> Tree:
    return Tree(tree.depth.new_empty(0), tree.depth, tree.token_TB, tree.first_N, tree.padding_mask)


_COPIED = (
    "treefx hands the tree of a call to Megatron's layers as attention_mask, and expected that tensor in every layer "
    "and recomputation, got a copy of it; turn off what copies saved tensors (cpu_offloading, say), or call "
    "treefx.integrations.megatron.unconvert(model)"
)
