"""Flash attention without its kernels: functions of the same signatures that run plain attention, segment by segment.

``transformers`` finds them where it keeps the functions of the kernel it has loaded.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils as utils

__all__ = ["flash_stubs", "with_flash"]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: tuple[int, int], softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """q [B, T, H, D], k and v [B, T, Hkv, D]; FlashAttention's own meaning of its arguments."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    score = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    score = softcap * torch.tanh(score / softcap) if softcap else score
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    left, right = window[0], 0 if causal else window[1]
    seen = ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
    score = score.masked_fill(~seen, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None, None].expand(*score.shape[:-1], 1)], -1)
    return (score.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Rows of one length."""
    return _attend(q, k, v, softmax_scale, causal, window_size, softcap, s_aux)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Sequences behind each other, [N, H, D]."""
    ends = cu_seqlens_q.tolist()
    assert cu_seqlens_k.tolist() == ends and max_seqlen_q >= max(b - a for a, b in zip(ends, ends[1:], strict=False))
    pieces = [
        _attend(q[None, a:b], k[None, a:b], v[None, a:b], softmax_scale, causal, window_size, softcap, s_aux)[0]
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    return torch.cat(pieces)


@contextmanager
def flash_stubs(name: str = "flash_attention_2", **functions: Any) -> Iterator[None]:
    """These functions as the kernel that transformers has loaded under a name."""
    dense, lengths = functions.get("dense", flash_attn_func), functions.get("lengths", flash_attn_varlen_func)
    loaded = {
        "_loaded_implementation": name, "_flash_fn": dense, "_flash_varlen_fn": lengths, "_flash_with_kvcache_fn": None,
        "_pad_fn": utils._pad_input, "_unpad_fn": utils._unpad_input,
        "_process_flash_kwargs_fn": utils._lazy_define_process_function(lengths),
        "_process_with_kvcache_kwargs_fn": functools.partial(dict),
    }  # fmt: skip
    loaded = {key: value for key, value in loaded.items() if hasattr(utils, key)}  # transformers 5.17 has less of them
    before = {key: getattr(utils, key) for key in loaded}
    vars(utils).update(loaded)
    try:
        yield
    finally:
        vars(utils).update(before)


def with_flash(model: nn.Module, name: str = "flash_attention_2") -> nn.Module:
    """A model that calls flash attention; transformers itself would look for the package first."""
    model.config._attn_implementation_internal = name
    return model
