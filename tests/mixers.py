"""Modules [B, T, C] -> [B, T, C] that mix tokens outside attention: none is token-wise, some are causal."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ALONG_TREE", "CAUSAL", "MIXERS", "Dropout", "Mixer"]


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


class TokenShift(nn.Module):
    """RWKV: a mixture with the token before."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.linspace(0.1, 0.9, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.share * F.pad(x, (0, 0, 1, -1))


class PaddedConvolution(nn.Module):
    """Padding written out on the left, dilated, channels mixed."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x.transpose(1, 2), (4, 0))).transpose(1, 2)


class DecayMatrix(nn.Module):
    """A linear recurrence as one product with a lower triangular [T, T] matrix of decays that depend on the tokens."""

    diagonal = 0

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.decay = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        log_decay = -F.softplus(self.decay(x)).squeeze(-1).cumsum(1)
        future = torch.ones(length, length, dtype=torch.bool).triu(self.diagonal + 1)
        weight = (log_decay[:, :, None] - log_decay[:, None, :]).masked_fill(future, float("-inf")).exp()
        return x + 0.1 * weight @ x


class OneAhead(DecayMatrix):
    """The same with tril(1)."""

    diagonal = 1


class ChunkedSum(nn.Module):
    """Running sums in chunks of four, as Mamba 2 computes them: within a chunk by a triangle, between chunks by states.

    The last chunk is padded.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        chunks = F.pad(x, (0, 0, 0, -length % 4)).view(rows, -1, 4, width)
        within = torch.ones(4, 4, dtype=x.dtype).tril() @ chunks
        states = F.pad(chunks.sum(2), (0, 0, 1, 0)).cumsum(1)[:, :-1]
        total = within + states[:, :, None]
        return x + 0.1 * total.reshape(rows, -1, width)[:, :length]


class BufferedDecay(nn.Module):
    """Lightning attention: only the values of a buffer prove causality."""

    def __init__(self, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        behind = torch.arange(length)[:, None] - torch.arange(length)
        slope = torch.tensor([0.5, 0.25, 0.1, 0.05])[:heads, None, None]
        self.register_buffer("decay", torch.where(behind >= 0, torch.exp(-slope * behind), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        weight = heads @ heads.mT * self.decay[:, :length, :length]
        return x + 0.1 * (weight @ heads).transpose(1, 2).flatten(2)


class CumulativeMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None]


class Unfolded(nn.Module):
    """A convolution written with windows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).amax(-1)


class ReversedSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.flip(1).cumsum(1).flip(1)


class RowFlip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * x.flip(0)


class FirstRowSpecial(nn.Module):
    """The first row is computed in another way: each row reads itself alone, and still they differ."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:1] + x[:1].cumsum(1), x[1:]])


class SkewedView(nn.Module):
    """Row b is delayed by b tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        wide = F.pad(x, (0, 0, rows, 1)).reshape(rows * (length + rows + 1), width)
        return x + wide[: rows * (length + rows)].reshape(rows, length + rows, width)[:, :length]


class RowBleed(nn.Module):
    """A convolution over all rows as one sequence: the first tokens of a row see the end of the row before."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(1, -1, x.size(-1))
        return x + F.pad(flat, (0, 0, 1, -1)).reshape(x.shape)


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.sort(dim=1).values


class NextOdd(nn.Module):
    """Even columns read one ahead."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.size(1)) | 1
        return x + 0.5 * x[:, place.clamp(max=x.size(1) - 1)]


class WholeDecay(nn.Module):
    """A decay that discourages the future and does not hide it."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.size(1))
        weight = torch.exp(-(place[:, None] - place).abs().to(x.dtype))
        return x + 0.1 * weight @ x


class RowDelay(nn.Module):
    """A matrix per row: rows differ in a constant."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        place = torch.arange(length)
        behind = place[:, None] - place - torch.arange(rows)[:, None, None] % 2
        return x + 0.1 * (behind >= 0).to(x.dtype) @ x


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
    "token_shift": (TokenShift, ("pad",)),
    "padded_conv": (PaddedConvolution, ("pad",)),
    "decay_matrix": (DecayMatrix, ("cumsum", "sub", "bmm")),
    "chunked_sum": (ChunkedSum, ("pad",)),
    "buffered_decay": (BufferedDecay, ("bmm", "mul")),
    "cumulative_mean": (CumulativeMean, ("cumsum",)),
    "unfolded": (Unfolded, ("pad",)),
    "one_ahead": (OneAhead, ("cumsum", "sub", "bmm")),
    "reversed_sum": (ReversedSum, ("flip",)),
    "row_flip": (RowFlip, ("flip",)),
    "first_row_special": (FirstRowSpecial, ("slice",)),
    "skewed_view": (SkewedView, ("pad", "view", "reshape")),
    "row_bleed": (RowBleed, ("view", "pad", "reshape")),
    "sorted": (Sorted, ("sort",)),
    "next_odd": (NextOdd, ("index",)),
    "whole_decay": (WholeDecay, ("bmm", "expand")),
    "row_delay": (RowDelay, ("bmm",)),
}
"""Mixer and the words of which one has to stand in the name of the op that the report blames."""
CAUSAL = (
    "cumsum", "causal_conv", "recurrence", "token_shift", "padded_conv", "decay_matrix", "chunked_sum",
    "buffered_decay", "cumulative_mean", "unfolded",
)  # fmt: skip
"""Those in which each token reads only the past of its row, the same way in every row."""
ALONG_TREE = ("causal_conv", "padded_conv")
"""Those that run on the packed tokens."""
