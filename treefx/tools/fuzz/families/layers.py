"""Catalogue layers without attention: mixers, experts, norms, token functions."""

from treefx.tools.fuzz.families.parts import Part

__all__ = ["EXPERTS", "MIXERS", "NORMS", "NUMBERED", "POINTWISE", "ROWS"]

_LINEAR = "self.mix{n} = nn.Linear(D, D)"
_GATES = "self.mix{n} = nn.Linear(D, D); self.gate{n} = nn.Linear(D, D)"

MIXERS = {
    "running mean": Part("x = x + x.cumsum(1) / (i[:, None] + 1)"),
    "running mean from the right": Part("x = x + x.flip(1).cumsum(1).flip(1) / T", traits="strange"),
    "mean of the row": Part("x = x + x.mean(1, keepdim=True)", traits="strange"),
    "mean of real tokens": Part(
        "x = x + (x * am[..., None]).sum(1, keepdim=True) / am.sum(1).clamp(min=1)[:, None, None]", traits="strange"
    ),
    "token shift": Part("x = x + self.mix{n}(F.pad(x, (0, 0, 1, 0))[:, :-1])", _LINEAR),
    "token shift by cat": Part("x = x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)"),
    "look-ahead": Part("x = x + F.pad(x[:, 1:], (0, 0, 0, 1))", traits="strange"),
    "roll": Part("x = x + x.roll(1, 1)", traits="strange"),
    "causal convolution": Part(
        "x = x + self.conv{n}(x.transpose(1, 2))[..., :T].transpose(1, 2)",
        "self.conv{n} = nn.Conv1d(D, D, 3, padding=2, groups=D)",
    ),
    "causal convolution of real tokens": Part(
        "x = x + self.conv{n}(F.pad((x * am[..., None]).mT, (2, 0))).mT", "self.conv{n} = nn.Conv1d(D, D, 3)"
    ),
    "centred convolution": Part(
        "x = x + self.conv{n}(x.mT).mT", "self.conv{n} = nn.Conv1d(D, D, 3, padding=1)", traits="strange"
    ),
    "decay by a matrix": Part(
        "decay = torch.where(i[:, None] >= i, 0.5 ** (i[:, None] - i), 0.0).to(x.dtype)\n"
        "x = x + torch.einsum('ts,bsd->btd', decay, x)"
    ),
    "moving average": Part(
        "state, states = torch.zeros_like(x[:, 0]), []\n"
        "for t in range(T):\n"
        "    state = 0.9 * state + 0.1 * x[:, t]\n"
        "    states.append(state)\n"
        "x = x + torch.stack(states, 1)"
    ),
    "gated scan": Part(
        "a, u, state, states = torch.sigmoid(self.gate{n}(x)), self.mix{n}(x), torch.zeros_like(x[:, 0]), []\n"
        "for t in range(T):\n"
        "    state = a[:, t] * state + u[:, t]\n"
        "    states.append(state)\n"
        "x = x + torch.stack(states, 1)",
        _GATES,
    ),
    "scan by logarithms": Part(
        "a = F.logsigmoid(self.gate{n}(x)).cumsum(1)\nx = x + a.exp() * (self.mix{n}(x) / a.exp()).cumsum(1)", _GATES
    ),
    "linear attention": Part(
        "kv = (F.elu(self.gate{n}(x)) + 1).unsqueeze(-1) * self.mix{n}(x).unsqueeze(-2)\n"
        "x = x + torch.einsum('btd,btde->bte', x, kv.cumsum(1)) / D",
        _GATES,
    ),
    "running maximum": Part("x = x + x.cummax(1).values"),
    "largest of the row": Part("x = x + x.amax(1, keepdim=True)", traits="strange"),
    "sorted row": Part("x = x + x.sort(1).values", traits="strange"),
    "Fourier filter": Part(
        "x = x + torch.fft.irfft(torch.fft.rfft(x, n=T, dim=1) * 0.5, n=T, dim=1)", traits="strange"
    ),
    "causal Fourier convolution": Part(
        "kernel = torch.fft.rfft(0.5 ** i.to(x.dtype), n=2 * T)[:, None]\n"
        "x = x + torch.fft.irfft(torch.fft.rfft(x, n=2 * T, dim=1) * kernel, n=2 * T, dim=1)[:, :T]",
        traits="strange",
    ),
    "first token": Part("x = x + x[:, :1]"),
    "last token": Part("x = x + x[:, -1:]", traits="strange"),
    "softmax along the row": Part("x = x + x.softmax(1)", traits="strange"),
    "norm of the row": Part("x = x / (1 + x.norm(dim=1, keepdim=True))", traits="strange"),
    "recurrent layer": Part("x = x + self.gru{n}(x)[0]", "self.gru{n} = nn.GRU(D, D, batch_first=True)"),
    "chunks": Part(
        "padded = F.pad(x, (0, 0, 0, -T % 4)).view(B, -1, 4, D)\nx = x + padded.cumsum(2).view(B, -1, D)[:, :T] / 4"
    ),
    "mean of chunks": Part(
        "padded = F.pad(x, (0, 0, 0, -T % 4)).view(B, -1, 4, D)\nx = x + padded.mean(2).repeat_interleave(4, 1)[:, :T]",
        traits="strange",
    ),
}
"""Mixers along the columns."""

ROWS = {
    "mean of the batch": Part("x = x - x.mean(0, keepdim=True)", traits="strange"),
    "mean of everything": Part("x = x / (1 + x.abs().mean())", traits="strange"),
    "other row": Part("x = x + 0.5 * x.roll(1, 0)", traits="strange"),
    "first row": Part("x = x + x[:1]", traits="strange"),
    "rows in reverse": Part("x = x + x.flip(0)", traits="strange"),
    "running sum over rows": Part("x = x + x.cumsum(0)", traits="strange"),
    "softmax over rows": Part("x = x + x.softmax(0)", traits="strange"),
    "number of the row": Part("x = x + torch.arange(B)[:, None, None] / 8.0", traits="strange"),
    "attention over rows": Part(
        "near = torch.einsum('btd,ctd->tbc', x, x).softmax(-1)\nx = x + torch.einsum('tbc,ctd->btd', near, x)",
        traits="strange",
    ),
    "similarity of rows": Part("x = x + torch.einsum('btd,ctd->bct', x, x).mean(1)[..., None] / D"),
    "largest row": Part("x = x + x.amax(0)", traits="strange"),
}
"""Mixers along the rows."""

_ROUTER = "self.router{n} = nn.Linear(D, 3); self.experts{n} = nn.Parameter(torch.randn(3, D, D) / D ** 0.5)"
_EXPERTS = "torch.einsum('btd,edf->btef', x, self.experts{n})"

EXPERTS = {
    "soft experts": Part(f"x = x + ({_EXPERTS} * self.router{{n}}(x).softmax(-1)[..., None]).sum(2)", _ROUTER),
    "top expert": Part(
        "weight, chosen = self.router{n}(x).softmax(-1).max(-1)\n"
        "x = x + weight[..., None] * torch.einsum('btd,btdf->btf', x, self.experts{n}[chosen])",
        _ROUTER,
    ),
    "top two experts, looped": Part(
        "weight, chosen = self.router{n}(x).softmax(-1).topk(2, -1)\n"
        "y = torch.zeros_like(x)\n"
        "for e in range(3):\n"
        "    y = y + (weight * (chosen == e)).sum(-1, keepdim=True) * (x @ self.experts{n}[e])\n"
        "x = x + y",
        _ROUTER,
    ),
    "experts with a capacity": Part(
        "weight, chosen = self.router{n}(x).softmax(-1).max(-1)\n"
        "place = F.one_hot(chosen.flatten(), 3).cumsum(0).gather(1, chosen.flatten()[:, None]).view(B, T)\n"
        "kept = (place <= (B * T) // 3)[..., None]\n"
        "x = x + kept * weight[..., None] * torch.einsum('btd,btdf->btf', x, self.experts{n}[chosen])",
        _ROUTER,
        traits="strange",
    ),
    "expert choice": Part(
        "weight = self.router{n}(x).flatten(0, 1).softmax(-1)\n"
        "best = weight.topk(max(1, B * T // 4), 0)\n"
        "used = torch.zeros_like(weight).scatter(0, best.indices, best.values).view(B, T, 3)\n"
        f"x = x + ({_EXPERTS} * used[..., None]).sum(2)",
        _ROUTER,
        traits="strange",
    ),
    "experts with a balance loss": Part(
        "share = self.router{n}(x).softmax(-1)\n"
        "used = F.one_hot(share.argmax(-1), 3).to(x.dtype)\n"
        "aux = aux + 0.1 * (share.mean((0, 1)) * used.mean((0, 1))).sum()\n"
        f"x = x + ({_EXPERTS} * (share * used)[..., None]).sum(2)",
        _ROUTER,
    ),
    "experts with a masked balance loss": Part(
        "share = self.router{n}(x).softmax(-1)\n"
        "aux = aux + 0.1 * ((share * am[..., None]).sum((0, 1)) / am.sum()).pow(2).sum()\n"
        f"x = x + ({_EXPERTS} * share[..., None]).sum(2)",
        _ROUTER,
    ),
    "noisy router": Part(
        "share = (self.router{n}(x) + 0.1 * torch.randn(B, T, 3, dtype=x.dtype)).softmax(-1)\n"
        f"x = x + ({_EXPERTS} * share[..., None]).sum(2)",
        _ROUTER,
        traits="random",
    ),
}

NORMS = {
    "layer norm": Part("x = self.norm{n}(x)", "self.norm{n} = nn.LayerNorm(D)"),
    "rms norm": Part("x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)"),
    "rms norm module": Part("x = self.norm{n}(x)", "self.norm{n} = nn.RMSNorm(D)"),
    "batch norm": Part(
        "x = self.norm{n}(x.flatten(0, 1)).unflatten(0, (B, T))", "self.norm{n} = nn.BatchNorm1d(D)", traits="strange"
    ),
    "group norm along the row": Part("x = self.norm{n}(x.mT).mT", "self.norm{n} = nn.GroupNorm(2, D)"),
    "instance norm": Part("x = F.instance_norm(x.mT).mT", traits="strange"),
    "unit length": Part("x = F.normalize(x, dim=-1)"),
    "layer norm of columns and width": Part("x = F.layer_norm(x, (T, D))", traits="strange"),
}

POINTWISE = {
    "gelu layer": Part(
        "x = x + self.down{n}(F.gelu(self.up{n}(x)))",
        "self.up{n}, self.down{n} = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)",
    ),
    "swiglu layer": Part(
        "x = x + self.down{n}(F.silu(self.up{n}(x)) * self.gate{n}(x))",
        "self.up{n}, self.gate{n}, self.down{n} = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)",
    ),
    "log-sigmoid gate": Part("x = x * F.logsigmoid(self.mix{n}(x)).exp()", _LINEAR),
    "squared relu": Part("x = x + F.relu(self.mix{n}(x)).square()", _LINEAR),
    "dropout": Part("x = F.dropout(x, 0.3, self.training)", traits="random"),
    "dropout per row": Part("x = x * (torch.rand(B, 1, 1) > 0.3) if self.training else x", traits="random"),
    "random depth": Part("x = x + (torch.rand(()) > 0.5) * self.mix{n}(x)", _LINEAR, traits="random"),
    "noise": Part("x = x + 0.1 * torch.randn_like(x)", traits="random"),
    "softmax of the width": Part("x = x + x.softmax(-1)"),
    "running sum of the width": Part("x = x + x.cumsum(-1) / D"),
    "sorted width": Part("x = x + x.sort(-1).values"),
    "largest of the width": Part("x = x * (x >= x.topk(2, -1).values[..., -1:])"),
    "in-place": Part("x = x.clone(); x[..., :2] = 0; x += 1"),
    "in-place at padding": Part("x = x.clone(); x[am == 0] = 0"),
    "in-place at the first column": Part("x = x.clone(); x[:, 0] = 0"),
    "half detached": Part("x = 0.5 * x + 0.5 * x.detach()"),
    "indexed by argmax": Part("x = x + self.pool{n}[x.argmax(-1)]", "self.pool{n} = nn.Parameter(torch.randn(D, D))"),
    "value per column": Part("x = x * self.slope{n}[:T, None]", "self.slope{n} = nn.Parameter(torch.ones(64))"),
    "flattened": Part("x = x + self.mix{n}(x.reshape(B * T, D)).reshape(B, T, D)", _LINEAR),
    "columns first": Part("x = x + self.mix{n}(x.transpose(0, 1).contiguous()).transpose(0, 1)", _LINEAR),
    "step counter": Part(
        "self.steps{n} += 1\nx = x * (1 + 0.1 * self.steps{n})",
        "self.register_buffer('steps{n}', torch.zeros((), dtype=torch.float64))",
    ),
    "step counter without gradient": Part(
        "with torch.no_grad(): self.steps{n} += 1\nx = x * (1 + 0.1 * self.steps{n})",
        "self.register_buffer('steps{n}', torch.zeros((), dtype=torch.float64))",
    ),
    "running statistics": Part(
        "self.seen{n}.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))\nx = x - self.seen{n}",
        "self.register_buffer('seen{n}', torch.zeros(D))",
    ),
    "changing temperature": Part("x = x * self.heat", "self.register_buffer('heat', torch.ones(D))"),
}
"""Functions of one token, most of them."""

NUMBERED = {
    "numbers of the model": Part(
        "x = x * self.factor{n} + F.dropout(self.mix{n}(x), self.rate{n}, self.training)",
        _LINEAR + "; self.factor{n}, self.rate{n} = 0.7, 0.0",
    ),
    "attention in a checkpoint of the caller's": Part(
        "x = x + own_checkpoint(functools.partial(self.block{n}), x)",
        "self.block{n} = Numbered()",
        "class Numbered(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.qkv, self.scale, self.rate = nn.Linear(D, 3 * D), 0.3, 0.0\n"
        "    def forward(self, x):\n"
        "        q, k, v = self.qkv(x)[:, None].chunk(3, -1)\n"
        "        rate = self.rate if self.training else 0.0\n"
        "        given = {'is_causal': True, 'scale': self.scale, 'dropout_p': rate}\n"
        "        return F.scaled_dot_product_attention(q, k, v, **given)[:, 0]\n"
        "def own_checkpoint(run, x): return checkpoint(run, x, use_reentrant=False)\n",
    ),
}
"""Layers that read floats of the model, which ``dynamic=True`` makes inputs."""
