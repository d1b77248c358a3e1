"""Compute an LM head's loss by Triton kernels: 14 bytes of traffic per 16-bit logit.

With a bias, 16 bytes.

Bytes per logit of a forward and a backward: two products are written (4), the forward reads one (2), the backward reads
and overwrites the other (4), the products for hidden's and weight's gradients read it (4), the sum for a bias's
gradient reads it (2). Nothing of it waits for the device: picks are sorted there, and kernels read their bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.small_launches import Launch
from treefx.kernels.head_loss.problem import HeadLoss, accumulate_dtype, loss_of_picks

__all__ = [
    "Chunk",
    "Numbers",
    "Picks",
    "Rows",
    "backward",
    "backward_of_logits",
    "fold",
    "fold_all",
    "forward",
    "forward_of_logits",
    "restore_all",
    "soften",
    "sort_picks",
]

_ENTRIES = 2**26
"""Logits that exist at once: 128 MiB of 16-bit ones."""
_ALIGNED = 128
"""A chunk has a multiple of so many vocabulary entries, but for the last."""
_LANES, _VECTOR = 512, 16
"""Lanes of a program, and bytes that a lane loads at once."""
_PICKS, _WRITERS = 128, 1024
"""Picks of a program of the forward, and programs that write gradients of picks."""
_WARPS = 8


@dataclass(frozen=True)
class Numbers:
    """Map raw products to logits: z = outer * tanh(inner * (x + bias)), or without the cap.

    Uncapped, z = outer * (x + bias).
    """

    inner: float
    outer: float
    capped: bool

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> Numbers:
        """Return them for z = scale * cap(x + bias)."""
        return cls(1.0, scale, False) if softcap is None else cls(1 / softcap, scale * softcap, True)

    @property
    def slope(self) -> float:
        """The derivative of z at 0."""
        return self.inner * self.outer

    def arguments(self) -> dict[str, Any]:
        """Return them as kernels take them."""
        return {"inner": self.inner, "outer": self.outer, "CAPPED": self.capped}


@dataclass(frozen=True)
class Chunk:
    """Raw products of some vocabulary entries.

    Attributes:
        number: Of the chunk.
        start: The first entry.
        raw: [N, width], dense rows at any distance.
        loaded: Columns that exist in memory, at least width.
    """

    number: int
    start: int
    raw: Tensor
    loaded: int

    @property
    def part(self) -> slice:
        """The entries."""
        return slice(self.start, self.start + self.raw.shape[1])

    def arguments(self) -> dict[str, Any]:
        """Return them as kernels take them."""
        each = _VECTOR // self.raw.element_size()
        return {"start": self.start, "width": self.raw.shape[1], "loaded": self.loaded, "LANES": _LANES, "EACH": each}


@dataclass(frozen=True)
class Rows:
    """Hold the forward's sums of each row [N]: maximum, sum of exp(z - maximum), moment.

    The moment, sum of z times those, may be None.
    """

    top: Tensor
    sum: Tensor
    moment: Tensor | None

    @classmethod
    def empty(cls, like: Tensor, *, entropy: bool) -> Rows:
        """Return those of no entry, for logits [N, ...]."""
        sums = like.new_zeros(2, len(like), dtype=torch.float32)
        return cls(torch.full_like(sums[0], -torch.inf), sums[0], sums[1] if entropy else None)

    def lse(self) -> Tensor:
        """Return the log-sum-exp [N]."""
        return self.top + self.sum.log()

    def entropy(self, lse: Tensor) -> Tensor:
        """Return the entropy [N]."""
        assert self.moment is not None
        return lse - self.moment / self.sum


@dataclass(frozen=True)
class Picks:
    """Picks sorted by entry and row, and their gradients.

    Attributes:
        key: int64 [R], entry * N + row; V * N for a pick of nothing.
        end: int32 [R], where equal keys end.
        bounds: int32 [chunks + 1], the picks of each chunk.
        grad, loss: [R], in this order.
        total: [N], sums of gradients over each row.
        entropy, of_entropy: [N], entropies and their gradients; None where those have none.
    """

    key: Tensor
    end: Tensor
    bounds: Tensor
    grad: Tensor
    loss: Tensor
    total: Tensor
    entropy: Tensor | None = None
    of_entropy: Tensor | None = None

    @classmethod
    def sorted(
        cls, slot: Tensor, token: Tensor, shape: tuple[int, int], step: int, grad: Tensor, loss: Tensor, total: Tensor
    ) -> Picks:
        """Sort picks of logits by chunks of ``step`` entries of the vocabulary."""
        rows, vocabulary = shape
        key, order = torch.where((slot >= 0) & (token >= 0), token * rows + slot, rows * vocabulary).sort()
        starts = torch.arange(0, vocabulary + step, step, device=key.device).clamp_(max=vocabulary) * rows
        bounds, end = (torch.searchsorted(key, x, right=x is key, out_int32=True) for x in (starts, key))
        return cls(key, end, bounds, grad.float()[order], loss[order], total)


def fold(
    chunk: Chunk, bias: Tensor | None, numbers: Numbers, rows: Rows, picked: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fold a chunk into the sums of its rows, and write its picks' logits."""
    from treefx.kernels.head_loss.device_code import fold_chunk  # only here: it imports Triton

    slot, token, chosen = picked
    arguments = {
        **{"Raw": chunk.raw, "Bias": bias, "Top": rows.top, "Sum": rows.sum, "Moment": rows.moment},
        **{"Slot": slot, "Token": token, "Chosen": chosen, "step": chunk.raw.stride(0)},
        **{"rows": len(chunk.raw), "picks": len(token), "PICKS": _PICKS},
        **chunk.arguments(),
        **numbers.arguments(),
    }
    grid = (len(chunk.raw) + -(-len(token) // _PICKS), 1)
    Launch(fold_chunk, grid, arguments, Config(1, _LANES, _WARPS, 1)).run()


def soften(chunk: Chunk, out: Tensor, bias: Tensor | None, numbers: Numbers, lse: Tensor, picks: Picks) -> None:
    """Write gradients of a chunk's raw products [N, width]; ``out`` may be the chunk."""
    from treefx.kernels.head_loss.device_code import soften_chunk, write_picks  # only here: they import Triton

    given = {
        **{"Out": out, "Lse": lse, "Total": picks.total, "out_step": out.stride(0)},
        **{"start": chunk.start, "width": chunk.raw.shape[1]},
        **{"Entropy": picks.entropy, "OfEntropy": picks.of_entropy, "slope": numbers.slope},
        **{"outer": numbers.outer, "CAPPED": numbers.capped},
    }
    of_all = {"Raw": chunk.raw, "Bias": bias, "step": chunk.raw.stride(0), **chunk.arguments(), **numbers.arguments()}
    blocks = -(-chunk.raw.shape[1] // (of_all["LANES"] * of_all["EACH"]))
    Launch(soften_chunk, (len(chunk.raw), blocks), {**given, **of_all}, Config(1, _LANES, _WARPS, 1)).run()
    of_picks = {
        **{"Key": picks.key, "End": picks.end, "Bounds": picks.bounds, "Grad": picks.grad, "Loss": picks.loss},
        **{"rows": len(chunk.raw), "chunk": chunk.number, "PICKS": _PICKS},
    }
    if len(picks.key):
        grid = (min(len(picks.key), _WRITERS), 1)
        Launch(write_picks, grid, {**given, **of_picks}, Config(1, _PICKS, 1, 1)).run()


def _step(problem: HeadLoss) -> int:
    """Return how many entries of the vocabulary a chunk has."""
    if problem.chunk:
        return min(problem.chunk, len(problem.weight))
    step = _ENTRIES // max(1, len(problem.hidden)) // _ALIGNED * _ALIGNED
    return min(max(step, _ALIGNED), len(problem.weight))


def _chunks(problem: HeadLoss) -> Iterator[Chunk]:
    """Multiply a chunk at a time, into the same memory. Rows begin at multiples of 16 entries."""
    hidden, weight = problem.hidden, problem.weight
    step = _step(problem)
    memory = hidden.new_empty(len(hidden), -(-step // 16) * 16)
    for number, start in enumerate(range(0, len(weight), step)):
        part = weight[start : start + step]
        raw = memory[:, : len(part)]
        torch.mm(hidden, part.T, out=raw)
        yield Chunk(number, start, raw, -(-len(part) // 16) * 16)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def forward(problem: HeadLoss) -> tuple[Tensor, Tensor]:
    """Return minus log-probabilities of picks [R], and log-sum-exps of rows [N], float32."""
    torch._assert_async(((problem.slot < 0) | (problem.token < len(problem.weight))).all())
    rows, chosen = fold_all(problem)
    lse = rows.lse()
    return loss_of_picks(lse, problem.rows_of_picks(), chosen), lse


def fold_all(problem: HeadLoss, *, entropy: bool = False) -> tuple[Rows, Tensor]:
    """Return the sums of all rows, and the logit of each pick [R], 0 of nothing.

    Args:
        problem: The picks.
        entropy: Whether sums for entropies are wanted.
    """
    slot, token = problem.slot.contiguous(), problem.token.contiguous()
    rows = Rows.empty(problem.hidden, entropy=entropy)
    chosen = rows.sum.new_zeros(len(token))
    numbers = Numbers.of(problem.scale, problem.softcap)
    with _on_device_of(problem.hidden):
        for chunk in _chunks(problem):
            fold(chunk, _dense(problem.bias), numbers, rows, (slot, token, chosen))
    return rows, chosen


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def backward(problem: HeadLoss, grad: Tensor, loss: Tensor, lse: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of hidden, weight and bias; an empty tensor for unwanted ones.

    Args:
        problem: As in the forward.
        grad: [R], of the losses.
        loss, lse: From the forward.
        wanted: Which gradients.
    """
    total = problem.sums_of_rows(grad.float()).contiguous()
    return restore_all(problem, sort_picks(problem, grad, loss, total), lse.contiguous(), wanted)


def sort_picks(problem: HeadLoss, grad: Tensor, loss: Tensor, total: Tensor) -> Picks:
    """Sort a problem's picks for the backward; ``total`` [N] sums each row's gradients."""
    shape = len(problem.hidden), len(problem.weight)
    return Picks.sorted(problem.slot, problem.token, shape, _step(problem), grad, loss, total)


def restore_all(problem: HeadLoss, picks: Picks, lse: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of hidden, weight and bias; an empty tensor for unwanted ones."""
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    like = hidden, weight, bias if bias is not None and wanted[2] else weight
    results = [x.new_empty(x.shape if use else (0,)) for x, use in zip(like, wanted, strict=True)]
    of_hidden = torch.zeros_like(results[0], dtype=torch.float32)
    with _on_device_of(hidden):
        for chunk in _chunks(problem):
            low = chunk.raw
            soften(chunk, low, _dense(bias), Numbers.of(problem.scale, problem.softcap), lse, picks)
            if wanted[0]:
                _add_product(of_hidden, low, weight[chunk.part])
            if wanted[1]:
                torch.mm(low.T, hidden, out=results[1][chunk.part])
            if wanted[2]:
                results[2][chunk.part] = low.sum(0, dtype=accumulate_dtype(low.dtype))
    return [of_hidden.to(hidden.dtype), *results[1:]]


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to float32 sums, without rounding the product where PyTorch can."""
    if a.dtype == sums.dtype:
        sums.addmm_(a, b)
    elif a.device.type == "cuda" and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    else:
        sums.add_(a @ b)


def forward_of_logits(logits: Tensor, slot: Tensor, token: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return minus log-probabilities of picks [R], and log-sum-exps [N], of scaled logits.

    Args:
        logits: [N, V], dense rows.
        slot, token: int64 [R].
        scale: One over the temperature.
    """
    rows = Rows.empty(logits, entropy=False)
    chosen = rows.sum.new_zeros(len(token))
    with _on_device_of(logits):
        fold(_whole(logits), None, Numbers.of(scale, None), rows, (slot.contiguous(), token.contiguous(), chosen))
    lse = rows.lse()
    return lse[slot] - chosen, lse


def backward_of_logits(
    logits: Tensor, slot: Tensor, token: Tensor, scale: float, grad: Tensor, loss: Tensor, lse: Tensor
) -> Tensor:
    """Return the gradient [N, V] of the logits: 0 for rows that no pick reads.

    Args:
        logits, slot, token, scale: As in :func:`forward_of_logits`.
        grad: [R], of the losses.
        loss, lse: From there.
    """
    total = torch.zeros_like(lse).index_add_(0, slot, grad.to(lse.dtype))
    shape = logits.shape[0], logits.shape[1]
    picks = Picks.sorted(slot, token, shape, shape[1], grad, loss, total)
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    with _on_device_of(logits):
        soften(_whole(logits), result, None, Numbers.of(scale, None), lse, picks)
    return result


def _whole(logits: Tensor) -> Chunk:
    return Chunk(0, 0, logits, logits.shape[1])
