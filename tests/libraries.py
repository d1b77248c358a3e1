"""Stand-ins for recurrence libraries, with the names, signatures and decorators of their last releases.

Each computes token by token, in the dtype of its inputs. ``with installed():`` makes them importable; a model file
that is loaded inside binds them as transformers does where the packages are installed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests import models

__all__ = ["CALLS", "double_with_libraries", "installed"]

CALLS: Counter[str] = Counter()
"""How often each function ran."""


class _Kernel(torch.autograd.Function):
    """A function that autograd cannot look into, as Triton kernels are: its backward runs its loop again."""

    @staticmethod
    def forward(ctx: Any, loop: Any, settings: dict[str, Any], *tensors: Any) -> Any:
        ctx.loop, ctx.settings = loop, settings
        ctx.save_for_backward(*tensors)
        return loop(*tensors, **settings)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.loop(*leaves, **ctx.settings)
        results = [out] if isinstance(out, Tensor) else list(out)
        found = iter(torch.autograd.grad(results, [x for x in leaves if x is not None], grads, allow_unused=True))
        return None, None, *[None if x is None else next(found) for x in leaves]


def _delta_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None, *, scale: float, normalised: bool,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Results [B, T, H, E] and final states [S, H, D, E]; sequences of one row lie between ``bounds``."""
    if normalised:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeats, 2) for x in (q * scale, k))
    if bounds is not None:
        assert v.shape[0] == 1 and bounds[-1] == v.shape[1] and (first is None or len(first) == len(bounds) - 1)
        parts = zip(bounds, bounds[1:], strict=False)
        found = [
            _delta_loop(
                *(x[:, a:b] for x in (q[:, :, ::repeats], k[:, :, ::repeats], v, g, beta)),
                None if first is None else first[n : n + 1], scale=1.0, normalised=False, bounds=None,
            )
            for n, (a, b) in enumerate(parts)
        ]  # fmt: skip
        return torch.cat([out for out, _ in found], 1), torch.cat([state for _, state in found])
    state, out = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1]) if first is None else first, []
    for t in range(v.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        read = (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - read))[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1), state


@torch.compiler.disable
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:  # fmt: skip
    """flash-linear-attention: [B, T, H, D] each, g and beta [B, T, H]."""
    CALLS["chunk_gated_delta_rule"] += 1
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    settings = {"scale": scale or q.shape[-1] ** -0.5, "normalised": use_qk_l2norm_in_kernel, "bounds": bounds}
    out, final = _Kernel.apply(_delta_loop, settings, q, k, v, g, beta, initial_state)
    return out, final if output_final_state else None


@torch.compiler.disable
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:  # fmt: skip
    """flash-linear-attention: as the gated delta rule, with a decay per channel, g [B, T, H, D]."""
    CALLS["chunk_kda"] += 1
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    settings = {"scale": scale or q.shape[-1] ** -0.5, "normalised": use_qk_l2norm_in_kernel, "bounds": bounds}
    out, final = _Kernel.apply(_delta_loop, settings, q, k, v, g, beta, initial_state)
    return out, final if output_final_state else None


@torch.library.custom_op("treefx_tests::conv_fwd", mutates_args={"out"})
def _conv_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequences: Tensor | None, out: Tensor, activation: bool
) -> None:
    out.copy_(_convolved(x, weight, bias, activation, sequences))


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, sequences: Tensor | None = None
) -> Tensor:
    """Sequences are numbered [B, T]; tokens of the number -1 are padding, and become 0."""
    taps, columns = weight.shape[1], x.shape[2]
    padded = F.pad(x, (taps - 1, 0))
    numbers = torch.zeros_like(x[:, 0], dtype=torch.int32) if sequences is None else sequences
    before = F.pad(numbers, (taps - 1, 0), value=-2)
    parts = [padded[:, :, i : i + columns] * (before[:, i : i + columns] == numbers)[:, None] for i in range(taps)]
    out = sum(weight[None, :, i, None] * parts[i] for i in range(taps))
    out = out if bias is None else out + bias[None, :, None]
    return (F.silu(out) if activation else out) * (numbers >= 0)[:, None]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sequences: Tensor | None, activation: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.sequences, ctx.activation, out = sequences, activation, torch.empty_like(x)
        _conv_fwd(x, weight, bias, sequences, out, activation)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        leaves = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = _convolved(*leaves, ctx.activation, ctx.sequences)
        found = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], grad))
        return *[None if x is None else next(found) for x in leaves], None, None


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """causal-conv1d: an autograd function around a custom operator that writes to its operand, [B, C, T]."""
    assert initial_states is None and not return_final_states and activation in (None, "silu", "swish")
    CALLS["causal_conv1d_fn"] += 1
    return _Convolution.apply(x, weight, bias, seq_idx, activation in ("silu", "swish"))


def _ssd_loop(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    first: Tensor | None = None, *, softplus: bool, limit: tuple[float, float], sequences: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if softplus else dt).clamp(*limit)
    B, C = (item.repeat_interleave(x.shape[2] // item.shape[2], 2) for item in (B, C))
    state, out = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1]) if first is None else first, []
    for t in range(x.shape[1]):
        if sequences is not None and t:
            state = state * (sequences[:, t] == sequences[:, t - 1])[:, None, None, None]
        state = state * (A * dt[:, t]).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1) + (0 if D is None else D[:, None] * x[:, t]))
    return torch.stack(out, 1), state


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:  # fmt: skip
    """mamba_ssm: x [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N]."""
    assert z is None and cu_seqlens is None
    CALLS["mamba_chunk_scan_combined"] += 1
    settings = {"softplus": dt_softplus, "limit": dt_limit, "sequences": seq_idx}
    out, final = _Kernel.apply(_ssd_loop, settings, x, dt, A, B, C, D, dt_bias, initial_states)
    return (out, final) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor, D: Tensor,
    chunk_size: int, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, activation: str = "silu",
    rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-6, outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None, headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
) -> Tensor:  # fmt: skip
    """mamba_ssm: the same fused with its convolution, gated norm and projection."""
    assert initial_states is None and not return_final_states and headdim and activation == "silu"
    CALLS["mamba_split_conv1d_scan_combined"] += 1
    settings = {
        "limit": dt_limit, "eps": rmsnorm_eps, "width": headdim, "groups": ngroups, "before": norm_before_gate,
        "sequences": seq_idx,
    }  # fmt: skip
    tensors = (zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight, outproj_weight, outproj_bias)
    return _Kernel.apply(_fused_loop, settings, *tensors)


def _fused_loop(
    zxbcdt: Tensor, weight: Tensor, bias: Tensor | None, dt_bias: Tensor, A: Tensor, D: Tensor,
    norm: Tensor | None, out: Tensor | None, out_bias: Tensor | None, *, limit: tuple[float, float], eps: float,
    width: int, groups: int, before: bool, sequences: Tensor | None,
) -> Tensor:  # fmt: skip
    heads, mixed = len(A), len(weight)
    z, xbc, dt = zxbcdt.split([heads * width, mixed, heads], -1)
    xbc = _convolved(xbc.mT, weight, bias, True, sequences).mT
    x, B, C = xbc.split([heads * width, *[(mixed - heads * width) // 2] * 2], -1)
    B, C = (item.unflatten(-1, (groups, -1)) for item in (B, C))
    settings: Any = {"softplus": True, "limit": limit, "sequences": sequences}
    y, _ = _ssd_loop(x.unflatten(-1, (heads, width)), dt, A, B, C, D, dt_bias, **settings)
    y = y.flatten(2)
    if norm is None:
        y = y * F.silu(z)
    else:
        y = y if before else y * F.silu(z)
        parts = y.unflatten(-1, (groups, -1))
        y = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(2) * norm
        y = y * F.silu(z) if before else y
    return y if out is None else F.linear(y, out, out_bias)


def _selective_loop(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    bias: Tensor | None, *, softplus: bool,
) -> Tensor:  # fmt: skip
    delta = delta if bias is None else delta + bias[:, None]
    delta = F.softplus(delta) if softplus else delta
    state, out = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        state = state * (delta[:, :, t, None] * A).exp() + (delta * u)[:, :, t, None] * B[:, None, :, t]
        out.append((state * C[:, None, :, t]).sum(-1))
    found = torch.stack(out, 2)
    found = found if D is None else found + D[:, None] * u
    return found if z is None else found * F.silu(z)


def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False,
) -> Tensor:  # fmt: skip
    """mamba_ssm: u, delta, z [B, C, T], A [C, N], B and C [B, N, T]."""
    assert not return_last_state
    CALLS["selective_scan_fn"] += 1
    return _Kernel.apply(_selective_loop, {"softplus": delta_softplus}, u, delta, A, B, C, D, z, delta_bias)


def mamba_inner_fn(
    xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, x_proj_weight: Tensor, delta_proj_weight: Tensor,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, A: Tensor, B: Tensor | None = None,
    C: Tensor | None = None, D: Tensor | None = None, delta_bias: Tensor | None = None, B_proj_bias: None = None,
    C_proj_bias: None = None, delta_softplus: bool = True, checkpoint_lvl: int = 1, b_rms_weight: None = None,
    c_rms_weight: None = None, dt_rms_weight: None = None, b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """mamba_ssm: Mamba 1 fused with its convolution and projections, xz [B, 2 C, T] -> [B, T, out]."""
    assert B is None and C is None and b_rms_weight is None
    CALLS["mamba_inner_fn"] += 1
    tensors = (
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, D,
        delta_bias,
    )  # fmt: skip
    return _Kernel.apply(_inner_loop, {"softplus": delta_softplus}, *tensors)


def _inner_loop(
    xz: Tensor, weight: Tensor, bias: Tensor | None, project: Tensor, of_delta: Tensor, out: Tensor,
    out_bias: Tensor | None, A: Tensor, D: Tensor | None, delta_bias: Tensor | None, *, softplus: bool,
) -> Tensor:  # fmt: skip
    x, z = xz.chunk(2, 1)
    x = _convolved(x, weight.squeeze(1), bias, True)
    rank, states = of_delta.shape[1], A.shape[1]
    delta, B, C = (project @ x).split([rank, states, states], 1)
    y = _selective_loop(x, of_delta @ delta, A, B, C, D, z, delta_bias, softplus=softplus)
    return F.linear(y.mT, out, out_bias)


def _package(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(functions)
    return module


@contextmanager
def installed() -> Iterator[None]:
    """Let the packages be importable."""
    delta = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    ssd = SimpleNamespace(
        mamba_chunk_scan_combined=mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined=mamba_split_conv1d_scan_combined,
    )
    selective = SimpleNamespace(selective_scan_fn=selective_scan_fn, mamba_inner_fn=mamba_inner_fn)
    packages = {
        "fla": _package("fla", ops=SimpleNamespace(gated_delta_rule=delta, kda=SimpleNamespace(chunk_kda=chunk_kda))),
        "causal_conv1d": _package("causal_conv1d", causal_conv1d_fn=causal_conv1d_fn),
        "mamba_ssm": _package(
            "mamba_ssm",
            ops=SimpleNamespace(triton=SimpleNamespace(ssd_combined=ssd), selective_scan_interface=selective),
        ),
    }
    before = {name: sys.modules.get(name) for name in packages}
    sys.modules.update(packages)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def double_with_libraries(name: str, **changes: Any) -> nn.Module:
    """A model in float64 (``models.double``), whose file was loaded while the libraries were installed."""
    config = AutoConfig.for_model(name, **{**models.ZOO["common"], **changes})
    config._experts_implementation = "batched_mm"  # grouped products have no float64
    original = AutoModelForCausalLM._model_mapping[type(config)]
    with installed():
        module = models.lifted(original.__module__, "libraries")
    return models.double_from(getattr(module, original.__name__), config)
