"""Prove facts of masks [.., T, T] that the caller gives, by their values.

A mask that is an input may differ from call to call, so its values prove nothing in advance. They are looked at in
every call: where each query sees the kept keys of its past, or those of them in a window or in its own document, the
mask is a function of two values [B, T], which tell tokens apart as other inputs do. Any other mask is read on rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GivenMask", "parts_of_mask", "prove_mask"]


@dataclass(frozen=True)
class GivenMask:
    """Describe a mask in values per key and per query.

    mask[b, .., q, k] is ``shown`` where k <= q, k is kept and not before q's start, else ``hidden``.

    ``position`` is that of the input. Starts are a ``window`` (number of keys, the query's own included), given by
    row and query (``has_starts``), or zero.
    """

    position: int
    hidden: bool | int | float
    shown: bool | int | float
    window: int | None = None
    has_starts: bool = False

    @property
    def count(self) -> int:
        """The number of ``parts_of_mask``."""
        return 2 if self.has_starts else 1


def parts_of_mask(known: GivenMask, mask: Tensor) -> list[Tensor]:
    """Return kept keys, bool [L, T], and starts, if any, int64 [L, T]; L is 1 or B."""
    visible = _first_of_heads(mask) != known.hidden
    return [visible.any(1), *([_starts(visible)] if known.has_starts else [])]


def prove_mask(position: int, mask: Tensor) -> GivenMask | None:
    """Return the proof from the values of one call, or None."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2 or 0 in mask.shape:
        return None
    if mask.requires_grad or mask.is_complex() or not _is_same_for_heads(mask):
        return None
    first = _first_of_heads(mask)
    hidden, visible = first[0, 0, -1], first != first[0, 0, -1]
    shown = first[0, 0, 0] if bool(visible[0, 0, 0]) else first[visible][:1].sum()
    if not bool(visible.any()) or not bool((torch.where(visible, first, shown) == shown).all()):
        return None
    window, has_starts, found = _reach(visible)
    return GivenMask(position, hidden.item(), shown.item(), window, has_starts) if found else None


def _reach(visible: Tensor) -> tuple[int | None, bool, bool]:
    """(window, has starts, whether these and the kept keys make all of the mask)."""
    column = torch.arange(visible.shape[-1], device=visible.device)
    distance = column[:, None] - column
    seen = visible.any(1, keepdim=True) & (distance >= 0)
    if torch.equal(visible, seen):
        return None, False, True
    window = int(torch.where(visible, distance, 0).max()) + 1
    if torch.equal(visible, seen & (distance < window)):
        return window, False, True
    return None, True, torch.equal(visible, seen & (column >= _starts(visible)[..., None]))


def _starts(visible: Tensor) -> Tensor:
    """The first key that each query sees; behind all keys where it sees none."""
    return torch.where(visible.any(-1), visible.to(torch.int8).argmax(-1), visible.shape[-1])


def _first_of_heads(mask: Tensor) -> Tensor:
    """The mask as [L, T, T], L being its rows."""
    rows = mask.shape[0] if mask.dim() > 2 else 1
    return mask.detach().reshape(rows, -1, *mask.shape[-2:])[:, 0]


def _is_same_for_heads(mask: Tensor) -> bool:
    if mask.dim() < 4 or all(mask.shape[d] == 1 or mask.stride(d) == 0 for d in range(1, mask.dim() - 2)):
        return True
    heads = mask.detach().reshape(mask.shape[0], -1, *mask.shape[-2:])
    return bool((heads == heads[:, :1]).all())
