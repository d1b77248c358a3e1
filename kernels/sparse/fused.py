"""Launch the Triton kernels of attention to listed keys.

A key's gradients are sums over the queries that list it. These queries lie together after one sort of all lists, so no
program adds to another's sums: results are the same bits every time. Nothing waits for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.small_launches import Launch
from treefx.kernels.sparse.problem import Listed

__all__ = ["backward", "forward", "invert"]

_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Rows of a product of tensor cores: smaller groups of heads are filled up, larger ones are split over programs."""
_BLOCK_ENTRIES = 1 << 13
"""Entries of a block of keys, or of queries: it fits into registers and shared memory with the other operands."""
_WARPS, _MORE_WARPS = 4, 8
"""Warps of a program; the latter with the most rows."""


def forward(given: Listed) -> tuple[Tensor, Tensor]:
    """Return the output ``[H, N, Dv]`` and the log-sum-exp ``[H, N]`` in float32."""
    from treefx.kernels.sparse.device_code import attend_listed  # only here: it imports Triton

    given = _dense_rows(given)
    heads, tokens, _ = given.q.shape
    out = given.q.new_empty(tokens, heads, given.v.shape[-1]).transpose(0, 1)
    lse = given.q.new_empty(heads, tokens, dtype=torch.float32)
    arguments = {
        **_operands(given),
        **{"Keys": given.keys, "Sinks": given.sinks, "Out": out, "Lse": lse},
        **{"out_head": out.stride(0), "out_token": out.stride(1)},
        **{"listed": given.keys.shape[1], **_of_group(given)},
    }
    with _on_device_of(given.q):
        Launch(attend_listed, _grid(given, arguments), arguments, _config(arguments)).run()
    return out, lse


def backward(grad_out: Tensor, given: Listed, out: Tensor, lse: Tensor) -> list[Tensor]:
    """Return the gradients of q, k and v, and of sinks if there are any."""
    from treefx.kernels.sparse.device_code import restore_keys, restore_queries  # only here: they import Triton

    given, grad = _dense_rows(given), _dense_row(grad_out)
    queries, bounds = invert(given.keys, given.k.shape[1])
    dq, dk, dv = (x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1) for x in (given.q, given.k, given.v))
    shared = {
        **_operands(given),
        **{"Grad": grad, "grad_head": grad.stride(0), "grad_token": grad.stride(1), "Lse": lse.contiguous()},
        "Delta": (grad.float() * out.float()).sum(-1).contiguous(),
    }
    of_queries = {
        **shared,
        **{"Keys": given.keys, "OfQ": dq, "of_head": dq.stride(0), "of_token": dq.stride(1)},
        **{"listed": given.keys.shape[1], **_of_group(given)},
    }
    of_keys = {
        **shared,
        **{"Queries": queries, "Bounds": bounds, "OfK": dk, "OfV": dv, "BLOCK_QUERIES": _block(shared)},
        **{"of_k_head": dk.stride(0), "of_k_token": dk.stride(1)},
        **{"of_v_head": dv.stride(0), "of_v_token": dv.stride(1)},
    }
    with _on_device_of(given.q):
        Launch(restore_queries, _grid(given, of_queries), of_queries, _config(of_queries)).run()
        Launch(restore_keys, (given.k.shape[1], given.k.shape[0]), of_keys, _config(of_keys)).run()
    return [dq, dk, dv, *given.sink_gradient(grad_out, out, lse)]


def invert(keys: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the queries that list each key, key by key, and where those of each key begin.

    Args:
        keys: ``[N, K]``, -1 for none.
        tokens: Number of keys M.

    Returns:
        int32 queries, as many as entries of ``keys``, in the order of their keys; int64 bounds ``[M + 1]``.
    """
    flat = keys.flatten()
    listed, order = torch.where(flat < 0, tokens, flat).sort(stable=True)
    bounds = torch.searchsorted(listed, torch.arange(tokens + 1, device=keys.device, dtype=listed.dtype))
    return (order // max(1, keys.shape[1])).int(), bounds


def _dense_row(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_rows(given: Listed) -> Listed:
    q, k, v = map(_dense_row, (given.q, given.k, given.v))
    sinks = None if given.sinks is None else given.sinks.contiguous()
    return Listed(q, k, v, given.keys.contiguous(), given.scale, sinks)


def _operands(given: Listed) -> dict[str, Any]:
    """Return what all kernels read."""
    named = {"q": given.q, "k": given.k, "v": given.v}
    steps = {f"{name}_{of}": x.stride(i) for name, x in named.items() for i, of in enumerate(("head", "token"))}
    width, values = given.q.shape[-1], given.v.shape[-1]
    return {
        **{"Q": given.q, "K": given.k, "V": given.v, "tokens": given.q.shape[1], "scale": given.scale, **steps},
        **{"GROUP": given.group, "WIDTH": width, "VALUES": values},
        **{"BLOCK_WIDTH": _power(width), "BLOCK_VALUES": _power(values)},
    }


def _of_group(given: Listed) -> dict[str, Any]:
    """Return the sizes of products of a group's heads and a block of keys."""
    block = _block(_operands(given))
    precision = "ieee" if given.q.dtype == torch.float32 else "tf32"
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, _power(given.group)))
    return {"ROWS": rows, "SPLITS": -(-given.group // rows), "BLOCK_KEYS": block, "PRECISION": precision}


def _grid(given: Listed, arguments: dict[str, Any]) -> tuple[int, int]:
    """Return a program per query and ROWS heads of a group."""
    return given.q.shape[1], given.k.shape[0] * arguments["SPLITS"]


def _block(arguments: dict[str, Any]) -> int:
    """Return how many keys, or queries, a program holds at a time."""
    widest: int = max(arguments["BLOCK_WIDTH"], arguments["BLOCK_VALUES"])
    return max(16, min(64, _BLOCK_ENTRIES // widest))


def _power(size: int) -> int:
    """Return the least power of two that products take, not below a size."""
    return max(16, 1 << (size - 1).bit_length())


def _config(arguments: dict[str, Any]) -> Config:
    rows = arguments.get("ROWS", 1)
    return Config(rows, arguments.get("BLOCK_KEYS", 1), _MORE_WARPS if rows == _MOST_ROWS else _WARPS, 1)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
