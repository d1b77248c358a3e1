"""Linear recurrences written in chunks, as models write them, and near misses of theirs."""

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mamba2 import modeling_mamba2

__all__ = ["DEFECTS", "SCANS_AS_SUMS", "ChunkedScan"]

SCANS_AS_SUMS = "einsum" not in inspect.getsource(modeling_mamba2)
"""transformers 5.17 writes products of mamba2 and bamba as sums over one more dimension: not recognised, on rows."""

DEFECTS = {
    "late": "the decay of a token is applied to its own write as well",
    "border": "states do not decay from chunk to chunk",
    "position": "outputs are scaled by their position",
    "step": "the step scales writes, and not erased values",
    "detached": "keys pass on no gradient",
    "reversed": "rows run from their end",
    "ahead": "a token sees the next one of its chunk",
}


class ChunkedScan(nn.Module):
    """[B, T, C] -> [B, T, C]: state space recurrence or gated delta rule in chunks of four, the last one padded.

    Args:
        delta: the gated delta rule.
        defect: one of ``DEFECTS``.
        grouped: both heads share queries and keys.
        decays: whether states decay.
        skip: adds each value once more, times a learned number per head.
        by_feature: each feature of a key decays by itself, as in Kimi delta attention.
    """

    heads, key, value, chunk = 2, 3, 4, 4

    def __init__(
        self,
        delta: bool = False,
        defect: str | None = None,
        *,
        grouped: bool = False,
        decays: bool = True,
        skip: bool = False,
        by_feature: bool = False,
        width: int = 32,
    ) -> None:
        super().__init__()
        self.delta, self.defect, self.decays, self.by_feature = delta, defect, decays, by_feature
        self.groups = 1 if grouped else self.heads
        self.logarithms = self.heads * (self.key if by_feature else 1)
        self.enter = nn.Linear(width, 2 * self.groups * self.key + self.heads * (self.value + 1) + self.logarithms)
        self.leave = nn.Linear(self.heads * self.value, width)
        self.skip = nn.Parameter(torch.linspace(0.5, 1.5, self.heads)) if skip else None

    def forward(self, x: Tensor) -> Tensor:
        source = x.flip(1) if self.defect == "reversed" else x
        sizes = [self.groups * self.key] * 2 + [self.heads * self.value, self.logarithms, self.heads]
        q, k, v, g, step = (2.0 * self.enter(source)).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part, size in ((q, self.key), (k, self.key), (v, self.value)))
        k = F.normalize(k, dim=-1)
        q, k = (part.repeat_interleave(self.heads // self.groups, 2) for part in (q, k))
        g, step = -F.softplus(g.unflatten(-1, (self.heads, -1)) if self.by_feature else g), step.sigmoid()
        out = self.scan(*(part.transpose(1, 2) for part in (q, k, v, g, step)))
        out = self.leave(out.transpose(1, 2).flatten(2))
        return x + (out.flip(1) if self.defect == "reversed" else out)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor) -> Tensor:
        """q, k [B, H, T, D], v [B, H, T, E], g [B, H, T] or [B, H, T, D], step [B, H, T] -> [B, H, T, E]."""
        length = q.size(2)
        missing = -length % self.chunk
        q, k, v = (F.pad(part, (0, 0, 0, missing)) for part in (q, k, v))
        g, step = F.pad(g, (0, 0, 0, missing) if self.by_feature else (0, missing)), F.pad(step, (0, missing))
        g = g if self.decays else torch.zeros_like(g)
        skipped = v
        v = v * g.exp()[..., None] if self.defect == "late" else v
        k = k.detach() if self.defect == "detached" else k
        state, outs = torch.zeros(len(q), self.heads, self.key, self.value, dtype=q.dtype), []
        for start in range(0, q.size(2), self.chunk):
            part = slice(start, start + self.chunk)
            one_chunk = self.one_chunk_by_feature if self.by_feature else self.one_chunk
            out, state = one_chunk(q[:, :, part], k[:, :, part], v[:, :, part], g[:, :, part], step[:, :, part], state)
            outs.append(out)
        total = 0.5 * torch.cat(outs, 2)
        if self.skip is not None:
            total = total + self.skip[:, None, None] * skipped
        if self.defect == "position":
            total = total * (1 + torch.arange(total.size(2)) / 10)[:, None]
        return total[:, :, :length]

    def one_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = g.cumsum(-1)
        ahead = 2 if self.defect == "ahead" else 1
        future = torch.ones(self.chunk, self.chunk, dtype=torch.bool).triu(ahead)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, float("-inf")).exp()
        entering, last = total.exp()[..., None], total[..., -1:]
        written = v
        if self.delta:
            erased = k if self.defect == "step" else k * step[..., None]
            matrix = (erased @ k.mT * decay).tril(-1)
            right = v * step[..., None] - entering * erased @ state
            written = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
        out = (q @ k.mT * decay) @ written + entering * q @ state
        kept = state if self.defect == "border" else last.exp()[..., None] * state
        return out, kept + (k * (last - total).exp()[..., None]).mT @ written

    def one_chunk_by_feature(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = g.cumsum(-2)
        future = torch.ones(self.chunk, self.chunk, dtype=torch.bool).triu(1)[..., None]
        decay = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(future, float("-inf")).exp()
        entering, last = total.exp(), total[..., -1:, :]
        written = v
        if self.delta:
            erased = k * step[..., None]
            matrix = (erased[..., :, None, :] * k[..., None, :, :] * decay).sum(-1).tril(-1)
            right = v * step[..., None] - (entering * erased) @ state
            written = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
        out = (q[..., :, None, :] * k[..., None, :, :] * decay).sum(-1) @ written + (entering * q) @ state
        kept = state if self.defect == "border" else last.exp().mT * state
        return out, kept + (k * (last - total).exp()).mT @ written
