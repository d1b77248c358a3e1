"""Functions with the names and arguments of Liger's, and their derivatives written by hand; and a Llama with them.

Liger's own are Triton kernels for GPUs. What they compute is what their sources say (liger-kernel 0.8.5).
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

__all__ = [
    "FUNCTIONS", "LigerFusedLinearCrossEntropyFunction", "LigerGELUMulFunction", "LigerLayerNormFunction",
    "LigerReLUSquaredFunction", "LigerRMSNormFunction", "fused_loss", "gelu", "loss_and_slopes", "patch_llama",
    "slope_of_gelu",
]  # fmt: skip


class LigerRMSNormFunction(torch.autograd.Function):
    """Everything in float32 but the product with the weight, unless the mode says otherwise."""

    @staticmethod
    def forward(
        ctx: Any, X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
        in_place: bool = True, row_mode: Any = None,
    ) -> Tensor:  # fmt: skip
        wide = X if casting_mode == "none" else X.float()
        rstd = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / X.shape[-1] + eps)
        ctx.save_for_backward(X, W, rstd)
        ctx.offset, ctx.in_place = offset, in_place
        return ((wide * rstd).to(X.dtype) * (offset + W)).to(X.dtype)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:  # type: ignore[override]
        X, W, rstd = ctx.saved_tensors
        m, normed = dY * (W + ctx.offset), X * rstd
        dX = rstd * (m - normed * (m * normed).sum(-1, keepdim=True) / X.shape[-1])
        dW = (dY * normed).flatten(0, -2).sum(0)
        return (dY.copy_(dX) if ctx.in_place else dX.to(X.dtype)), dW.to(W.dtype), None, None, None, None, None


class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1,
        rotary_dim: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(cos, sin)
        return _turn(q, cos, sin), _turn(k, cos, sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(dq, cos, -sin), _turn(dk, cos, -sin), None, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    c, s = cos[:, None, :, :half], sin[:, None, :, :half]
    return torch.cat([x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s], -1)


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.factors = gate_multiplier, down_multiplier
        wide = a.float() * gate_multiplier
        return (wide * wide.sigmoid()).to(b.dtype) * b * down_multiplier

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        gate, down = ctx.factors
        wide = a.float() * gate
        sigmoid = wide.sigmoid()
        silu = wide * sigmoid
        da = dc * down * (silu * (1 - sigmoid) + sigmoid) * b * gate
        return da.to(a.dtype), dc * down * silu.to(b.dtype), None, None


def gelu(a: Tensor) -> Tensor:
    return 0.5 * a * (1 + torch.tanh(0.7978845608028654 * (a + 0.044715 * a**3)))


def slope_of_gelu(a: Tensor) -> Tensor:
    t = torch.tanh(0.7978845608028654 * (a + 0.044715 * a**3))
    return 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * a * a)


class LigerGELUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return gelu(a) * b

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return dc * slope_of_gelu(a) * b, dc * gelu(a)


class LigerLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        wide = X if X.dtype is torch.float64 else X.float()
        centred = wide - wide.mean(-1, keepdim=True)
        rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(centred * rstd, W, rstd)
        return (centred * rstd * W + B).to(X.dtype)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:  # type: ignore[override]
        normed, W, rstd = ctx.saved_tensors
        m = dY * W
        dX = rstd * (m - m.mean(-1, keepdim=True) - normed * (m * normed).mean(-1, keepdim=True))
        dW, dB = ((dY * factor).flatten(0, -2).sum(0) for factor in (normed, torch.ones_like(normed)))
        return dX.to(dY.dtype), dW.to(W.dtype), dB.to(W.dtype), None


class LigerReLUSquaredFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor) -> Tensor:
        ctx.save_for_backward(X)
        return X.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:  # type: ignore[override]
        (X,) = ctx.saved_tensors
        return dY * 2 * X.clamp(min=0)


def loss_and_slopes(
    ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Any, ignore_index: int, softcap: Any, number: int
) -> Tensor:
    """A sum over what counts, over a number; the gradients of hidden [N, H], weight and bias are saved."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)).float()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    counted = target != ignore_index
    picked = target.where(counted, 0)
    chosen = torch.nn.functional.one_hot(picked, logits.shape[1])
    slope = (capped.softmax(-1) - chosen) * counted[:, None] / number
    slope = (slope * (1 if softcap is None else 1 - (capped / softcap) ** 2)).to(hidden.dtype)
    ctx.save_for_backward(slope @ weight, slope.T @ hidden, None if bias is None else slope.sum(0))
    return -(capped.log_softmax(-1).gather(1, picked[:, None])[:, 0] * counted).sum() / number


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    """The gradients are made with the loss, in float32, and scaled by its own later."""

    @staticmethod
    def forward(
        ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Any = None, ce_weight: Any = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
        softcap: Any = None, return_z_loss: bool = False, accum_dtype: Any = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> tuple[Tensor, None, None, None]:  # fmt: skip
        number = max(int((target != ignore_index).sum()), 1) if reduction == "mean" else 1
        loss = loss_and_slopes(ctx, _input, weight, target, bias, ignore_index, softcap, number)
        ctx.given = len(ctx.needs_input_grad)
        return loss, None, None, None

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, *_: Any) -> Any:  # type: ignore[override]
        hidden, weight, bias = (None if x is None else x * of_loss.to(x.dtype) for x in ctx.saved_tensors)
        return (hidden, weight, None, bias, *[None] * 14)[: ctx.given]


FUNCTIONS: dict[str, type[torch.autograd.Function]] = {
    item.__name__: item
    for item in (
        LigerRMSNormFunction, LigerLayerNormFunction, LigerRopeFunction, LigerSiLUMulFunction, LigerGELUMulFunction,
        LigerReLUSquaredFunction, LigerFusedLinearCrossEntropyFunction,
    )
}  # fmt: skip


def patch_llama(
    monkeypatch: pytest.MonkeyPatch, gate: str = "LigerSiLUMulFunction", module: Any = modeling_llama, **others: Any
) -> None:
    """Put the functions where ``apply_liger_kernel_to_llama`` puts Liger's; ``others`` in place of some of them."""
    functions: dict[str, Any] = {**FUNCTIONS, **others}

    def norm(self: nn.Module, hidden: Tensor) -> Tensor:
        apply: Callable[..., Tensor] = functions["LigerRMSNormFunction"].apply
        return apply(hidden, self.weight, self.variance_epsilon, 0.0, "llama", True, None)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return functions["LigerRopeFunction"].apply(q, k, cos, sin, None, unsqueeze_dim)

    def gated(self: Any, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(functions[gate].apply(self.gate_proj(x), self.up_proj(x)))
        return hidden

    monkeypatch.setattr(module.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", rotate)
    monkeypatch.setattr(module.LlamaMLP, "forward", gated)


def fused_loss(model: Any, function: Any = LigerFusedLinearCrossEntropyFunction, **changes: Any) -> None:
    """``forward`` as ``apply_liger_kernel_to_llama`` replaces it where labels are given: a loss, and no logits."""
    settings = {"reduction": "mean", "softcap": None, **changes}

    def forward(self: Any, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **more).last_hidden_state
        if labels is None:
            return CausalLMOutput(logits=self.lm_head(hidden))
        targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        flat, head, reduction = hidden.view(-1, hidden.shape[-1]), self.lm_head.weight, settings["reduction"]
        how = (None, None, -100, 0.0, 0.0, reduction, settings["softcap"], False, None, False, False, False)
        loss, _, _, _ = function.apply(flat, head, targets, *how)
        return CausalLMOutput(loss=loss if reduction == "mean" else loss / num_items_in_batch)

    model.forward = MethodType(forward, model)
