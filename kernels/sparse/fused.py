"""Launch the Triton kernels of attention to listed keys.

A key's gradients are sums over the queries that list it. These queries lie together after one sort of all lists, so no
program adds to another's sums: results are the same bits every time. Where many query heads share a key, each query
adds its part to float32 sums instead, unless the program wants deterministic algorithms. Nothing waits for the device.
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
_ADDING_GROUP = 16
"""Query heads of a key head from which on a query's part is a product of tensor cores: it is added, not sorted."""
_ROW_ENTRIES, _ROW_ENTRIES_BACKWARD = 1 << 15, 1 << 14
"""Entries of the rows of a program: with more of them the compiler spills registers."""
_BLOCK_ENTRIES = 1 << 13
"""Entries of a block of keys, or of queries: it fits into registers and shared memory with the other operands."""
_WARPS, _MORE_WARPS = 4, 8
"""Warps of a program; the latter with the most rows, and with wide ones."""
_WIDE = 256


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
        **{"listed": given.keys.shape[1], **_of_group(given, _ROW_ENTRIES)},
    }
    with _on_device_of(given.q):
        Launch(attend_listed, _grid(given, arguments), arguments, _config(arguments)).run()
    return out, lse


def backward(grad_out: Tensor, given: Listed, out: Tensor, lse: Tensor) -> list[Tensor]:
    """Return the gradients of q, k and v, and of sinks if there are any."""
    given, grad = _dense_rows(given), _dense_row(grad_out)
    dq = _empty_like(given.q)
    shared = {
        **_operands(given),
        **{"Grad": grad, "grad_head": grad.stride(0), "grad_token": grad.stride(1), "Lse": lse.contiguous()},
        "Delta": (grad.float() * out.float()).sum(-1).contiguous(),
    }
    adds = given.group >= _ADDING_GROUP and not torch.are_deterministic_algorithms_enabled()
    with _on_device_of(given.q):
        _launch_by_query(given, shared, dq, None, None)
        if adds:
            dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (given.k, given.v))
            _launch_by_query(given, shared, None, dk, dv)
        else:
            dk, dv = _empty_like(given.k), _empty_like(given.v)
            _launch_by_key(given, shared, dk, dv)
    return [dq, dk.to(given.k.dtype), dv.to(given.v.dtype), *given.sink_gradient(grad_out, out, lse)]


def _empty_like(x: Tensor) -> Tensor:
    heads, tokens, width = x.shape
    return x.new_empty(tokens, heads, width).transpose(0, 1)


def _launch_by_query(given: Listed, shared: dict[str, Any], dq: Tensor | None, *of_keys: Tensor | None) -> None:
    """Write the gradient of queries, or add to those of keys and values."""
    from treefx.kernels.sparse.device_code import restore_queries  # only here: it imports Triton

    dk, dv = of_keys
    arguments = {
        **shared,
        **{"Keys": given.keys, "OfQ": dq, "OfK": dk, "OfV": dv},
        **_steps(of=dq, of_k=dk, of_v=dv),
        **{"listed": given.keys.shape[1], **_of_group(given, _ROW_ENTRIES_BACKWARD)},
    }
    Launch(restore_queries, _grid(given, arguments), arguments, _config(arguments)).run()


def _launch_by_key(given: Listed, shared: dict[str, Any], dk: Tensor, dv: Tensor) -> None:
    """Write the gradients of keys and values."""
    from treefx.kernels.sparse.device_code import restore_keys  # only here: it imports Triton

    queries, bounds = invert(given.keys, given.k.shape[1])
    arguments = {
        **shared,
        **{"Queries": queries, "Bounds": bounds, "OfK": dk, "OfV": dv, "BLOCK_QUERIES": _block(shared)},
        **_steps(of_k=dk, of_v=dv),
    }
    Launch(restore_keys, (given.k.shape[1], given.k.shape[0]), arguments, _config(arguments)).run()


def _steps(**tensors: Tensor | None) -> dict[str, int]:
    """Return the distances of heads and tokens, by name."""
    steps = {name: (0, 0) if x is None else x.stride()[:2] for name, x in tensors.items()}
    return {
        f"{name}_{of}": step for name, both in steps.items() for of, step in zip(("head", "token"), both, strict=True)
    }


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
    steps = _steps(q=given.q, k=given.k, v=given.v)
    width, values = given.q.shape[-1], given.v.shape[-1]
    return {
        **{"Q": given.q, "K": given.k, "V": given.v, "tokens": given.q.shape[1], "scale": given.scale, **steps},
        **{"GROUP": given.group, "WIDTH": width, "VALUES": values},
        **{"BLOCK_WIDTH": _power(width), "BLOCK_VALUES": _power(values)},
    }


def _of_group(given: Listed, entries: int) -> dict[str, Any]:
    """Return the sizes of products of a group's heads and a block of keys."""
    sizes = _operands(given)
    block, widest = _block(sizes), max(sizes["BLOCK_WIDTH"], sizes["BLOCK_VALUES"])
    precision = "ieee" if given.q.dtype == torch.float32 else "tf32"
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, entries // widest), _power(given.group))
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
    rows, wide = arguments.get("ROWS", 1), arguments["BLOCK_WIDTH"] > _WIDE
    return Config(rows, arguments.get("BLOCK_KEYS", 1), _MORE_WARPS if rows == _MOST_ROWS or wide else _WARPS, 1)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
