"""The tokens of one observed call, and their counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from treefx.forests.trie import Codes, number_prefixes
from treefx.runtime.lost_sharing.distinct_tokens import CallRows
from treefx.runtime.observed.host_copies import HostCopies, copy_to_host

__all__ = ["DistinctTokens", "ObservedCall", "merge", "read_call", "takes_ids"]

_IGNORED = -100
"""Label of a token without loss, as everywhere in PyTorch and transformers."""
_KEEPS = ("logits_to_keep", "num_logits_to_keep")
"""Arguments of transformers' models: how many of the last columns get logits."""

_USUAL = {"ids": "input_ids", "mask": "attention_mask", "positions": "position_ids", "labels": "labels"}

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DistinctTokens:
    """Distinct tokens, sorted by the number of their prefix.

    Attributes:
        prefixes: uint64 [N], see ``number_prefixes``.
        rows: int64 [N], how many rows go through each.
        has_loss: bool [N], whether any of these rows predicts it under the loss; None where the call does not say so.
    """

    prefixes: Codes
    rows: Ints
    has_loss: Bools | None

    def __len__(self) -> int:
        return len(self.prefixes)


_NOTHING = DistinctTokens(np.zeros(0, np.uint64), np.zeros(0, np.int64), None)


def merge(parts: Sequence[DistinctTokens]) -> DistinctTokens:
    """The distinct tokens of several calls together."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else _NOTHING
    known = all(part.has_loss is not None for part in parts)
    flags = np.concatenate([part.has_loss for part in parts if part.has_loss is not None]) if known else None
    rows = np.concatenate([part.rows for part in parts])
    return _distinct(np.concatenate([part.prefixes for part in parts]), rows, flags)


def _distinct(prefixes: Codes, rows: Ints, has_loss: Bools | None) -> DistinctTokens:
    order = np.argsort(prefixes)
    in_order = prefixes[order]
    starts = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    flags = None if has_loss is None else np.logical_or.reduceat(has_loss[order], starts)
    return DistinctTokens(in_order[starts], np.add.reduceat(rows[order], starts), flags)


@dataclass(frozen=True)
class ObservedCall:
    """The rows of one call, on the host.

    Attributes:
        copies: ``ids`` [B, T], and ``mask``, ``positions`` and ``labels`` where the call has them.
        names: The caller's name of each.
        settings: Arguments that are numbers, texts or None, by name.
        kept_columns: How many of the last columns get logits; None: all.
    """

    copies: HostCopies
    names: Mapping[str, str]
    settings: Mapping[str, Any]
    kept_columns: int | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Those of the call, by the caller's names."""
        self.copies.wait()
        return {self.names[role]: tensor for role, tensor in self.copies.tensors.items()}

    def flat(self) -> tuple[Ints, Ints, Bools | None]:
        """Return token ids [raw] row after row, the starts of sequences, and loss positions.

        A packed row is several sequences: one begins where positions return.
        """
        self.copies.wait()
        arrays = {name: tensor.numpy() for name, tensor in self.copies.tensors.items()}
        ids = arrays["ids"]
        shape = ids.shape
        keep = np.broadcast_to(arrays["mask"] != 0, shape) if "mask" in arrays else np.ones(shape, dtype=bool)
        row, column = np.nonzero(keep)
        starts = np.r_[True, row[1:] != row[:-1]] if len(row) else np.zeros(0, dtype=bool)
        if "positions" in arrays:
            places = np.broadcast_to(arrays["positions"], shape)[row, column]
            starts = starts | (places == 0) | np.r_[False, places[1:] < places[:-1]]
        return ids[row, column].astype(np.int64), np.flatnonzero(starts), self._loss(arrays, row, column, starts)

    def _loss(self, arrays: Mapping[str, Any], row: Ints, column: Ints, starts: Bools) -> Bools | None:
        """Which tokens are predicted under the loss: nothing predicts the first one of a sequence."""
        columns = arrays["ids"].shape[1]
        if "labels" in arrays:
            found: Bools = arrays["labels"][row, column] != _IGNORED
        elif self.kept_columns:  # the logits of a column predict the next one
            found = column > columns - self.kept_columns
        else:
            return None
        return np.logical_and(found, ~starts)

    def rows(self) -> list[Ints]:
        """The sequences, one by one."""
        ids, starts, _ = self.flat()
        return np.split(ids, starts[1:]) if len(ids) else []

    def count(self) -> tuple[DistinctTokens, Codes]:
        """The distinct tokens of the call, and the number of the last prefix of each sequence."""
        ids, starts, has_loss = self.flat()
        if not len(ids):
            return _NOTHING, _NOTHING.prefixes
        lengths = np.diff(np.append(starts, len(ids)))
        places = np.arange(len(ids)) - np.repeat(starts, lengths)
        sums = number_prefixes([ids[None]], places[None])[0]
        before = np.where(starts > 0, sums[starts - 1], np.uint64(0))
        prefixes = sums - np.repeat(before, lengths)
        return _distinct(prefixes, np.ones(len(ids), dtype=np.int64), has_loss), prefixes[starts + lengths - 1]


def takes_ids(named: Mapping[str, Any]) -> bool:
    """Whether token ids are among the arguments of a call."""
    return CallRows.find(named) is not None


def read_call(named: Mapping[str, Any]) -> tuple[ObservedCall, Tensor] | None:
    """Copy ids, masks, positions and labels of a call, and find its tensor of ids.

    None without ids.
    """
    rows = CallRows.find(named)
    if rows is None or rows.ids.numel() == 0:
        return None
    found = {"ids": rows.ids, "mask": rows.mask, "positions": rows.positions, "labels": _labels(named, rows.ids)}
    names = {role: _name_of(tensor, role, named) for role, tensor in found.items() if tensor is not None}
    settings = {name: value for name, value in named.items() if value is None or isinstance(value, bool | int | str)}
    kept = next((named[name] for name in _KEEPS if isinstance(named.get(name), int)), None)
    return ObservedCall(copy_to_host(found), names, settings, kept or None), rows.ids


def _labels(named: Mapping[str, Any], ids: Tensor) -> Tensor | None:
    found = (x for name, x in named.items() if "label" in name and isinstance(x, Tensor))
    return next((x for x in found if x.shape == ids.shape and not x.is_floating_point()), None)


def _name_of(tensor: Tensor, role: str, named: Mapping[str, Any]) -> str:
    """The caller's name: ids may be labels too."""
    names = (name for name, value in named.items() if value is tensor and ("label" in name) == (role == "labels"))
    return next(names, _USUAL[role])
