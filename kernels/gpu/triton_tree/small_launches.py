"""Describe launches as data, and make those of kernels without products.

A launch can be run, or compiled ahead of time without a device, from the same arguments.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from treefx.errors import UnsupportedError
from treefx.kernels.gpu.replays import VALUES, note
from treefx.kernels.gpu.triton_tree.arguments import padded_length, scratch, strides
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.tiles.key_programs import KeyPrograms

__all__ = [
    "ROW_VECTORS",
    "Launch",
    "join_values",
    "launch_finish",
    "launch_prologue",
    "launch_repair",
    "launch_sums",
    "launch_values",
    "scratch_bytes",
]

ROW_VECTORS = "PackedLse", "PackedDelta", "PackedHalves"
"""Forms of the log-sum-exp and minus delta of rows; the last is read by the plain kernels of dk and dv alone."""
_PROLOGUE_ROWS = 32
_SUMMED_ROWS = 16
_REPAIRED_LISTS = 16
_MOST_HEADS = 65_535
_DESCRIPTOR = 128
"""Bytes."""


@dataclass(frozen=True)
class Launch:
    """Hold one kernel, its grid and its arguments by name; and the launches after it."""

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]
    config: Config
    after: "tuple[Launch, ...]" = ()

    @property
    def options(self) -> dict[str, Any]:
        """Return compile options; kernels of score values keep the assertions in their text."""
        asserts = any(name.startswith(VALUES) for name in self.arguments)
        tiles = {"num_warps": self.config.warps, "num_stages": self.config.stages}
        return {**tiles, "debug": True, "sanitize_overflow": False} if asserts else tiles

    def run(self) -> None:
        """Run it on the current device, and then the others.

        Raises:
            UnsupportedError: there are more key heads, of all elements of the batch, than a device counts.
        """
        if self.grid[1] > _MOST_HEADS:
            raise UnsupportedError(
                f"batch times key heads must be at most {_MOST_HEADS}, got {self.grid[1]}: split the batch"
            )
        note(self._once(), {name: self.arguments[name] for name in self.kernel.arg_names})
        for launch in self.after:
            launch.run()

    def _once(self) -> Callable[..., object]:
        """Run this kernel, and return a function that repeats it without a lookup."""
        made_by_kernel = "packed_keys" in self.arguments  # its descriptors
        if made_by_kernel:
            _set_allocator()
        compiled = self.kernel[self.grid](**self.arguments, **self.options)
        if compiled is None:  # Triton's interpreter
            return partial(self.kernel[self.grid], **self.options)
        run: Callable[..., object] = compiled[(*self.grid, 1)]  # all three, where the kernel itself takes two
        return partial(_with_allocator, run) if made_by_kernel else run


def _with_allocator(run: Callable[..., object], *values: Any) -> None:
    _set_allocator()
    run(*values)


def _set_allocator() -> None:
    """Give kernels memory for descriptors, unless the program has set an allocator."""
    import triton
    from triton.runtime import _allocation

    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(scratch)


def scratch_bytes(kernel: Any, *, has_low: bool) -> int:
    """Return bytes of device memory per program for its descriptors.

    Args:
        kernel: a kernel in Gluon.
        has_low: whether its keys are those of a boundary, with first queries to read.
    """
    made = kernel.src.count("make_tensor_descriptor(")
    of_low = len(re.findall(r"\blow_box = \w+\.make_tensor_descriptor\(", kernel.src))
    return _DESCRIPTOR * int(made - (0 if has_low else of_low))


def launch_prologue(
    q: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_heads: int,
    sums_width: int | None = None,
    read: Collection[str] = ("PackedHalves",),
) -> Launch:
    """Return the launch before the backward, with room for its results per row.

    Args:
        q: ``[B, H, N, D]``.
        grad_out: ``[B, H, N, Dv]``.
        out: ``[B, H, N, Dv]``.
        lse: ``[B, H, N]``.
        kv_heads: key heads.
        sums_width: features of a row of ``SumsQ``, where gradients of the queries will be added up; ``None``: nowhere.
        read: in which of the forms below the log-sum-exp and minus delta are read.

    Returns:
        The launch. It writes ``Delta`` ``[B, H, N]``; in the order of the tiles' rows ``PackedLse`` and (minus delta)
        ``PackedDelta`` ``[B * Hkv, N * group and more]``, or int64 ``PackedHalves``, the bits of the first and above
        them those of the second; zeros in ``SumsQ`` ``[.., sums_width]`` of them; and where a group has several heads
        ``PackedQ`` and ``PackedGrad`` ``[B, Hkv, N * group, features]``.
    """
    from treefx.kernels.gpu.triton_tree.row_kernels import prologue  # only here: it imports Triton

    batch, heads, queries, width = q.shape
    group, value_width = heads // kv_heads, grad_out.shape[-1]
    rows = queries * group
    room = _room(lse, (batch * kv_heads, padded_length(rows)), sums_width, read)
    copies = [x.new_empty(batch, kv_heads, rows, x.shape[-1]) if group > 1 else None for x in (q, grad_out)]
    arguments = {
        "Q": q,
        "GradOut": grad_out,
        "Out": out,
        "Lse": lse,
        "Delta": torch.empty_like(lse),
        "PackedQ": copies[0],
        "PackedGrad": copies[1],
        **room,
        **strides("q", q),
        **strides("grad", grad_out),
        **strides("out", out),
        "queries": queries,
        "packed_rows": padded_length(rows),
        "kv_heads": kv_heads,
        "GROUP": group,
        **_widths(width, value_width),
        "ROW_WIDTH": sums_width or 0,
        "ROWS": _PROLOGUE_ROWS,
    }
    grid = (padded_length(rows) // _PROLOGUE_ROWS, batch * kv_heads)
    return Launch(prologue, grid, arguments, Config(_PROLOGUE_ROWS, 0, 4, 1))


def _room(
    lse: Tensor, shape: tuple[int, int], sums_width: int | None, read: Collection[str]
) -> dict[str, Tensor | None]:
    """Return room for the values of a row in the order of the tiles."""
    kinds = {"PackedLse": torch.float32, "PackedDelta": torch.float32, "PackedHalves": torch.int64}
    vectors = {name: lse.new_empty(shape, dtype=dtype) for name, dtype in kinds.items() if name in read}
    sums = None if sums_width is None else lse.new_empty(*shape, sums_width)
    return {**dict.fromkeys(kinds), **vectors, "SumsQ": sums}


def launch_values(kernels: ModuleType, arguments: dict[str, Any], heads: int) -> Launch:
    """Return the launch of a score's values of one query or one key alone.

    Args:
        kernels: those that write it.
        arguments: their arguments.
        heads: key heads, of all elements of the batch.
    """
    grid = (max(arguments["packed_rows"], arguments["packed_columns"]) // _PROLOGUE_ROWS, heads)
    return Launch(kernels.values, grid, {**arguments, "ROWS": _PROLOGUE_ROWS}, Config(_PROLOGUE_ROWS, 0, 4, 1))


def join_values(kernels: ModuleType, prologue: Launch, values: Sequence[Launch]) -> Launch:
    """Return one launch for :func:`launch_prologue` and :func:`launch_values`.

    Where there are values of several sources, each is made after it.
    """
    if len(values) > 1:
        return replace(prologue, after=tuple(values))
    grid = (max(prologue.grid[0], values[0].grid[0]), prologue.grid[1])
    return Launch(kernels.prologue, grid, {**prologue.arguments, **values[0].arguments}, prologue.config)


def launch_finish(sums: Tensor, dq: Tensor, factor: float, kv_heads: int) -> Launch:
    """Return the launch that writes the gradient of the queries from its sums.

    Args:
        sums: ``SumsQ`` of :func:`launch_prologue`.
        dq: where the gradient goes ``[B, H, N, D]``.
        factor: factor of the sums.
        kv_heads: key heads.
    """
    from treefx.kernels.gpu.triton_tree.row_kernels import finish_queries  # only here: it imports Triton

    width = dq.shape[-1]
    arguments = {
        "SumsQ": sums,
        "GradQ": dq,
        **strides("dq", dq),
        "factor": factor,
        "queries": dq.shape[2],
        "packed_rows": sums.shape[1],
        "kv_heads": kv_heads,
        "GROUP": dq.shape[1] // kv_heads,
        "WIDTH": width,
        "FEATURES": 1 << (width - 1).bit_length(),
        "ROW_WIDTH": sums.shape[-1],
        "ROWS": _SUMMED_ROWS,
    }
    grid = (sums.shape[1] // _SUMMED_ROWS, sums.shape[0])
    return Launch(finish_queries, grid, arguments, Config(_SUMMED_ROWS, 0, 4, 1))


def launch_sums(work: KeyPrograms, config: Config, parts: Sequence[Tensor], grads: Sequence[Tensor]) -> Launch:
    """Return the launch that adds the parts of lists that were cut.

    Args:
        work: which blocks were cut.
        config: the tiles of the first step.
        parts: of keys and of values, ``[slots, batches and heads, keys of a block, features]``.
        grads: where the sums go ``[B, Hkv, K, features]``.
    """
    from treefx.kernels.gpu.triton_tree.row_kernels import sum_parts  # only here: it imports Triton

    (parts_k, parts_v), (dk, dv) = parts, grads
    rows = min(_SUMMED_ROWS, config.block_n)
    arguments = {
        "PartsK": parts_k,
        "PartsV": parts_v,
        "GradK": dk,
        "GradV": dv,
        "split": work.split,
        "bounds": work.bounds,
        **strides("dk", dk),
        **strides("dv", dv),
        "keys": dk.shape[2],
        "kv_heads": dk.shape[1],
        "BLOCK_N": config.block_n,
        **_widths(dk.shape[-1], dv.shape[-1]),
        "ROWS": rows,
    }
    grid = (len(work.split) * (config.block_n // rows), parts_k.shape[1])
    return Launch(sum_parts, grid, arguments, Config(rows, 0, 4, 1))


def launch_repair(kernel: Any, arguments: Mapping[str, Any], config: Config, heads: int) -> Launch:
    """Return the launch that recomputes tiles spoiled by numbers of other branches.

    Where all is finite it reads of a result one row per tile and one feature per row, in a program per 16 tiles, and
    writes nothing: on the device it costs about as much as any launch, and the host waits for nothing.

    Args:
        kernel: of the module for the path ``"repair"``.
        arguments: those of the launch before it, and those that only the repair reads.
        config: the tiles of that launch.
        heads: key heads, of all elements of the batch.
    """
    absent = dict.fromkeys(("pool_row", *ROW_VECTORS))
    given = {**absent, **arguments, "lists": len(arguments["order"]), "LISTS": _REPAIRED_LISTS}
    taken = {name: given[name] for name in kernel.arg_names}
    grid = (-(-given["lists"] // _REPAIRED_LISTS), heads)
    return Launch(kernel, grid, taken, Config(config.block_m, config.block_n, 8, 1))


def _widths(width: int, value_width: int) -> dict[str, int]:
    """Return the features of keys and of values, and the powers of two above them."""
    return {
        "WIDTH": width,
        "FEATURES": 1 << (width - 1).bit_length(),
        "VALUE_WIDTH": value_width,
        "VALUE_FEATURES": 1 << (value_width - 1).bit_length(),
    }
