"""The invariants of a forest's packed order, each checked from the definition."""

from collections.abc import Iterator

import torch

from treefx.errors import ForestError
from treefx.forest import Forest

__all__ = ["validate_forest"]


def validate_forest(forest: Forest) -> None:
    """Check a forest built by hand or changed since it was built.

    Raises:
        ForestError: names the first invariant that does not hold and where.
    """
    for invariant, broken in _find_violations(forest):
        if bool(broken.any()):
            at = int(broken.nonzero()[0, 0])
            raise ForestError(
                f"not a valid forest: {invariant}; it fails first at index {at}. "
                "Build it with Forest.from_sequences or Forest.from_padded and leave its tensors unchanged"
            )


def _find_violations(forest: Forest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each invariant with a bool vector that is true where it is broken."""
    index = torch.arange(forest.num_tokens, device=forest.device)
    parent, end, depth = forest.parent, forest.subtree_end, forest.depth
    yield "token ids are at least 0", forest.tokens < 0
    yield "a parent stands before its child", (parent >= index) | (parent < -1)
    above, is_root = parent.clamp(min=0), parent < 0
    yield "depth is 0 at roots, else the parent's plus 1", depth != torch.where(is_root, 0, depth[above] + 1)
    yield "a subtree ends after its token and within the forest", (end <= index) | (end > forest.num_tokens)
    yield "a token lies in its parent's subtree", ~is_root & ((index >= end[above]) | (end > end[above]))
    # So every interval [k, end) holds k's whole subtree; it holds nothing else iff the sizes add up to the
    # number of (ancestor or self, token) pairs, which is the sum of depth + 1.
    extra = (end - index).sum() - (depth + 1).sum()
    yield "a subtree's interval holds only descendants", (extra != 0)[None]
    yield from _find_row_violations(forest)


def _find_row_violations(forest: Forest) -> Iterator[tuple[str, torch.Tensor]]:
    flat, offsets = forest.flat_token_of, forest.row_offsets
    yield "every row has a token", forest.row_lengths < 1
    yield "token_of lies within the forest", (flat < 0) | (flat >= forest.num_tokens)
    before = torch.cat([flat.new_tensor([-1]), flat[:-1]])
    before[offsets[:-1]] = -1
    yield "a row's tokens follow parent to child", forest.parent[flat] != before
    count = torch.bincount(flat, minlength=forest.num_tokens)
    yield "multiplicity counts the rows through a token", count != forest.multiplicity
    weight = torch.bincount(flat, weights=forest.raw_weight, minlength=forest.num_tokens)
    yield (
        "token_weight sums the rows' weights",
        ~torch.isclose(weight, forest.token_weight, rtol=1e-12, atol=1e-12),
    )
