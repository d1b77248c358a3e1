"""Run TRL's LM head on a GPU by the head-loss kernels, without pairs or synchronizing.

``treefx::head`` calls a registered function on each distinct pair of token and target, and the host synchronizes on
their number. TRL's ``ChunkedLogProbFunction`` is known by its name and arguments: log-probabilities, and entropies, of
all targets follow from sums over each distinct token. Other results of it, other functions, and other devices keep the
pairs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.head_loss.choose import runs_fused
from treefx.kernels.head_loss.problem import HeadLoss, loss_of_picks

__all__ = ["FusedHead", "fused_head"]

_FUNCTION = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"
_ARGUMENTS = ("ctx", "hidden", "weight", "bias", "targets")
_SETTINGS = ("temperature", "chunk_size", "final_logit_softcapping", "logit_scale", "outputs")
_OUTPUTS = {"log_probs", "entropy"}


@dataclass(frozen=True)
class FusedHead:
    """Log-probabilities, and entropies if wanted, of scale * cap(hidden weight^T + bias).

    Attributes:
        scale: One over the temperature, times a scale of the logits.
        softcap: Of the logits before these; or None.
        entropy: Whether entropies are wanted.
        dtype: Of the products; None for hidden's.
    """

    scale: float
    softcap: float | None
    entropy: bool
    dtype: torch.dtype | None

    def _problem(
        self, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor | None, unscored: int
    ) -> tuple[HeadLoss, Tensor]:
        """The problem, and the row [R] of each target, N where nothing is scored.

        A target that names no entry has a logit of 0, as in TRL's kernel.
        """
        row = torch.arange(len(targets), device=targets.device) if slot is None else slot
        row = torch.where((targets != unscored) & (row >= 0), row, len(hidden))
        picked = torch.where(row < len(hidden), row, -1)
        tensors = [x if x is None or self.dtype is None else x.to(self.dtype) for x in (hidden, weight, bias)]
        one, two, three = tensors
        assert one is not None and two is not None
        return HeadLoss(one, two, three, picked, targets, self.scale, self.softcap, 0), row

    def forward(self, *given: Any) -> list[Tensor]:
        """Return log-probabilities [R], and entropies [R] of their distributions."""
        from treefx.kernels.head_loss import fused

        problem, row = self._problem(*given)
        rows, chosen = fused.fold_all(problem, entropy=self.entropy)
        lse = rows.lse()
        found = [-loss_of_picks(lse, row, chosen)]
        return [*found, loss_of_picks(rows.entropy(lse), row, torch.zeros_like(chosen))] if self.entropy else found

    def backward(self, grads: Sequence[Tensor | None], wanted: Sequence[bool], *given: Any) -> list[Tensor]:
        """Return the gradients of hidden, weight and bias; an empty tensor for unwanted ones."""
        from treefx.kernels.head_loss import fused

        problem, row = self._problem(*given)
        of_entropy = grads[1] if self.entropy else None
        rows, chosen = fused.fold_all(problem, entropy=of_entropy is not None)
        lse = rows.lse()
        grad = torch.zeros_like(chosen) if grads[0] is None else -grads[0].float()
        loss = loss_of_picks(lse, row, chosen)
        picks = fused.sort_picks(problem, grad, loss, _sums(grad, row, len(lse)))
        if of_entropy is not None:
            sums = _sums(of_entropy.float(), row, len(lse))
            picks = replace(picks, entropy=rows.entropy(lse), of_entropy=sums)
        return fused.restore_all(problem, picks, lse, wanted)


def _sums(of_picks: Tensor, row: Tensor, rows: int) -> Tensor:
    return of_picks.new_zeros(rows + 1).index_add_(0, row, of_picks)[:-1]


def fused_head(
    function: type[torch.autograd.Function], settings: Sequence[Any], autocast: torch.dtype | None, hidden: Tensor
) -> FusedHead | None:
    """Return the form of a head that runs without pairs, if there is one on this device."""
    if hidden.device.type == "cpu" or (function.__module__, function.__name__) != _FUNCTION:
        return None
    names = tuple(inspect.signature(function.forward).parameters)
    if names[: len(_ARGUMENTS)] != _ARGUMENTS or names[len(_ARGUMENTS) :] != _SETTINGS:
        return None
    bound = inspect.signature(function.forward).bind(*_ARGUMENTS, *settings)
    bound.apply_defaults()
    temperature, _, softcap, factor, outputs = (bound.arguments[name] for name in _SETTINGS)
    if not set(outputs) <= _OUTPUTS or not factor > 0:
        return None
    like = hidden if autocast is None else hidden.new_empty(1, dtype=autocast)
    cap = None if softcap is None else softcap / factor
    return FusedHead(factor / temperature, cap, "entropy" in outputs, autocast) if runs_fused(like, cap) else None
