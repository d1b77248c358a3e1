"""Catalogue changes of attention scores before the mask: terms, caps, temperatures."""

from treefx.tools.fuzz.families.parts import Part

__all__ = ["QUERIES", "SCORES"]

_TURN = (
    "def turn(x, places):\n"
    "    half = x.shape[-1] // 2\n"
    "    angle = places[..., None] / 10.0 ** (torch.arange(half) / half)\n"
    "    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)\n"
    "    a, b = x[..., :half], x[..., half:]\n"
    "    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)\n"
)

SCORES = {
    "ALiBi": Part("scores = scores - (i[:, None] - i) * (0.5 ** torch.arange(1, H + 1))[:, None, None]"),
    "ALiBi of the key alone": Part("scores = scores + i * (0.5 ** torch.arange(1, H + 1))[:, None, None]"),
    "distance buckets": Part(
        "scores = scores + self.bias{n}((i[:, None] - i).clamp(0, 7)).permute(2, 0, 1)",
        "self.bias{n} = nn.Embedding(8, H)",
    ),
    "table of columns": Part(
        "scores = scores + self.table{n}[:T, :T]", "self.table{n} = nn.Parameter(torch.randn(64, 64))"
    ),
    "softcap": Part("scores = 2 * torch.tanh(scores / 2)"),
    "temperature": Part("scores = scores * 1.7"),
    "temperature of the column": Part("scores = scores * (i + 2).to(x.dtype).log()[:, None]"),
    "temperature per row": Part("scores = scores / level[:, None, None, None]", inputs="level"),
    "temperature given": Part("scores = scores / heat", inputs="heat"),
    "learned temperature": Part("scores = scores * self.heat{n}", "self.heat{n} = nn.Parameter(torch.rand(H, 1, 1))"),
    "bias of the key's token": Part(
        "scores = scores + self.liking{n}[ids][:, None, None]", "self.liking{n} = nn.Parameter(torch.randn(V))"
    ),
    "bias of the key": Part(
        "scores = scores + self.worth{n}(x)[:, None, :, 0].unsqueeze(2)", "self.worth{n} = nn.Linear(D, 1)"
    ),
    "bias of the query's column": Part(
        "scores = scores + self.worth{n}[:T, None]", "self.worth{n} = nn.Parameter(torch.randn(64))"
    ),
    "soft segments": Part(
        "scores = scores - 2.0 * (segments[:, :, None] != segments[:, None])[:, None]", inputs="segments"
    ),
    "given bias": Part("scores = scores + bias4", inputs="bias4"),
    "relative keys": Part(
        "near = self.near{n}[(i[:, None] - i).clamp(0, 7)]\nscores = scores + torch.einsum('bhqe,qke->bhqk', q, near)",
        "self.near{n} = nn.Parameter(torch.randn(8, D // H))",
    ),
    "second scores": Part("scores = scores - 0.3 * (k @ q.mT).mT"),
    "counted from the end": Part("scores = scores + (i[-1 - i] % 3 + torch.arange(90)[7:80][-1 - i] % 5).to(x.dtype)"),
    "bytes that wrap around": Part(
        "scores = scores + ((i.to(torch.uint8) * 40)[:, None] + i * 3 % 7).to(x.dtype) * 0.1"
    ),
    "scaled difference": Part("scores = scores + torch.rsub(i.to(x.dtype), 1, alpha=0.3)"),
    "large scores": Part("scores = scores * 1e4", traits="steep"),
}
"""Each needs scores as a value: not for scaled_dot_product_attention."""

QUERIES = {
    "rotary": Part("q, k = turn(q, i), turn(k, i)", top=_TURN, traits="angles"),
    "rotary with given positions": Part(
        "q, k = turn(q, positions[:, None]), turn(k, positions[:, None])",
        top=_TURN,
        inputs="positions",
        traits="angles",
    ),
    "normed queries and keys": Part("q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)"),
    "keys from the first column": Part("k = torch.cat([k[..., :1, :], k[..., :-1, :]], -2)"),
    "values of zero at padding": Part("v = v * am[:, None, :, None]"),
}
"""What happens to queries, keys and values before there are scores."""
