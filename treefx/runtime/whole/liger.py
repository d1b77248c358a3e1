"""Trace plain operators in place of Liger's functions.

Liger's norms, rotary embeddings, gated products and cross entropy are ``autograd.Function`` s around Triton kernels.
Nothing can be proved of those, so each of them would run on rows; and the inner compiler fuses the plain operators by
itself. They are known by the name of their class and their arguments, and replaced if they agree with the plain
operators on a small example, forward and backward. Others, and options without a plain form here, are traced unchanged.

Before::

    y = LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True)

After::

    y = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables import TensorVariable
from torch._subclasses.fake_tensor import unset_fake_temporarily

from treefx.passes.trace.flash import autograd_recorded
from treefx.runtime.whole.heads import setting_of

__all__ = ["liger_instead"]

_CLOSE = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Largest difference from the plain form, of numbers near 1: kernels compute in float32. In half precisions another."""
_HALF = 3e-2


def liger_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """Plain operators in place of such functions."""
    plain = _plain_form(function, args, kwargs)
    return None if plain is None else (plain, [*args], dict(kwargs))


def _plain_form(function: type[torch.autograd.Function], args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """The plain form of a call, if there is one that computes the same."""
    known = _KNOWN.get(function.__name__)
    if known is None:
        return None
    try:
        given = inspect.signature(known.plain).bind(*args, **kwargs).arguments
        settings = {name: setting_of(x) for name, x in given.items() if not isinstance(x, TensorVariable)}
    except (NotImplementedError, TypeError):
        return None
    names = tuple(inspect.signature(function.forward).parameters)[1:]
    if names[: len(known.arguments)] != known.arguments or not known.takes(settings):
        return None
    tensors = {name: x.as_proxy().node.meta["example_value"] for name, x in given.items() if name not in settings}
    if not known.fits(tensors):
        return None
    device = tensors[known.arguments[0]].device
    types = tuple((name, x.dtype) for name, x in tensors.items())
    return known.plain if _computes(function, known, types, tuple(settings.items()), device) else None


# Semantics
# -------------------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    """At least in float32, in which the kernels compute."""
    return x if x.dtype is torch.float64 else x.float()


def _rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True,
    row_mode: bool | None = None,
) -> Tensor:  # fmt: skip
    wide = X if casting_mode == "none" else _wide(X)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = normed.to(X.dtype) if casting_mode == "llama" else normed
    if W is None:
        return normed.to(X.dtype)
    return (normed * (offset + (_wide(W) if casting_mode == "gemma" else W))).to(X.dtype)


def _layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    return F.layer_norm(_wide(X), X.shape[-1:], _wide(W), _wide(B), eps).to(X.dtype)


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn q [B, H, T, D] and k [B, Hkv, T, D]; cos and sin [B or 1, T, D] in equal halves."""
    half = cos.shape[-1] // 2
    c, s = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., :half].to(s.dtype), x[..., half:].to(s.dtype)
        return torch.cat([(a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)], -1)

    return turned(q), turned(k)


def _silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    return F.silu(_wide(a) * gate_multiplier).to(b.dtype) * b * down_multiplier


def _gelu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(_wide(a), approximate="tanh").to(b.dtype) * b


def _relu_squared(X: Tensor) -> Tensor:
    return F.relu(X).square()


def _linear_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ce_impl: None = None, ce_mode: None = None, chunk_mem_const: int = 1,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """Compute logits that only a loss reads in chunks where they are large (``vocab_tail``)."""
    logits = _wide(F.linear(_input, weight, bias))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
    if reduction == "mean":  # 0 where nothing is counted
        loss = loss / (target != ignore_index).sum().clamp(min=1)
    return loss, None, None, None


# Which of them --------------------------------------------------------------------------------------------------------


_SHAPES = {
    "rows": (1, 6, 16), "weight": (16,), "heads": (1, 2, 6, 16), "angles": (1, 6, 16), "tokens": (6, 16),
    "head": (9, 16), "classes": (9,), "targets": (6,),
}  # fmt: skip
"""Small operands, by their kind."""
_OF_ANY_WIDTH = ("classes", "targets")


@dataclass(frozen=True)
class _Known:
    """A function of Liger.

    Attributes:
        plain: The same in plain operators, of the same arguments.
        arguments: Its first ones, by name; a class of this name with others is another one.
        operands: The kinds of those that are tensors.
        settings: Allowed values of settings by name; other settings are free.
    """

    plain: Callable[..., Any]
    arguments: tuple[str, ...]
    operands: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def takes(self, settings: Mapping[str, Any]) -> bool:
        """Whether a call's settings have a plain form."""
        return all(settings.get(name, allowed[0]) in allowed for name, allowed in self.settings)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a call's tensors are known operands, of one width.

        Rows may have any number of dimensions.
        """
        kinds, width = dict(self.operands), tensors[self.arguments[0]].shape[-1]
        return all(
            name in kinds
            and (kinds[name] == "rows" or x.dim() == len(_SHAPES[kinds[name]]))
            and (kinds[name] in _OF_ANY_WIDTH or x.shape[-1] == width)
            for name, x in tensors.items()
        )


_ROWS = (("a", "rows"), ("b", "rows"))
_KNOWN = {
    "LigerRMSNormFunction": _Known(
        _rms_norm, ("X", "W", "eps", "offset", "casting_mode"), (("X", "rows"), ("W", "weight")),
        (("casting_mode", ("llama", "gemma", "none")),),
    ),
    "LigerLayerNormFunction": _Known(
        _layer_norm, ("X", "W", "B", "eps"), (("X", "rows"), ("W", "weight"), ("B", "weight"))
    ),
    "LigerRopeFunction": _Known(
        _rope, ("q", "k", "cos", "sin"), (("q", "heads"), ("k", "heads"), ("cos", "angles"), ("sin", "angles")),
        (("unsqueeze_dim", (1,)), ("rotary_dim", (None,))),
    ),
    "LigerSiLUMulFunction": _Known(_silu_mul, ("a", "b"), _ROWS),
    "LigerGELUMulFunction": _Known(_gelu_mul, ("a", "b"), _ROWS),
    "LigerReLUSquaredFunction": _Known(_relu_squared, ("X",), (("X", "rows"),)),
    "LigerFusedLinearCrossEntropyFunction": _Known(
        _linear_cross_entropy,
        ("_input", "weight", "target", "bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing",
         "reduction", "softcap"),
        (("_input", "tokens"), ("weight", "head"), ("target", "targets"), ("bias", "classes")),
        (("ce_weight", (None,)), ("ignore_index", (-100,)), ("lse_square_scale", (0.0,)), ("label_smoothing", (0.0,)),
         ("reduction", ("mean", "sum")), ("return_z_loss", (False,)), ("use_token_scaling", (False,)),
         ("return_token_accuracy", (False,)), ("return_predicted_tokens", (False,))),
    ),
}  # fmt: skip


@functools.lru_cache(1024)
def _computes(
    function: type[torch.autograd.Function], known: _Known, types: tuple[tuple[str, torch.dtype], ...],
    settings: tuple[tuple[str, Any], ...], device: torch.device,
) -> bool:  # fmt: skip
    """Return whether a function and its plain form agree in results and all gradients.

    Tested once per form of a call.
    """
    kinds = dict(known.operands)
    with unset_fake_temporarily(), autograd_recorded(), torch.inference_mode(mode=False), torch._C._DisableAutocast():
        operands = {name: _example(seed, kinds[name], device, dtype) for seed, (name, dtype) in enumerate(types)}
        try:
            found, expected = (_results(run, known, operands, dict(settings)) for run in (function.apply, known.plain))
        except Exception:  # it says so again where the model calls it
            return False
        close = max(_CLOSE.get(dtype, _HALF) for _, dtype in types if dtype.is_floating_point)
        return all(map(functools.partial(_are_close, close), found, expected))


def _example(seed: int, kind: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "targets":  # one that does not count
        return torch.tensor([3, 0, -100, 8, 3, 1], device=device, dtype=dtype)
    x = torch.randn(_SHAPES[kind], generator=generator, dtype=torch.float64)
    if kind == "angles":
        x = torch.cat([x.chunk(2, -1)[0]] * 2, -1)
    elif kind == "rows":  # small ones too: there an epsilon next to or under a root counts
        x = x * torch.tensor([1, 0.1, 0.01, 0.001, 1, 0.1], dtype=x.dtype).view(-1, 1)
    return x.to(device, dtype).requires_grad_(kind != "angles")


def _results(
    run: Callable[..., Any], known: _Known, operands: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> list[Tensor]:
    """Results, and gradients of all operands that have one."""
    given = {**settings, **{name: x * 1 for name, x in operands.items()}}  # a function may write into its own
    parameters = inspect.signature(known.plain).parameters
    last = max(number for number, name in enumerate(parameters) if name in given)
    handed = [given.get(name, item.default) for name, item in list(parameters.items())[: last + 1]]
    found = run(*handed)
    results = [x for x in found if x is not None] if isinstance(found, tuple) else [found]
    weights = [torch.arange(x.numel(), device=x.device).cos().view_as(x).to(x.dtype) for x in results]
    leaves = [x for x in operands.values() if x.requires_grad]
    kept = [x.detach().clone() for x in results]  # its backward may write into its arguments
    return kept + list(torch.autograd.grad(results, leaves, weights))


def _are_close(close: float, found: Tensor, expected: Tensor) -> bool:
    """Each row for itself: gradients of small ones are large."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    scale = 1 + expected.double().abs().amax(-1, keepdim=True)
    return bool(((found.double() - expected.double()).abs() <= close * scale).all())
