"""The loss of an LM head by PyTorch's operators, a few vocabulary entries at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.kernels.head_loss.problem import HeadLoss, accumulate_dtype, loss_of_picks

__all__ = ["backward", "forward"]

_ENTRIES_PER_CHUNK = {"cpu": 2**24}
"""Logits that exist at once: 64 MiB in float32. Other devices take larger chunks, each of which is a few launches."""
_ENTRIES_ON_DEVICE = 2**26


@dataclass(frozen=True)
class _Chunk:
    """Hold entries ``part`` of the vocabulary, and picks with positions of their logits.

    Attributes:
        part: The entries.
        picks: Positions of the picks in this chunk; None for all picks, whether they are in it or not.
        row, column: int64, where the logit of each pick stands.
        inside: bool, which picks are in this chunk; None where ``picks`` says it.
    """

    part: slice
    picks: Tensor | None
    row: Tensor
    column: Tensor
    inside: Tensor | None = None

    def read(self, chosen: Tensor, scores: Tensor) -> Tensor:
        """Return the picked logits [R] with those of this chunk in place."""
        if self.inside is not None:
            return torch.where(self.inside, scores[self.row, self.column], chosen)
        chosen[self.picks] = scores[self.row, self.column]
        return chosen

    def subtract(self, scores: Tensor, grad: Tensor) -> None:
        """Subtract the gradient [R] of each pick from its logit."""
        if self.inside is None:
            scores.index_put_((self.row, self.column), -grad[self.picks], accumulate=True)
        else:
            place = self.row * scores.shape[1] + self.column
            scores.view(-1).index_add_(0, place, torch.where(self.inside, -grad, 0.0))


def _chunks(problem: HeadLoss) -> Iterator[_Chunk]:
    """Walk over the vocabulary. Picks with a negative row or token are in no chunk.

    On the CPU each chunk gets its own picks. Elsewhere the host would have to wait for their number: each chunk gets
    all picks and leaves out the others, which a few numbers per row of the batch cost.
    """
    device, vocabulary = problem.token.device.type, len(problem.weight)
    entries = _ENTRIES_PER_CHUNK.get(device, _ENTRIES_ON_DEVICE)
    step = problem.chunk or max(256, entries // max(1, len(problem.hidden)))
    parts = [slice(start, min(start + step, vocabulary)) for start in range(0, vocabulary, step)]
    return (_picked_chunks if device in _ENTRIES_PER_CHUNK else _masked_chunks)(parts, problem.slot, problem.token)


def _picked_chunks(parts: Sequence[slice], slot: Tensor, token: Tensor) -> Iterator[_Chunk]:
    key = torch.where(slot < 0, -1, token)
    order = key.argsort(stable=True)
    starts = torch.tensor([part.start for part in parts] + [parts[-1].stop], device=token.device)
    bounds = torch.searchsorted(key[order], starts).tolist()
    if bounds[-1] < len(key):
        raise IndexError(f"a target is out of bounds of a vocabulary with {parts[-1].stop} entries")
    for number, part in enumerate(parts):
        picks = order[bounds[number] : bounds[number + 1]]
        yield _Chunk(part, picks, slot[picks], token[picks] - part.start)


def _masked_chunks(parts: Sequence[slice], slot: Tensor, token: Tensor) -> Iterator[_Chunk]:
    torch._assert_async(((slot < 0) | (token < parts[-1].stop)).all())
    row = slot.clamp(min=0)
    for part in parts:
        column = token - part.start
        inside = (slot >= 0) & (column >= 0) & (token < part.stop)
        yield _Chunk(part, None, row, column.clamp(0, part.stop - part.start - 1), inside)


def _scores(problem: HeadLoss, part: slice) -> tuple[Tensor, Tensor | None]:
    """Logits [N, chunk] in the accumulation type, and the cap's tanh for the backward."""
    hidden, bias, scale, softcap = problem.hidden, problem.bias, problem.scale, problem.softcap
    low = problem.weight[part].T
    raw = hidden @ low if bias is None else torch.addmm(bias[part], hidden, low)
    scores = raw.to(accumulate_dtype(hidden.dtype))
    if softcap is None:
        return (scores if scale == 1.0 else scores * scale), None
    tanh = (scores / softcap).tanh_()
    return tanh * (softcap * scale), tanh


def forward(problem: HeadLoss) -> tuple[Tensor, Tensor]:
    """Return minus the log-probability of each pick [R], and the log-sum-exp of every row [N]."""
    hidden = problem.hidden
    dtype = accumulate_dtype(hidden.dtype)
    lse = torch.full((len(hidden),), -torch.inf, dtype=dtype, device=hidden.device)
    chosen = torch.zeros(len(problem.token), dtype=dtype, device=hidden.device)
    for item in _chunks(problem):
        scores, _ = _scores(problem, item.part)
        chosen = item.read(chosen, scores)
        # Subtract, exponentiate and sum by hand: logsumexp would hold a second chunk.
        top = scores.amax(dim=1)
        top.masked_fill_(top == -torch.inf, 0.0)  # a chunk of forbidden entries: -inf - (-inf) would be NaN
        total = scores.sub_(top[:, None]).exp_().sum(dim=1)
        lse = torch.logaddexp(lse, top + total.log())
    return loss_of_picks(lse, problem.rows_of_picks(), chosen), lse


def backward(problem: HeadLoss, grad: Tensor, lse: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of hidden, weight and bias; an empty tensor for unwanted ones.

    The rows of a token are summed here: the gradient of a row of logits is (sum of its picks' grads) * probabilities
    minus each pick's own.
    """
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    total = problem.sums_of_rows(grad)
    results = [hidden.new_zeros(hidden.shape if wanted[0] else (0,), dtype=lse.dtype)]
    results += [weight.new_empty(weight.shape if wanted[1] else (0,))]
    results += [weight.new_empty(0) if bias is None or not wanted[2] else bias.new_empty(bias.shape)]
    for item in _chunks(problem):
        scores, tanh = _scores(problem, item.part)
        scores.sub_(lse[:, None]).exp_().mul_(total[:, None])
        item.subtract(scores, grad)
        if problem.scale != 1.0:
            scores.mul_(problem.scale)
        if tanh is not None:
            scores.mul_(1 - tanh * tanh)
        low = scores.to(hidden.dtype)
        if wanted[0]:
            results[0] += low @ weight[item.part]
        if wanted[1]:
            results[1][item.part] = low.T @ hidden
        if wanted[2]:
            results[2][item.part] = scores.sum(dim=0).to(results[2].dtype)
    return [results[0].to(hidden.dtype, copy=False), *results[1:]]
