"""Catalogue layers that count tokens in buffers, and layers that break the graph."""

from __future__ import annotations

from treefx.tools.fuzz.families.parts import Part

__all__ = ["COUNTERS", "CUTS", "READ_THE_MASK"]

_EXPERTS = "self.register_buffer('load{n}', torch.zeros(4)); self.gate{n} = nn.Linear(D, 4, bias=False)"
_CHOSEN = "share = self.gate{n}(x).sigmoid()\nchosen = share.topk(2, -1).indices\nx = x * (1 + share.mean(-1, True))\n"
_WIDTH = "self.register_buffer('load{n}', torch.zeros(D))"


def _experts(count: str) -> Part:
    return Part(_CHOSEN + f"with torch.no_grad(): self.load{{n}}.add_({count})", _EXPERTS)


COUNTERS = {
    "experts by histogram": _experts("torch.histc(chosen.reshape(-1).float(), bins=4, min=0, max=4).to(x.dtype)"),
    "experts by one-hot": _experts("F.one_hot(chosen, 4).to(x.dtype).sum((0, 1, 2))"),
    "experts by scatter": _experts(
        "torch.zeros(4, dtype=x.dtype).scatter_add(0, chosen.reshape(-1), "
        "torch.ones_like(chosen, dtype=x.dtype).reshape(-1))"
    ),
    "experts by bincount": _experts("torch.bincount(chosen.reshape(-1), minlength=4).to(x.dtype)"),
    "experts by index_add": _experts(
        "torch.zeros(4, dtype=x.dtype).index_add(0, chosen[..., 0].reshape(-1), am.reshape(-1).to(x.dtype))"
    ),
    "running mean": Part("self.load{n}.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))", _WIDTH),
    "running maximum": Part("self.load{n}.copy_(torch.maximum(self.load{n}, x.detach().abs().amax((0, 1))))", _WIDTH),
    "running deviation": Part("with torch.no_grad(): self.load{n}.lerp_(x.var((0, 1), unbiased=False), 0.1)", _WIDTH),
    "last token kept": Part("with torch.no_grad(): self.load{n}.copy_(x[-1, -1])", _WIDTH),
    "masked mean": Part(
        "with torch.no_grad(): self.load{n}.add_((x * am[..., None]).sum((0, 1)) / am.sum().clamp(min=1))", _WIDTH
    ),
    "ids counted": Part(
        "ones = torch.ones_like(ids, dtype=x.dtype).reshape(-1)\n"
        "with torch.no_grad(): self.load{n}.index_add_(0, ids.reshape(-1) % D, ones)",
        _WIDTH,
    ),
    "cells counted": Part("with torch.no_grad(): self.load{n}.add_(ids.numel())", _WIDTH),
    "bias from counts": Part(
        _CHOSEN + "x = x + self.load{n}[chosen].mean(-1, True)\n"
        "with torch.no_grad(): self.load{n}.add_(0.01 * (F.one_hot(chosen, 4).to(x.dtype).mean((0, 1, 2)) - 0.25))",
        _EXPERTS,
    ),
}
"""Statistics of all cells of a batch, padding included, which reach nothing but a buffer."""
READ_THE_MASK = ("experts by index_add", "masked mean")
"""Those of them that run with a mask alone."""

_SPOTS = "spots = ids % 5 == 3\ntorch._dynamo.graph_break()\n"

CUTS = {
    "pictures put in": Part(
        _SPOTS + "x = x.clone()\nx[spots] = self.see{n}(x[spots])", "self.see{n} = nn.Linear(D, D)"
    ),
    "pictures scattered": Part(
        _SPOTS + "x = x.masked_scatter(spots[..., None].expand_as(x), self.see{n}(x[spots]))",
        "self.see{n} = nn.Linear(D, D)",
    ),
    "deep features added": Part(
        _SPOTS + "x[spots, :] = x[spots, :].clone() + self.see{n}.weight[0]", "self.see{n} = nn.Linear(D, D)"
    ),
    "a number printed": Part("x = x * (1.0 if float(x.detach().mean()) > -1e9 else 2.0)"),
    "changed behind a cut": Part("torch._dynamo.graph_break()\nx[:, :1] = x[:, :1] * 0.5\nx.mul_(0.9)"),
}
"""What vision-language models do in front of the backbone and between its layers."""
