"""Causal convolution along the paths of a forest: each tap reads an ancestor.

Plain tensor operators throughout, so it traces into a graph with a symbolic number of tokens, and autograd sums the
gradients of a fork's children.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treefx.errors import InputError

__all__ = ["find_depths", "find_parents", "tree_conv1d"]


def find_depths(subtree_end: Tensor) -> Tensor:
    """Return the number of strict ancestors of each token: open subtrees before it.

    Args:
        subtree_end: exclusive end of each token's subtree in packed order, int ``[N]``.

    Returns:
        int64 ``[N]``.
    """
    tokens = subtree_end.shape[0]
    ends = subtree_end.to(torch.int64)
    closed = torch.zeros(tokens + 1, dtype=torch.int64, device=ends.device)
    closed = closed.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:tokens]
    return torch.arange(tokens, device=ends.device) - closed


def find_parents(depth: Tensor, subtree_end: Tensor) -> Tensor:
    """The parent of each token.

    Args:
        depth: position of each token on its path, int ``[N]``; roots may stand at any depth.
        subtree_end: exclusive end of each token's subtree in packed order, int ``[N]``.

    Returns:
        int64 ``[N]``: the packed index of the ancestor one step up; -1 where there is none.
    """
    count, depth = depth.shape[0], depth.to(torch.int64)
    index = torch.arange(count, device=depth.device)
    # A parent is the last token before this one that is one step up; sorted by (depth, index), a search finds it.
    order = torch.argsort(depth, stable=True)
    keys = (depth * count + index)[order]
    place = torch.searchsorted(keys, (depth - 1) * count + index) - 1
    candidate = order[place.clamp(min=0)]
    above = (place >= 0) & (depth[candidate] == depth - 1) & (subtree_end[candidate].to(torch.int64) > index)
    return torch.where(above, candidate, -1)


def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parent: Tensor,
    *,
    distances: Sequence[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """``F.conv1d`` over the path of every token, left-padded with zeros.

    Args:
        x: tokens ``[N, C]``.
        weight: ``[C', C // groups, K]``.
        bias: ``[C']`` or None.
        parent: int64 ``[N]``, -1 at roots.
        distances: how far above the token each of the K taps reads, descending; by default K - 1, ..., 0.
        groups: as in ``F.conv1d``.

    Returns:
        ``[N, C']``.

    Raises:
        InputError: the distances are not K non-negative numbers.
    """
    taps = weight.shape[2]
    steps = list(range(taps - 1, -1, -1)) if distances is None else list(distances)
    if len(steps) != taps or any(step < 0 for step in steps):
        raise InputError(f"tree_conv1d expected {taps} distances of at least 0, one per tap, got {steps}")
    windows = _windows(x, parent, steps)
    if groups == x.shape[1] == weight.shape[0]:
        total = windows[0] * weight[:, 0, 0]
        for tap in range(1, taps):
            total = total + windows[tap] * weight[:, 0, tap]
        return total if bias is None else total + bias
    stacked = torch.stack(windows, dim=2)  # [N, C, K]
    return torch.nn.functional.conv1d(stacked, weight, bias, groups=groups).squeeze(2)


def _windows(x: Tensor, parent: Tensor, steps: Sequence[int]) -> list[Tensor]:
    """The values ``steps[i]`` above each token, zero above the root."""
    root = parent.shape[0]
    up = torch.cat([torch.where(parent < 0, root, parent), parent.new_full((1,), root)])
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    found: dict[int, Tensor] = {0: x}
    ancestor = torch.arange(root, device=parent.device)
    for distance in range(1, max(steps) + 1):
        ancestor = up[ancestor]
        if distance in steps:
            found[distance] = padded.index_select(0, ancestor)
    return [found[step] for step in steps]
