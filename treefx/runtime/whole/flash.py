"""Trace one operator in place of transformers' flash attention, without branches.

Two functions of transformers stand before all its flash kernels (FlashAttention 2, 3, 4, those of the hub). Both branch
on numbers of a call, so Dynamo breaks the graph there, in every layer. Here they are recognised by identity, not by
name: a trainer's replacement is traced unchanged, and its calls of the originals are replaced here. Written for
    transformers 5.23; other forms of calls run unchanged.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from treefx.passes.trace.flash import register_kernel

__all__ = ["flash_instead", "trace_instead"]

_UTILS, _MASKS = "transformers.modeling_flash_attention_utils", "transformers.masking_utils"
_HANDLED = {
    "query_states", "key_states", "value_states", "attention_mask", "query_length", "is_causal", "position_ids",
    "softmax_scale", "sliding_window", "softcap", "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "target_dtype", "attn_implementation", "s_aux",
}  # fmt: skip
"""The arguments that ``treefx::flash`` takes, or that say nothing to it."""


def flash_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """The functions of this file in place of transformers' own, which they may call in turn."""
    name = _name_of(function)
    if name in _INSTEAD and tx.f_code is not _INSTEAD[name].__code__:
        _taken[name] = function
        return _INSTEAD[name], args, kwargs
    if function in _LEFT:
        return _taken[_LEFT[function]], args, kwargs
    return None


def trace_instead(name: tuple[str, str], function: Any) -> None:
    """Trace a function in place of the one of this module and name."""
    _INSTEAD[name] = function


def _name_of(function: Any) -> tuple[str, str] | None:
    """Return module and name of a function's code; wrappers take on those of the wrapped one."""
    code = getattr(function, "__code__", None)
    return None if code is None else (function.__globals__.get("__name__"), code.co_name)


_taken: dict[Any, Any] = {}
"""Functions of transformers with a replacement in a trace."""


def _flash_as_it_is(*args: Any, **kwargs: Any) -> Any:
    """Stands for transformers' original function in Dynamo's traces."""


def _mask_as_it_is(*args: Any, **kwargs: Any) -> Any:
    """Stands for transformers' original function in Dynamo's traces."""


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *others: Any,
    **given: Any,
) -> Any:
    """Replace ``_flash_attention_forward``.

    query [B, T, H, D], key [B, T, Hkv, D], value [B, T, Hkv, D] -> [B, T, H, D].
    """
    kernel = given.get("attn_implementation")
    if others or not _loads(kernel) or _asks_for_more(given) or not _is_plain(query, key, attention_mask, given):
        return _flash_as_it_is(query, key, value, attention_mask, *others, **given)
    dtype = given.get("target_dtype")
    if dtype is not None and query.dtype == torch.float32:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ends = [given.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    cut = all([end is not None for end in ends])
    one_row = query.shape[0] == 1 and query.shape[1] > 1
    knows_sinks = _knows(kernel, "s_aux") or _knows(kernel, "learnable_sink")
    return torch.ops.treefx.flash(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attention_mask,
        given.get("position_ids") if one_row and not cut else None, ends[0] if cut else None, ends[1] if cut else None,
        given.get("s_aux") if knows_sinks else None, None, given["is_causal"], given.get("softmax_scale"),
        given.get("sliding_window") if _knows(kernel, "window_size") else None, given.get("softcap"),
        given.get("deterministic"), kernel,
    ).transpose(1, 2)  # fmt: skip


def _flash_mask(*args: Any, **given: Any) -> Any:
    """Replace ``flash_attention_mask``: return the mask [B, T] for the kernel to check."""
    mask, length, config = given.get("attention_mask"), given.get("kv_length"), given.get("config")
    if args or mask is None or config is None or not _is_flash(config._attn_implementation):
        return _mask_as_it_is(*args, **given)
    if mask.dim() != 2 or mask.shape[1] != length or given.get("q_length") != length:
        return _mask_as_it_is(*args, **given)
    return mask


def _is_plain(query: Tensor, key: Tensor, mask: Tensor | None, given: dict[str, Any]) -> bool:
    """Return whether queries and keys are of the same tokens, with numbers for each.

    A mask and positions give these numbers.
    """
    if query.shape[1] != key.shape[1] or (mask is not None and (mask.dim() != 2 or mask.shape[1] != key.shape[1])):
        return False
    positions, ends = given.get("position_ids"), given.get("cu_seq_lens_q")
    if query.shape[0] == 1 and positions is not None and (positions.dim() != 2 or positions.shape[0] != 1):
        return False
    return ends is None or ends.dim() == 1


def _asks_for_more(given: dict[str, Any]) -> bool:
    """Return whether an unsupported argument is given: dropout, caches, a block table."""
    for name, value in given.items():
        if name == "dropout" and value:
            return True
        if name not in _HANDLED and value is not None and value is not False and _is_meant(name):
            return True
    softcap: Any = given.get("softcap")
    return softcap is not None and not _knows(given.get("attn_implementation"), "softcap")


# Asked when Dynamo traces; the answers become constants of the graph --------------------------------------------------


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_meant(name: str) -> bool:
    """Whether an argument that the operator has none for means something to transformers."""
    functions = (_taken[_FLASH], sys.modules[_UTILS]._process_flash_attention_kwargs)
    return name != "dropout" and any(name in inspect.signature(function).parameters for function in functions)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _knows(implementation: str, name: str) -> bool:
    """Return whether the kernel takes an argument of this name.

    transformers leaves out most of those that it does not.
    """
    return name in _arguments_of(implementation)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _loads(implementation: str | None) -> bool:
    """Whether the kernel is there, and takes rows of different lengths."""
    if implementation is None or not _arguments_of(implementation):
        return False
    register_kernel(implementation, _taken[_FLASH])
    return True


def _arguments_of(implementation: str) -> set[str]:
    _, found = sys.modules[_UTILS].lazy_import_flash_attention(implementation)
    process = found[0] if isinstance(found, tuple) else found  # older versions have one
    takes = getattr(process, "keywords", {}).get("supports_mapping", {})
    return {name for name, there in takes.items() if there}


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_flash(implementation: str) -> bool:
    """Whether transformers' own functions call the kernel, which ask the mask again."""
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    own = sys.modules["transformers.integrations.flash_attention"]
    return functions.get(implementation) is own.flash_attention_forward and (
        _name_of(own._flash_attention_forward) == _FLASH
    )


_FLASH, _MASK = (_UTILS, "_flash_attention_forward"), (_MASKS, "flash_attention_mask")
_INSTEAD: dict[Any, FunctionType] = {
    _FLASH: cast(FunctionType, _flash_attention),
    _MASK: cast(FunctionType, _flash_mask),
}
"""Module and name of a function of transformers -> its replacement."""
_LEFT: dict[Any, tuple[str, str]] = {_flash_as_it_is: _FLASH, _mask_as_it_is: _MASK}
"""Stand-in -> the original function."""
