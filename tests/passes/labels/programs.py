"""Small programs [B, T, 32] -> [B, T, 32], one for each law of operators that act on tokens one by one.

``w`` [32, 32] is learned. Operators work on features: what they do along rows is another law's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PROGRAMS", "Program"]

WIDTH = 32


class Doubled(torch.autograd.Function):
    """A function with its own backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g


class Program(nn.Module):
    """One program, with its weight."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("order", torch.randperm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return PROGRAMS[self.name](x, self.weight, self.order)


def _rotated(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
    """As rotary embeddings do: pairs of features as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    turns = torch.polar(torch.ones(WIDTH // 2, dtype=x.dtype), torch.arange(WIDTH // 2, dtype=x.dtype))
    return torch.view_as_real(pairs * turns + torch.complex(x[..., :16], x[..., 16:])).flatten(-2)


def _filtered(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
    """Filters features in two ways: as one signal, and as pictures of 4 by 8."""
    signal = torch.fft.irfft(torch.fft.rfft(x) * w[0, :17], n=WIDTH)
    return signal + torch.fft.fft2(x.unflatten(-1, (4, 8))).real.flatten(-2) * w[1]


def _chosen(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
    """The experts of a router: values and numbers of the largest."""
    values, places = F.linear(x, w).softmax(-1).topk(4)
    return x + torch.zeros_like(x).scatter(-1, places, values)


def _in_groups(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    return F.group_norm(flat, 4).view_as(x)


def _products_of_heads(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
    heads = x.reshape(-1, 4, 8)
    mixed = torch.baddbmm(heads, torch.bmm(heads, heads.transpose(1, 2)), heads)
    return mixed.reshape(x.shape)


def _by_running_statistics(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
    mean, variance = w[0].detach(), w[1].detach().square() + 0.5
    flat = F.batch_norm(x.flatten(0, 1), mean, variance, w[2], w[3]).view_as(x)
    return flat + F.batch_norm(x.transpose(1, 2), mean, variance, w[4]).transpose(1, 2)


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "pointwise": lambda x, w, order: torch.where(x > 0, x.sigmoid() * x, x * w[0]).clamp(-2, 2),
    "lerp": lambda x, w, order: torch.lerp(x, 2 * x, w[0]),
    "hardswish": lambda x, w, order: F.hardswish(x),
    "log_sigmoid": lambda x, w, order: F.logsigmoid(x),
    "glu": lambda x, w, order: F.glu(torch.cat([x, F.linear(x, w)], -1)),
    "complex numbers": _rotated,
    "fourier": _filtered,
    "custom function": lambda x, w, order: Doubled.apply(x),  # type: ignore[no-untyped-call]
    "bucketize": lambda x, w, order: x + torch.bucketize(x.detach(), w[0].detach().sort()[0]).to(x.dtype),
    "cummax": lambda x, w, order: x.cummax(-1)[0],
    "median": lambda x, w, order: x - x.median(-1, keepdim=True)[0],
    "nansum": lambda x, w, order: x + x.nansum(-1, keepdim=True),
    "mean and amax": lambda x, w, order: x - x.mean(-1, keepdim=True) + x.amax(-1, keepdim=True),
    "softmax": lambda x, w, order: F.linear(x, w).softmax(-1) + x.log_softmax(-1),
    "cumsum": lambda x, w, order: x.cumsum(-1) / WIDTH,
    "sort": lambda x, w, order: x.sort(-1)[0],
    "topk": _chosen,
    "layer_norm": lambda x, w, order: F.layer_norm(x, (WIDTH,), w[0], w[1]),
    "rms_norm": lambda x, w, order: F.rms_norm(x, (WIDTH,), w[0]),
    "group_norm": _in_groups,
    "running_norm": _by_running_statistics,
    "index_fill": lambda x, w, order: x.index_fill(-1, order[:3], 0.5),
    "tril": lambda x, w, order: x.unflatten(-1, (4, 8)).tril().flatten(-2),
    "embedding": lambda x, w, order: x + F.embedding(x.detach().argmax(-1), w),
    "index_select": lambda x, w, order: x.index_select(-1, order),
    "index": lambda x, w, order: x[..., order],
    "gather": lambda x, w, order: x.gather(-1, x.detach().argsort(-1)),
    "scatter": lambda x, w, order: x.scatter(-1, x.detach().argsort(-1)[..., :4], F.linear(x, w)[..., :4]),
    "mm": lambda x, w, order: F.linear(x, w, w[0]),
    "mv": lambda x, w, order: x + (x @ w[0])[..., None],
    "bmm": _products_of_heads,
    "einsum": lambda x, w, order: torch.einsum("bti,ij->btj", x, w),
    "slice": lambda x, w, order: torch.cat([x[..., 8:], x[..., :8]], -1),
    "slice_scatter": lambda x, w, order: x.slice_scatter(x[..., :8], -1, 8, 16),
    "select": lambda x, w, order: x * x[..., 3, None] + x.select_scatter(x[..., 0], -1, 5),
    "pad": lambda x, w, order: F.pad(x[..., 5:], (1, 4)) + F.pad(x, (-1, 1)),
    "split": lambda x, w, order: torch.cat(x.split([8, 24], -1)[::-1], -1),
    "stack": lambda x, w, order: torch.stack(x.chunk(4, -1), -1).flatten(-2),
    "unbind": lambda x, w, order: x * x.unflatten(-1, (4, 8)).unbind(-2)[1].repeat(1, 1, 4),
    "repeat_interleave": lambda x, w, order: x * x[..., :8].repeat_interleave(4, -1),
    "permute": lambda x, w, order: x.unflatten(-1, (4, 8)).permute(0, 3, 1, 2).transpose(1, 2).flatten(-2),
    "expand": lambda x, w, order: x[..., None, :8].expand(-1, -1, 4, -1).flatten(-2),
    "squeeze": lambda x, w, order: x.unsqueeze(1).unsqueeze(-1).squeeze(-1).squeeze(1) * 2,
    "copy": lambda x, w, order: torch.empty_like(x).copy_(x * 3),
}
"""By the law that each is for; most meet several."""
