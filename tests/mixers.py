"""Modules [B, T, C] -> [B, T, C] that mix tokens outside attention: none is token-wise."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MIXERS", "Dropout", "Mixer"]


class CumulativeSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.cumsum(dim=1)


class CausalConvolution(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)


class SameConvolution(nn.Module):
    """Sees one token ahead."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Roll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.roll(x, shifts=1, dims=1)


class Flip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * x.flip(1)


class BatchNorm(nn.Module):
    """Statistics over all tokens of all rows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view(x.shape)


class RowMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True)


class BatchMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * x.mean(dim=0, keepdim=True)


class RowShift(nn.Module):
    """Takes half of every row from the row before it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + 0.5 * x[torch.arange(x.size(0)) - 1]


class LastToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[:, -1:]


class SequenceSoftmax(nn.Module):
    """Pools over the whole row, future included."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.score(x).softmax(dim=1) * x).sum(dim=1, keepdim=True)


class BidirectionalAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class Recurrence(nn.Module):
    """A loop over the columns."""

    def forward(self, x: Tensor) -> Tensor:
        state, outs = torch.zeros_like(x[:, 0]), []
        for t in range(x.size(1)):
            state = 0.7 * state + x[:, t]
            outs.append(state)
        return torch.stack(outs, dim=1)


class RowScale(nn.Module):
    """One learned number per row of the batch: equal tokens of two rows differ."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, rows))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[: x.size(0), None, None]


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=0.5, training=self.training)


Mixer = Callable[..., nn.Module]

MIXERS: dict[str, tuple[Mixer, tuple[str, ...]]] = {
    "cumsum": (CumulativeSum, ("cumsum",)),
    "causal_conv": (CausalConvolution, ("conv",)),
    "same_conv": (SameConvolution, ("conv",)),
    "roll": (Roll, ("roll",)),
    "flip": (Flip, ("flip",)),
    "batch_norm": (BatchNorm, ("norm",)),
    "row_mean": (RowMean, ("mean",)),
    "batch_mean": (BatchMean, ("mean",)),
    "row_shift": (RowShift, ("index",)),
    "last_token": (LastToken, ("slice", "select", "index")),
    "sequence_softmax": (SequenceSoftmax, ("softmax", "sum")),
    "bidirectional_attention": (BidirectionalAttention, ("attention", "softmax")),
    "recurrence": (Recurrence, ("select", "slice", "index", "stack", "cat")),
    "row_scale": (RowScale, ("mul", "slice")),
}
"""Mixer and the words of which one has to stand in the name of the op that the report blames."""
