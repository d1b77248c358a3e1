"""Count the distinct tokens of a call that ran every row separately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treefx.forests.trie import build_trie

__all__ = ["CallRows", "Counts"]

_NO_IDS = ("mask", "position", "label", "type", "segment", "target", "cache", "buffer")
"""Parts of the names of integer inputs [B, T] that are not token ids."""
_FLAT_IDS = ("ids", "tokens", "idx")
"""Ends of the names of integer inputs [T] that are."""
_PIXELS = "pixel"
"""Part of the names of images."""


@dataclass(frozen=True)
class Counts:
    """Tokens of the rows of one call, and how many of them are distinct."""

    raw_tokens: int
    distinct_tokens: int

    @property
    def ratio(self) -> float:
        """The sharing ratio that the call could have."""
        return self.raw_tokens / self.distinct_tokens if self.distinct_tokens else 1.0


@dataclass(frozen=True, eq=False)
class CallRows:
    """Hold token ids [B, T] of a call, its mask and positions; count lazily.

    Two tokens count as one where their prefixes of ids agree: other inputs may tell them apart, so that the number of
    distinct tokens is a lower bound.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor | None
    versions: tuple[int, ...]

    @classmethod
    def find(cls, named: Mapping[str, Any]) -> CallRows | None:
        """Find the rows among the inputs of a call.

        None without token ids, or where a cache holds earlier tokens.
        """
        tensors = {name: x for name, x in named.items() if type(x) is Tensor and not x.is_meta}
        ids = _find_ids(tensors)
        if ids is None:  # [T] without a dimension of rows; positions separate its sequences
            flat = {name: x[None] for name, x in tensors.items() if x.dim() == 1}
            ids = _find_ids({name: x for name, x in flat.items() if name.endswith(_FLAT_IDS)})
            tensors |= flat
        if ids is None or any(_may_be_cached(name, x) for name, x in tensors.items()):
            return None
        mask = _like(ids, tensors, "attention_mask")
        positions = _like(ids, tensors, "position_ids")
        return cls(ids, mask, positions, _versions(ids, mask, positions))

    def reach(self, values: Iterable[Any]) -> bool:
        """Return whether hidden states of the tokens are among a graph's inputs.

        Those of images have other sizes.
        """
        rows, columns = self.ids.shape
        leading = [tuple(x.shape[:2]) for x in values if isinstance(x, Tensor) and x.is_floating_point()]
        return any(sizes == (rows, columns) or sizes[:1] == (rows * columns,) for sizes in leading)

    @cached_property
    def counts(self) -> Counts | None:
        """None if an input has been changed in place since the call."""
        if _versions(self.ids, self.mask, self.positions) != self.versions:
            return None
        ids = self.ids.detach().cpu().numpy()
        kept = np.ones(1, dtype=bool) if self.mask is None else self.mask.detach().cpu().numpy() != 0
        kept = np.broadcast_to(kept, ids.shape)
        rows = [row[keep] for row, keep in zip(ids, kept, strict=True)]
        if self.positions is not None:
            places = np.broadcast_to(self.positions.detach().cpu().numpy(), ids.shape)
            rows = [
                part
                for row, place, keep in zip(rows, places, kept, strict=True)
                for part in np.split(row, np.flatnonzero(np.diff(place[keep]) < 0) + 1)
            ]
        rows = [row for row in rows if len(row)]
        return Counts(sum(map(len, rows)), build_trie(rows).num_tokens) if rows else None


def _may_be_cached(name: str, x: Tensor) -> bool:
    """Return whether a tensor may hold keys or values [B, heads, T, width]; images have as many dimensions."""
    return x.dim() == 4 and x.is_floating_point() and _PIXELS not in name


def _find_ids(tensors: Mapping[str, Tensor]) -> Tensor | None:
    integers = {
        name: x
        for name, x in tensors.items()
        if x.dim() == 2 and x.shape[1] > 1 and x.dtype in (torch.int64, torch.int32)
        and not any(word in name for word in _NO_IDS)
    }  # fmt: skip
    named = [x for name, x in integers.items() if name.rstrip("_").endswith("ids")]
    return next(iter(named or integers.values()), None)


def _like(ids: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    found = [x for key, x in tensors.items() if name in key and x.dim() == 2 and x.shape[1] == ids.shape[1]]
    return next((x for x in found if len(x) in (1, len(ids))), None)


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(-1 if x is None or x.is_inference() else x._version for x in tensors)
