"""The rows of a batch behind each other in one row, for PyTorch's flash attention: what trainers do without a tree."""

import inspect
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from treefx.bench.attention.sample import causal
from treefx.bench.job.models import require_transformers
from treefx.data import Batch

__all__ = ["attend_packed_rows", "pack_rows"]

_NAME = "rows_of_one_row"
_SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""PyTorch 2.11 has no such argument, and takes fewer key heads than query heads as they are."""


def pack_rows(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a transformers model for the batch's rows in one, without padding.

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


def attend_packed_rows(model: Any, lengths: list[int]) -> None:
    """Let a transformers model attend along the rows that `pack_rows` has put into one.

    Args:
        model: it keeps its weights; its attention is registered with transformers.
        lengths: of the rows: on a CPU, which has no flash attention for rows in one, each attends alone.
    """
    transformers = require_transformers()
    spans = list(pairwise([0, *accumulate(lengths)]))

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [causal(*(tensor[:, :, start:stop] for tensor in (q, k, v))) for start, stop in spans]
        return torch.cat(rows, dim=2).transpose(1, 2)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if query.device.type == "cpu":
            return alone(query, key, value), None
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        ends, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
        causally: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0), **_SHARED_KEYS}
        out: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **causally)
        return out[None], None

    transformers.AttentionInterface.register(_NAME, attend)
    transformers.AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(_NAME)
