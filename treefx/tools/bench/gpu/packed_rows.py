"""Pack a batch's rows into one for PyTorch's own attention, as trainers do."""

import inspect
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from treefx.data import Batch
from treefx.tools.bench.attention.sample import causal
from treefx.tools.bench.job.models import require_transformers

__all__ = ["FLEX", "VARLEN", "attend_packed_rows", "pack_rows"]

VARLEN, FLEX = "varlen", "flex"
"""FlashAttention along rows of given lengths; FlexAttention under the mask of documents."""
_NAME = "rows_of_one_row"
_SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""PyTorch 2.11 has no such argument, and takes fewer key heads than query heads as they are."""


def pack_rows(batch: Batch) -> dict[str, Any]:
    """Return a transformers model's arguments for a batch in one row, without padding.

    No row's first token is a label: the row before it would predict it.
    """
    lengths = batch.attention_mask.sum(1).tolist()
    kept = batch.attention_mask.bool()
    labels = batch.labels.clone()
    labels[:, 0] = -100
    device = batch.input_ids.device
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return {
        "input_ids": batch.input_ids[kept][None],
        "labels": labels[kept][None],
        "position_ids": torch.cat([torch.arange(length, device=device) for length in lengths])[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths)),
    }


def attend_packed_rows(model: Any, lengths: list[int], kernel: str = VARLEN) -> None:
    """Let a transformers model attend along the rows that `pack_rows` has put into one.

    Args:
        model: it keeps its weights; its attention is registered with transformers.
        lengths: of the rows. On a CPU, where neither kernel has a backward, each row attends alone.
        kernel: `VARLEN` or `FLEX`.
    """
    transformers = require_transformers()
    attend = _attend_flex(lengths, model.device) if kernel == FLEX else _attend_varlen
    spans = list(pairwise([0, *accumulate(lengths)]))

    def attend_rows(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if query.device.type == "cpu":
            rows = [causal(*(tensor[:, :, start:stop] for tensor in (query, key, value))) for start, stop in spans]
            return torch.cat(rows, dim=2).transpose(1, 2), None
        return attend(query, key, value, scaling, kwargs), None

    transformers.AttentionInterface.register(_NAME, attend_rows)
    transformers.AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(_NAME)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    ends, longest = given["cu_seq_lens_q"], given["max_length_q"]
    causally: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), **_SHARED_KEYS}
    out: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **causally)
    return out[None]  # type: ignore[no-any-return]


def _attend_flex(lengths: list[int], device: torch.device) -> Any:
    """Return FlexAttention with a mask of earlier tokens of the same row."""
    if device.type == "cpu":
        return None
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))

    def same_row(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (row[q] == row[k]) & (q >= k)

    mask = create_block_mask(same_row, None, None, len(row), len(row), device=str(device))

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        out: Any = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    return attend
