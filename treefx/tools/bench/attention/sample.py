"""Judge an attention on sampled tokens of a forest against float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treefx.kernels import reference
from treefx.kernels.common import Inputs, relative_error
from treefx.kernels.score import make_score

__all__ = ["Attend", "Sample", "causal", "rounded"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_SAMPLED_ROWS, _SAMPLED_TOKENS = 4, 128


class Sample:
    """Some tokens of some rows, on the last group of heads.

    Args:
        ends: exclusive end of each token's subtree ``[N]``.
        rows: packed indices of every row.
        leaves: q ``[1, H, N, D]``, k and v ``[1, Hkv, N, D]``, which require grad.
        grad: gradient of the output ``[1, H, N, D]``.
    """

    def __init__(self, ends: Tensor, rows: Sequence[Tensor], leaves: Sequence[Tensor], grad: Tensor) -> None:
        self.ends, self.leaves = ends, leaves
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(len(rows), generator=generator)[:_SAMPLED_ROWS].tolist()
        self.rows = [rows[number] for number in chosen]
        candidates = torch.unique(torch.cat(self.rows))
        picked = torch.randperm(len(candidates), generator=generator)[:_SAMPLED_TOKENS]
        self.tokens = candidates[picked.to(candidates.device)].sort().values
        self.group = leaves[0].shape[1] // leaves[1].shape[1]
        self.grad = torch.zeros_like(grad)  # of the sample alone: the compared values are exact for all keys
        self.grad[:, :, self.tokens] = grad[:, :, self.tokens]
        self.right = self._right()

    def errors_of_rows(self) -> dict[str, float]:
        """Return the errors of SDPA on the sampled rows, each alone."""
        q, k, v = (tensor.detach() for tensor in self._last_group(self.leaves))
        out = torch.zeros_like(q)
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v)]
        left = torch.zeros(q.shape[2], dtype=torch.bool, device=q.device)
        left[self.tokens] = True
        for row in self.rows:
            leaves = [tensor[:, :, row].requires_grad_() for tensor in (q, k, v)]
            alone = causal(*leaves)
            out[:, :, row] = alone.detach()
            grad = self.grad[:, -self.group :, row] * left[row][:, None]  # every token's gradient once
            for total, part in zip(sums, torch.autograd.grad(alone, leaves, grad), strict=True):
                total[:, :, row] += part
            left[row] = False
        return self._errors([out[:, :, self.tokens], *sums])

    def judge(
        self, name: str, attend: Attend, limits: dict[str, float], factor: float, record: dict[str, Any]
    ) -> list[str]:
        """Return the errors of a method, in words, and note them."""
        out = attend(*self.leaves)
        q, k, v = torch.autograd.grad(out, self.leaves, self.grad)
        got, *_ = self._last_group([out.detach(), k, v])
        dq, dk, dv = self._last_group([q, k, v])
        errors = self._errors([got[:, :, self.tokens], dq, dk, dv])
        record[f"{name}_errors"] = rounded(errors)
        return [
            f"{part} of {name} must be off by at most {factor:g} x {limits[part]:.1e}, got {error:.1e}"
            for part, error in errors.items()
            if not error <= factor * limits[part] + 1e-6  # NaN fails too
        ]

    def _right(self) -> list[Tensor]:
        q, k, v = (tensor.detach().double() for tensor in self._last_group(self.leaves))
        wide = Inputs(q, k, v, self.ends)
        score = make_score(scale=self.leaves[0].shape[-1] ** -0.5)
        out, lse = reference.forward(wide, score, rows=self.tokens)
        grad = self.grad[:, -self.group :].double()
        return [out, *reference.backward(grad, wide, out, lse, score, (), rows=self.tokens)[:3]]

    def _last_group(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = tensors
        return [q[:, -self.group :], k[:, -1:], v[:, -1:]]

    def _errors(self, got: Sequence[Tensor]) -> dict[str, float]:
        parts = zip(("out", "dq", "dk", "dv"), got, self.right, strict=True)
        return {part: relative_error(tensor.double(), right) for part, tensor, right in parts}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend along rows, each ``[H, T, D]`` of the batch; fewer key heads are shared."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def rounded(errors: dict[str, float]) -> dict[str, float]:
    """Return errors with the digits that mean something."""
    return {part: float(f"{error:.2e}") for part, error in errors.items()}
