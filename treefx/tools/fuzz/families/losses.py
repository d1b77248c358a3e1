"""Catalogue heads, and losses over logits [B, T, V], in forward or in the caller."""

import re

from treefx.tools.fuzz.families.parts import Part

__all__ = ["CALLER_LOSSES", "HEADS", "LABELS", "LOSSES", "OUTPUTS"]

HEADS = {
    "linear": Part("logits = self.head(x)", "self.head = nn.Linear(D, V, bias=False)"),
    "linear with bias": Part("logits = self.head(x)", "self.head = nn.Linear(D, V)"),
    "tied": Part("logits = F.linear(x, self.embed.weight)"),
    "capped": Part("logits = 3 * torch.tanh(self.head(x) / 3)", "self.head = nn.Linear(D, V)"),
    "tempered": Part("logits = self.head(x) / heat", "self.head = nn.Linear(D, V)", inputs="heat"),
    "tempered per row": Part(
        "logits = self.head(x) / level[:, None, None]", "self.head = nn.Linear(D, V)", inputs="level"
    ),
    "cast": Part("logits = self.head(x).float().to(x.dtype)", "self.head = nn.Linear(D, V)", traits="single"),
    "two layers": Part(
        "logits = self.head(F.gelu(self.neck(x)))", "self.neck, self.head = nn.Linear(D, D), nn.Linear(D, V)"
    ),
    "shifted inside": Part("logits = self.head(F.pad(x, (0, 0, 1, -1)))", "self.head = nn.Linear(D, V)"),
    "log-softmax": Part("logits = self.head(x).log_softmax(-1)", "self.head = nn.Linear(D, V)"),
    "bias by token": Part(
        "logits = self.head(x).scatter_add(-1, ids[..., None], -torch.ones(B, T, 1, dtype=x.dtype))",
        "self.head = nn.Linear(D, V)",
    ),
}

_SHIFT = "a, t = logits[:, :-1], labels[:, 1:]\n"
_FLAT = "a, t = logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1)\n"
_KEPT = "kept = (t != -100)\nnll = -a.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None])[..., 0]\n"

LOSSES = {
    "cross entropy": Part(_FLAT + "loss = F.cross_entropy(a, t)"),
    "cross entropy, logits transposed": Part(_SHIFT + "loss = F.cross_entropy(a.mT, t)"),
    "sum": Part(_FLAT + "loss = F.cross_entropy(a, t, reduction='sum')"),
    "labels shifted instead": Part(
        "t = F.pad(labels, (0, 1), value=-100)[:, 1:]\nloss = F.cross_entropy(logits.reshape(-1, V), t.reshape(-1))"
    ),
    "not shifted": Part("loss = F.cross_entropy(logits.view(-1, V), labels.view(-1))"),
    "other ignored index": Part(_FLAT + "loss = F.cross_entropy(a, t.masked_fill(t == -100, 0), ignore_index=0)"),
    "nothing ignored": Part(_FLAT + "loss = F.cross_entropy(a, t.clamp(min=0), ignore_index=-1)"),
    "label smoothing": Part(_FLAT + "loss = F.cross_entropy(a, t, label_smoothing=0.1)"),
    "class weights": Part(_FLAT + "loss = F.cross_entropy(a, t, weight=torch.linspace(0.5, 2, V, dtype=a.dtype))"),
    "nll": Part(_FLAT + "loss = F.nll_loss(a.log_softmax(-1), t)"),
    "by hand": Part(_SHIFT + _KEPT + "loss = (nll * kept).sum() / kept.sum().clamp(min=1)"),
    "mean over rows": Part(_SHIFT + _KEPT + "loss = ((nll * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()"),
    "weights per row": Part(_SHIFT + _KEPT + "loss = (nll * kept * level[:, None]).sum()", inputs="level"),
    "weights per token": Part(_SHIFT + _KEPT + "loss = (nll * kept * gates[:, 1:]).sum()", inputs="gates"),
    "weights by mask": Part(_SHIFT + _KEPT + "loss = (nll * am[:, 1:]).sum() / am.sum()"),
    "focal": Part(_SHIFT + _KEPT + "loss = ((1 - (-nll).exp()) ** 2 * nll * kept).sum()"),
    "squared": Part(_SHIFT + _KEPT + "loss = (nll * kept).square().sum()"),
    "square of a row's sum": Part(_SHIFT + _KEPT + "loss = (nll * kept).sum(1).square().mean()"),
    "worst row": Part(_SHIFT + _KEPT + "loss = (nll * kept).sum(1).max()"),
    "worst tokens": Part(_SHIFT + _KEPT + "loss = (nll * kept).flatten().topk(3).values.sum()"),
    "preferences": Part(
        _SHIFT + _KEPT + "s = (-nll * kept).sum(1)\nloss = -F.logsigmoid(s[::2].mean() - s[1::2].sum() / B)"
    ),
    "clipped policy": Part(
        _SHIFT + _KEPT + "ratio = (-nll - old[:, 1:]).exp()\n"
        "gain = torch.minimum(ratio * level[:, None], ratio.clamp(0.8, 1.2) * level[:, None])\n"
        "loss = -(gain * kept).sum()",
        inputs="old level",
    ),
    "detached old policy": Part(
        _SHIFT + _KEPT + "ratio = (-nll + nll.detach()).exp()\nloss = -(ratio * kept * level[:, None]).mean()",
        inputs="level",
    ),
    "entropy": Part(
        _SHIFT + _KEPT + "p = a.softmax(-1)\nloss = (nll * kept).sum() + (p * p.log()).sum(-1).mul(kept).sum()"
    ),
    "z-loss": Part(_FLAT + "loss = F.cross_entropy(a, t) + 0.1 * a.logsumexp(-1).square().mean()"),
    "z-loss where kept": Part(
        _FLAT + "loss = F.cross_entropy(a, t) + 0.1 * (a.logsumexp(-1).square() * (t != -100)).mean()"
    ),
    "square of logits": Part(_FLAT + "loss = F.cross_entropy(a * a, t)"),
    "sum of logits twice": Part(_FLAT + "loss = F.cross_entropy(a + a, t)"),
    "scaled logits": Part(_FLAT + "loss = F.cross_entropy(a / 0.7, t)"),
    "logits plus other logits": Part(
        "a, t = logits[:, :-1] + 0.5 * logits[:, 1:], labels[:, 1:]\n"
        "loss = F.cross_entropy(a.reshape(-1, V), t.reshape(-1))"
    ),
    "difference of columns": Part("loss = (logits[:, 1:] - logits[:, :-1]).square().mean()"),
    "mean of logits": Part("loss = logits.mean()"),
    "sum of squares": Part("loss = logits.square().sum()"),
    "last column": Part("loss = F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0))"),
    "last real token": Part(
        "last = (am * (i + 1)).argmax(1)\nloss = F.cross_entropy(logits[torch.arange(B), last], ids[:, 0])"
    ),
    "every second column": Part("loss = F.cross_entropy(logits[:, :-1:2].reshape(-1, V), ids[:, 1::2].reshape(-1))"),
    "two ahead": Part(
        _FLAT + "loss = F.cross_entropy(a, t)\n"
        "if T > 2: loss = loss + F.cross_entropy(logits[:, :-2].reshape(-1, V), ids[:, 2:].reshape(-1))"
    ),
    "half of the rows": Part(
        "loss = F.cross_entropy(logits[: B // 2 + 1].reshape(-1, V), ids[: B // 2 + 1].reshape(-1))"
    ),
    "chosen positions": Part(
        "where = labels[:, 1:] != -100\nloss = F.cross_entropy(logits[:, :-1][where], labels[:, 1:][where])"
    ),
    "teacher": Part(
        "loss = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction='batchmean')", inputs="teacher"
    ),
    "teacher where kept": Part(
        "kl = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction='none').sum(-1)\n"
        "loss = (kl * am).sum() / am.sum()",
        inputs="teacher",
    ),
    "margin": Part(_FLAT + "loss = F.multi_margin_loss(a, t.clamp(min=0))"),
    "two-class": Part("loss = F.binary_cross_entropy_with_logits(logits[..., 0], am.to(x.dtype))"),
    "random labels": Part(
        "t = torch.where(torch.rand(B, T) < 0.5, ids, -100)\n"
        "loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1), reduction='sum') / T",
        traits="random",
    ),
    "random weights": Part(
        _SHIFT + _KEPT + "loss = (nll * kept * torch.rand(B, T - 1, dtype=a.dtype)).sum()", traits="random"
    ),
    "chunks of the loss": Part(
        "loss = sum(F.cross_entropy(c.reshape(-1, V), t.reshape(-1), reduction='sum')\n"
        "           for c, t in zip(logits[:, :-1].split(4, 1), labels[:, 1:].split(4, 1)))"
    ),
    "loss of each row": Part(
        "loss = sum(F.cross_entropy(logits[b, :-1], labels[b, 1:], reduction='sum') for b in range(B)) / T"
    ),
    "hidden states pulled together": Part(
        _FLAT + "loss = F.cross_entropy(a, t) + (x[:, 1:] - x[:, :-1]).square().mean()"
    ),
    "norm of hidden states": Part(_FLAT + "loss = F.cross_entropy(a, t) + 0.1 * (x.square().mean(-1) * am).sum()"),
    "contrast of rows": Part(
        _FLAT + "h = x[:, -1]\nloss = F.cross_entropy(a, t) + F.cross_entropy(h @ h.T, torch.arange(B))"
    ),
    "cross entropy in float32": Part(_FLAT + "loss = F.cross_entropy(a.float(), t).to(logits.dtype)", traits="single"),
}

CALLER_LOSSES = tuple(
    name for name, part in LOSSES.items() if not part.is_random and not re.search(r"\bx[.\[]", part.forward)
)
"""Those that a caller can write: of logits and inputs alone."""

LABELS = {
    "padding ignored": "ids.masked_fill(am == 0, -100)",
    "all": "ids.clone()",
    "gaps": "ids.masked_fill((am == 0) | (torch.rand(ids.shape, generator=g) < 0.4), -100)",
    "prompt ignored": "ids.masked_fill((am == 0) | (torch.arange(T) < 3), -100)",
    "a row ignored": "ids.masked_fill((am == 0) | (torch.arange(B) == 0)[:, None], -100)",
    "other tokens": "torch.randint(0, V, ids.shape, generator=g).masked_fill(am == 0, -100)",
    "nothing ignored but the last": "ids.masked_fill(torch.arange(T) == T - 1, -100)",
}
"""How a batch gets its labels."""

OUTPUTS = {
    "logits": "(logits,)",
    "loss": "(loss + aux,)",
    "loss and logits": "loss + aux, logits",
    "loss and hidden states": "loss + aux, logits, x",
    "loss and attention": "loss + aux, logits, weights",
}
"""What forward returns; "logits" alone leaves the loss to the caller."""
