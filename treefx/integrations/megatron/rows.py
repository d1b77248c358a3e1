"""Read the rows of a call of Megatron's GPTModel: where each begins and holds tokens.

===========================  =====================================================================================
a call gives                 its rows
===========================  =====================================================================================
``input_ids [B, T]``         the B rows; with a mask of Transformer Engine that marks the padding of each of
                             them (``[B, T]``, true at tokens, or ``[B, 1, 1, T]``, true at padding), without it
``packed_seq_params``        the sequences of ``input_ids [1, L]``: they begin at ``cu_seqlens_q_padded`` (at
                             ``cu_seqlens_q`` where nothing is padded) and hold ``cu_seqlens_q.diff()`` tokens each
===========================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.runtime.reason import Cause, Reason

__all__ = ["Rows", "read_rows"]


@dataclass(frozen=True)
class Rows:
    """The rows of a call.

    Attributes:
        ids: int [B, T].
        starts: bool [B, T], where sequences of a packed row begin; None for rows [B, T].
        keep: bool [B, T], the positions that hold tokens; None for all.
        is_packed: Whether the sequences came with ``packed_seq_params``.
    """

    ids: Tensor
    starts: Tensor | None
    keep: Tensor | None
    is_packed: bool

    def positions(self) -> Tensor:
        """int64 [B, T]: which token of its row or sequence each position is."""
        column = torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)
        if self.starts is None:
            return column
        return column - torch.where(self.starts, column, 0).cummax(1).values


def read_rows(given: Mapping[str, Any], reads_padding: bool) -> Rows | Reason:
    """The rows of a call, or why it runs as it came.

    Args:
        given: The arguments of the call by name.
        reads_padding: Whether the attentions are causal independent of a mask of padding.
    """
    reason = next((Reason(cause, text) for name, cause, text in _OTHER if given.get(name) is not None), None)
    if reason is not None:
        return reason
    ids, packed, mask = (given.get(name) for name in ("input_ids", "packed_seq_params", "attention_mask"))
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        return Reason(Cause.INPUT, "the call gives no input_ids [B, T]")
    if packed is not None:
        return _read_packed(ids, packed)
    if mask is None or _is_causal(mask, ids):
        return Rows(ids, None, None, False)
    keep = _before_padding(mask, ids) if reads_padding else None
    if keep is not None:
        return Rows(ids, None, keep, False)
    return Reason(Cause.INPUT, "the call gives an attention_mask that is not causal alone")


_OTHER = (
    ("inference_context", Cause.CACHE, "the call gives an inference context"),
    ("inference_params", Cause.CACHE, "the call gives an inference context"),
    ("decoder_input", Cause.INPUT, "the call gives decoder_input, which no token ids stand for"),
    ("extra_block_kwargs", Cause.INPUT, "the call gives extra_block_kwargs, of which nothing is known on a tree"),
)


def _read_packed(ids: Tensor, packed: Any) -> Rows | Reason:
    if packed.qkv_format != "thd" or len(ids) != 1:
        return Reason(Cause.INPUT, f"the call packs sequences as {packed.qkv_format}, {len(ids)} rows, not thd in one")
    if getattr(packed, "cp_group", None) is not None:
        return Reason(Cause.INPUT, "packed_seq_params give a context-parallel group of their own")
    if getattr(packed, "tokens_per_sample", None) is not None:
        return Reason(Cause.INPUT, "packed_seq_params give tokens_per_sample, which routers cut rows by")
    offsets = packed.cu_seqlens_q.to(ids.device, torch.int64)
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    begins = offsets if padded is None else padded.to(ids.device, torch.int64)
    if int(begins[-1]) > ids.shape[1] or len(begins) != len(offsets):
        return Reason(Cause.INPUT, f"packed_seq_params describe {int(begins[-1])} positions, not {ids.shape[1]}")
    starts, keep = (torch.zeros(ids.shape[1] + 1, dtype=torch.int64, device=ids.device) for _ in range(2))
    lengths = offsets.diff()
    starts[begins[:-1][lengths > 0]] = 1
    one = torch.ones_like(lengths)
    keep.index_add_(0, begins[:-1], one).index_add_(0, begins[:-1] + lengths, -one)
    kept = keep.cumsum(0)[:-1] > 0
    return Rows(ids, starts[None, :-1] > 0, None if bool(kept.all()) else kept[None], True)


def _is_causal(mask: Any, ids: Tensor) -> bool:
    """Return whether a mask (True where hidden) hides exactly the later keys."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
        return False
    length = ids.shape[1]
    if mask.shape[1:] != (1, length, length) or len(mask) not in (1, len(ids)):
        return False
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return bool((mask == later).all())


def _before_padding(mask: Any, ids: Tensor) -> Tensor | None:
    """Return the positions [B, T] in front of the padding; None if the mask marks no row ends."""
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 4 and mask.dtype is torch.bool and mask.shape == (len(ids), 1, 1, ids.shape[1]):
        keep = ~mask[:, 0, 0]
    elif mask.shape == ids.shape:
        keep = mask != 0
    else:
        return None
    return keep if bool(keep[:, 0].all() & (keep[:, :-1] >= keep[:, 1:]).all()) else None
