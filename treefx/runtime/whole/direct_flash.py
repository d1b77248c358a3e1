"""Trace one operator in place of flash attention that a model calls directly.

FlashAttention 2 and 3, kernels of the hub and ``torch.nn.attention.varlen`` have functions of one kind, under modules
with names that change with every build. They are known by their own name and arguments, and replaced if they agree with
the operator on a small example. Dropout, slopes, page tables, and other options without a place in the operator are
traced unchanged.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import ConstantVariable
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from treefx.passes.trace.flash import register_kernel

__all__ = ["direct_call_instead"]

_NAMES = {"flash_attn_func", "flash_attn_varlen_func", "varlen_attn"}
_ROLES = {
    "query": ("q", "query"), "key": ("k", "key"), "value": ("v", "value"), "query_ends": ("cu_seqlens_q", "cu_seq_q"),
    "key_ends": ("cu_seqlens_k", "cu_seq_k"), "sinks": ("s_aux", "learnable_sink"),
    "scale": ("softmax_scale", "scale"), "causal": ("causal", "is_causal"), "window": ("window_size",),
    "softcap": ("softcap",), "longest": ("max_seqlen_q", "max_q"), "longest_key": ("max_seqlen_k", "max_k"),
}  # fmt: skip
"""Role in the operator -> names of arguments."""
_TENSORS = ("query", "key", "value", "query_ends", "key_ends", "sinks")
_FREE = ("deterministic", "num_splits", "pack_gqa", "sm_margin", "enable_gqa")
"""Arguments that choose an implementation, not a result: the function gets them unchanged."""
_HEADS, _TOKENS, _FEATURES, _WINDOW = 2, 7, 64, 3
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference from the meaning, of numbers near 1; in half precisions another one."""
_HALF = 3e-2


def direct_call_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """``treefx::flash`` in place of such functions."""
    given = _given(function, args, kwargs) if _is_flash(function) else None
    if given is None:
        return None
    tensors, settings = given
    return _flash, [*tensors, *map(ConstantVariable.create, settings)], {}


def _flash(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor | None, key_ends: Tensor | None,
    sinks: Tensor | None, causal: bool, scale: float | None, window: int | None, softcap: float | None, kernel: str,
) -> Any:  # fmt: skip
    """Run an attention of [B, T, H, D], or of [N, H, D] with the ends of sequences."""
    if query_ends is not None:
        query, key, value = (x.view(1, *x.shape) for x in (query, key, value))
    out = torch.ops.treefx.flash(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, query_ends, key_ends, sinks,
        None, causal, scale, window, softcap, None, kernel,
    ).transpose(1, 2)  # fmt: skip
    return out if query_ends is None else out.flatten(0, 1)


# Which functions, called how ------------------------------------------------------------------------------------------


def _is_flash(function: Any) -> bool:
    return getattr(function, "__name__", None) in _NAMES and _Form.of(function) is not None


@dataclass(frozen=True)
class _Form:
    """Hold the arguments of a function: the name of each role, and defaults."""

    names: Mapping[str, str]
    defaults: Mapping[str, Any]

    @staticmethod
    @functools.lru_cache(256)
    def of(function: Callable[..., Any]) -> _Form | None:
        """Return the form; None if an unknown argument is required or a needed one is missing."""
        parameters = inspect.signature(function).parameters
        names = {role: name for role, called in _ROLES.items() for name in called if name in parameters}
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        known = set(names.values())
        must = {name for name, default in defaults.items() if default is inspect.Parameter.empty}
        complete = {"query", "key", "value", "scale", "window"} <= set(names) and must <= known
        return _Form(names, defaults) if complete and list(parameters)[0] == names["query"] else None


def _given(function: Any, args: Any, kwargs: Any) -> tuple[list[Any], tuple[Any, ...]] | None:
    """Return tensors and settings of ``_flash`` for a call; None for unsupported options."""
    form = _Form.of(function)
    assert form is not None
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # the function itself says so
        return None
    tensors = [given.pop(form.names.get(role, ""), None) for role in _TENSORS]
    for role in ("longest", "longest_key"):
        given.pop(form.names.get(role, ""), None)  # recomputed from the ends
    constants = {**form.defaults}
    try:
        constants |= {name: item.as_python_constant() for name, item in given.items()}
    except NotImplementedError:
        return None
    meaning = _meaning(form, constants)
    if meaning is None or any(_is_none(x) for x in tensors[:3]) or _is_none(tensors[3]) != _is_none(tensors[4]):
        return None
    example, *others = (x.as_proxy().node.meta["example_value"] for x in tensors[:3])
    if not all(statically_known_true(x.shape[-3] == example.shape[-3]) for x in others):
        return None  # keys of other tokens than the queries', a cache's or learned ones
    how = tuple((name, constants[name]) for name in _FREE if name in constants)
    lengths, sinks = not _is_none(tensors[3]), not _is_none(tensors[5])
    if not _computes(function, how, lengths, sinks, meaning, example.device, example.dtype):
        return None
    handed = [ConstantVariable.create(None) if x is None else x for x in tensors]
    return handed, (*meaning, _kernel(function, how, lengths))


def _is_none(item: Any) -> bool:
    return item is None or (isinstance(item, ConstantVariable) and item.value is None)


def _meaning(form: _Form, constants: Mapping[str, Any]) -> tuple[bool, float | None, int | None, float | None] | None:
    """Return causality, scale, window (visible keys) and softcap; None for other options."""
    for name, value in constants.items():
        if name not in form.names.values() and name not in _FREE and value != form.defaults[name]:
            return None
    left, right = (-1 if side is None else side for side in constants[form.names["window"]])
    causal = bool(constants[form.names["causal"]]) if "causal" in form.names else False
    if right != 0 and not (causal and (right == -1 or right == left)):
        return None
    softcap = constants[form.names["softcap"]] if "softcap" in form.names else None
    return True, constants[form.names["scale"]], None if left < 0 else left + 1, softcap or None


# Semantics
# -------------------------------------------------------------------------------------------------------------


def _kernel(function: Any, how: tuple[tuple[str, Any], ...], lengths: bool) -> str:
    """The name under which ``treefx::flash`` calls the function where it runs on rows."""
    form = _Form.of(function)
    assert form is not None
    name = f"{function.__module__}.{function.__name__}{dict(how)}"
    register_kernel(name, functools.partial(_run, function, form.names, dict(how), lengths))
    return name


def _run(
    function: Any, names: Mapping[str, str], how: Mapping[str, Any], lengths: bool, query: Tensor, key: Tensor,
    value: Tensor, mask: Tensor | None, *, softmax_scale: float | None, sliding_window: int | None,
    softcap: float | None, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, max_length_q: int | None,
    max_length_k: int | None, s_aux: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Call it as ``treefx::flash`` calls kernels, [B, T, H, D]."""
    asked: dict[str, Any] = {
        "scale": softmax_scale,
        "window": (-1 if sliding_window is None else sliding_window - 1, 0),
    }
    optional = {"softcap": softcap, "sinks": s_aux}
    asked |= {role: x for role, x in optional.items() if x is not None}
    asked |= {"causal": True} if "causal" in names else {}
    if lengths:
        asked |= {"query_ends": cu_seq_lens_q, "key_ends": cu_seq_lens_k}
        asked |= {"longest": max_length_q, "longest_key": max_length_k}
    given = {names[role]: x for role, x in asked.items()}
    operands = (x[0] if lengths else x for x in (query, key, value))
    found: Tensor = function(*operands, **given, **how)
    return found[None] if lengths else found


@functools.lru_cache(1024)
def _computes(
    function: Any, how: tuple[tuple[str, Any], ...], lengths: bool, sinks: bool, meaning: tuple[Any, ...],
    device: torch.device, dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Return whether a function agrees with the operator on a small example.

    Tested once per form of a call.
    """
    form = _Form.of(function)
    assert form is not None
    with unset_fake_temporarily(), torch.no_grad(), torch._C._DisableAutocast():
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, _TOKENS, _HEADS, _FEATURES, generator=generator, dtype=torch.float64) for _ in "qkv")
        sink = torch.randn(_HEADS, generator=generator, dtype=torch.float64) if sinks else None
        ends = torch.tensor([0, 4, _TOKENS], dtype=torch.int32) if lengths else None
        _, scale, window, softcap = meaning
        window = None if window is None else min(window, _WINDOW)
        expected = _attention(q, k, v, ends, sink, scale, window, softcap)
        at = functools.partial(torch.Tensor.to, device=device)
        q, k, v = (at(x, dtype=dtype) for x in (q, k, v))
        cut = None if ends is None else at(ends)
        try:
            found = _run(
                function, form.names, dict(how), lengths, q, k, v, None, softmax_scale=scale, sliding_window=window,
                softcap=softcap, cu_seq_lens_q=cut, cu_seq_lens_k=cut, max_length_q=4, max_length_k=4,
                **({} if sink is None else {"s_aux": at(sink, dtype=dtype)}),
            )  # fmt: skip
        except Exception:  # it says so again where the model calls it
            return False
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return False
        return bool((found.double().cpu() - expected).abs().max() <= _CLOSE.get(dtype, _HALF))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, sinks: Tensor | None, scale: float | None,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Causal attention inside of sequences, [1, T, H, D]."""
    place = torch.arange(q.shape[1])
    part = torch.zeros_like(place) if ends is None else torch.bucketize(place, ends[1:].long(), right=True)
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    score = softcap * torch.tanh(score / softcap) if softcap else score
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or len(place))) & (part[:, None] == part)
    score = score.masked_fill(~seen, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None, None].expand(*score.shape[:-1], 1)], -1)
    return torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1)[..., : len(place)], v)
