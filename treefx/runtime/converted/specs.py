"""From lifted attentions to what ``seam`` computes: scale, softcap, window, sinks; and that the model's own function is
just that."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.kernels.ops import attend
from treefx.kernels.score import Expr
from treefx.passes.scores.attention_facts import Attention, reads_key_alone
from treefx.runtime.converted.seam import Spec, eager_or_other, score_of

__all__ = ["Lifted", "check_function", "lifted_as", "named"]

_WINDOW = ("sub", ("cq",), ("ck",))
_TOLERANCE = 1e-5
_TOKENS, _FEATURES = 5, 8
_OWN_KERNELS = ("transformers.integrations.flash_attention", "transformers.integrations.flex_attention")


@dataclass(frozen=True)
class Lifted:
    """What an attention computes, the conditions on keys that are to be asked of a call, and those that cannot be."""

    spec: Spec
    of_keys: tuple[Expr, ...]
    others: tuple[Expr, ...]


def lifted_as(attention: Attention, redundant: Collection[Expr]) -> Lifted:
    """Take a lifted attention apart; conditions that all tokens of a call meet are ``redundant``.

    Raises:
        UnsupportedError: Its logit is another one, or its mask may not hide what it is to hide.
    """
    scale, softcap = _logit(attention.score)
    window: int | None = None
    of_keys: list[Expr] = []
    others: list[Expr] = []
    for condition in attention.conditions + attention.padding:
        if condition in redundant:
            continue
        if condition[0] == "lt" and condition[1] == _WINDOW and condition[2][0] == "const":
            window = int(condition[2][1])
        else:
            (of_keys if reads_key_alone(condition) else others).append(condition)
    if attention.doubt is not None:
        raise UnsupportedError("the fill of a mask is finite and may not hide what is below it")
    spec = Spec(scale, softcap, window, attention.sinks is not None)
    return Lifted(spec, tuple(sorted(of_keys, key=repr)), tuple(others))


def _logit(score: Expr) -> tuple[float, float | None]:
    """Scale and softcap of ``scale * q.k`` or ``cap * tanh(scale * q.k / cap)``."""
    match score:
        case ("dot", *_):
            return 1.0, None
        case ("mul", ("dot", *_), ("const", scale)):
            return float(scale), None
        case ("div", ("dot", *_), ("const", by)):
            return 1 / float(by), None
        case ("mul", ("tanh", ("div", inner, ("const", cap))), ("const", again)) if cap == again:
            scale, none = _logit(inner)
            if none is None:
                return scale, float(cap)
    raise UnsupportedError(
        f"the logit of an attention is neither a scaled nor a capped product of query and key: {named(score)}"
    )


def named(expr: Expr) -> str:
    """An expression in words for messages."""
    items = [item for item in expr[1:] if item and isinstance(item, str | tuple)]
    inside = [item if isinstance(item, str) else named(item) for item in items]
    return f"{expr[0]}({', '.join(inside)})" if inside else str(expr[0])


def check_function(module: nn.Module, spec: Spec, name: str) -> None:
    """Compare the attention function that a module calls with tree attention, on random numbers.

    What surrounds the two products in a model file (a sink, a cap, a gate) is part of that function; tree attention
    takes the place of all of it. Only transformers' own FlashAttention and flex_attention, which may not run here, are
    taken at its word.

    Args:
        module: An attention module of a skeleton; its sinks are overwritten.
        spec: What it is proved to compute.
        name: For messages.

    Raises:
        UnsupportedError: The two differ.
    """
    function = eager_or_other(module)
    if getattr(function, "__module__", None) in _OWN_KERNELS:
        return
    with torch.no_grad(), torch._C._DisableAutocast(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            expected, got = _both(function, module, spec)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise UnsupportedError(
                f"the attention function of {name} cannot be compared with attention: {type(error).__name__}: {first}"
            ) from error
    if not torch.allclose(got.double(), expected.double(), rtol=_TOLERANCE, atol=_TOLERANCE):
        raise UnsupportedError(f"the attention function of {name} computes something beside attention")


def _both(function: Any, module: Any, spec: Spec) -> tuple[Tensor, Tensor]:
    sinks = getattr(module, "sinks", None) if spec.sinks else None
    if sinks is not None:
        sinks.copy_(torch.randn(sinks.shape))
    groups = getattr(module, "num_key_value_groups", 1)
    heads = 2 * groups if sinks is None else sinks.numel()
    q, k, v = (torch.randn(1, count, _TOKENS, _FEATURES) for count in (heads, heads // groups, heads // groups))
    place = torch.arange(_TOKENS)
    hidden = place[:, None] < place
    if spec.window is not None:
        hidden = hidden | (place[:, None] - place >= spec.window)
    mask = torch.zeros(1, 1, _TOKENS, _TOKENS).masked_fill(hidden, torch.finfo(q.dtype).min)
    more = {} if spec.softcap is None else {"softcap": spec.softcap}
    more |= {} if sinks is None else {"s_aux": sinks.float()}
    training, module.training = module.training, False
    expected = function(module, q, k, v, mask, scaling=spec.scale, dropout=0.0, **more)[0]
    module.training = training
    end = torch.full((_TOKENS,), _TOKENS, dtype=torch.int32)
    buffers = [] if spec.window is None else [place.to(torch.int32)]
    sinks = None if sinks is None else sinks.float()
    out = attend(q, k, v, end, score_of(spec, padded=False), buffers, sinks, "reference")
    return expected, out.transpose(1, 2)
