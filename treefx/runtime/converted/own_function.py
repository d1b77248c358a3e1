"""Check that the attention function of a module computes attention and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treefx.errors import UnsupportedError
from treefx.kernels.ops import attend
from treefx.kernels.score import Expr, evaluate
from treefx.runtime.converted.seam import Stated, eager_or_other

__all__ = ["check_function"]

_TOLERANCE = 1e-5
_TOKENS, _FEATURES = 5, 8
_OWN_KERNELS = ("transformers.integrations.flash_attention", "transformers.integrations.flex_attention")


def check_function(module: nn.Module, stated: Stated, planes: Sequence[Tensor], name: str) -> None:
    """Compare a module's attention function with tree attention, on random numbers.

    Code around the two products in a model file (a sink, a cap, a gate) is part of that function; tree attention
    replaces all of it. A bias stands in the mask that the function gets, or the function adds it: both are tried. Only
    transformers' own FlashAttention and flex_attention, which may not run here, are taken at its word.

    Args:
        module: An attention module of a skeleton; its sinks are overwritten.
        stated: Its proved score.
        planes: Numbers of made-up tokens, of one sequence, in the order of the planes.
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
            expected, got = _both(function, module, stated, planes)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise UnsupportedError(
                f"the attention function of {name} cannot be compared with attention: {type(error).__name__}: {first}"
            ) from error
    same = (torch.allclose(got.double(), item.double(), rtol=_TOLERANCE, atol=_TOLERANCE) for item in expected)
    if not any(same):
        raise UnsupportedError(f"the attention function of {name} computes more than attention")


def _both(function: Any, module: Any, stated: Stated, planes: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Compute the function with and without a bias in its mask, and tree attention."""
    sinks = getattr(module, "sinks", None) if stated.has_sinks else None
    if sinks is not None:
        sinks.copy_(torch.randn(sinks.shape))
    groups = getattr(module, "num_key_value_groups", 1)
    heads = stated.heads if stated.asks_of_heads else 2 * groups if sinks is None else sinks.numel()
    held = [x.dtype for x in (*module.parameters(), *module.buffers())]
    dtype = torch.float64 if torch.float64 in held else torch.float32
    counts = (heads, heads // groups, heads // groups)
    q, k, v = (torch.randn(1, count, _TOKENS, _FEATURES, dtype=dtype) for count in counts)
    tree = torch.stack([torch.full((_TOKENS,), _TOKENS, dtype=torch.int32), *planes])[:, None, None]
    buffers = [read.of(tree) for read in stated.reads]
    more: dict[str, Any] = {} if stated.softcap is None else {"softcap": stated.softcap}
    more |= {} if sinks is None else {"s_aux": sinks.to(dtype)}
    training, module.training = module.training, False
    masks = [mask.to(dtype) for mask in _masks(stated, heads, buffers)]
    expected = [function(module, q, k, v, mask, scaling=stated.scale, dropout=0.0, **more)[0] for mask in masks]
    module.training = training
    sinks = None if sinks is None else sinks.to(dtype)
    out = attend(q, k, v, tree[0, 0, 0], stated.score, buffers, sinks, "reference")
    return expected, out.transpose(1, 2)


def _masks(stated: Stated, heads: int, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return the hidden pairs as a mask, and the same with additive terms of the score."""
    place = torch.arange(_TOKENS)
    given = {
        "dot": torch.zeros(()), "q": place[:, None], "k": place[None], "head": torch.arange(heads)[:, None, None],
        "batch": torch.zeros(1, 1, 1, 1, dtype=torch.int64), "buffers": buffers,
    }  # fmt: skip

    def on_pairs(expr: Expr) -> Tensor:
        value: Tensor = evaluate(expr, **given)  # type: ignore[arg-type]
        return value.expand(1, heads, _TOKENS, _TOKENS)

    hidden = (place[:, None] < place).expand(1, heads, -1, -1)
    if stated.score.visible is not None:
        hidden = hidden | ~on_pairs(stated.score.visible).bool()
    bias = on_pairs(stated.score.value).float()
    if not bool(bias.any()):
        bias, hidden = bias[:, :1], hidden[:, :1] if not stated.asks_of_heads else hidden
    fill = torch.finfo(torch.float32).min
    found = [torch.zeros(hidden.shape).masked_fill(hidden, fill)]
    return [*found, bias.masked_fill(hidden, fill)] if bool(bias.any()) else found
