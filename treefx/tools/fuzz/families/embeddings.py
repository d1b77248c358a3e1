"""Catalogue maps of token ids, positions and conditions to hidden states.

The first one of a program makes ``x``.
"""

from treefx.tools.fuzz.families.parts import Part

__all__ = ["CONDITIONING", "EMBEDDINGS", "POSITIONS"]


def _table(arguments: str) -> Part:
    return Part("x = self.embed(ids)", f"self.embed = nn.Embedding(V, D{arguments})")


EMBEDDINGS = {
    "embedding": _table(""),
    "embedding that divides by counts": _table(", scale_grad_by_freq=True"),
    "embedding with a padding index": _table(", padding_idx=0"),
    "embedding of bounded norm": _table(", max_norm=1.0"),
    "frozen embedding": Part("x = self.embed(ids)", "self.embed = nn.Embedding(V, D).requires_grad_(False)"),
    "one-hot product": Part(
        "x = F.one_hot(ids, V).to(self.embed.weight.dtype) @ self.embed.weight", "self.embed = nn.Embedding(V, D)"
    ),
    "indexed weight": Part("x = self.embed.weight[ids]", "self.embed = nn.Embedding(V, D)"),
    "scaled embedding": Part("x = self.embed(ids) * D ** 0.5", "self.embed = nn.Embedding(V, D)"),
}
"""All of them keep the table in ``self.embed``: heads may be tied to it."""

POSITIONS = {
    "columns": Part("x = x + self.place(i)", "self.place = nn.Embedding(64, D)"),
    "columns given": Part("x = x + self.place(positions)", "self.place = nn.Embedding(64, D)", inputs="positions"),
    "real tokens counted": Part(
        "x = x + self.place((am.cumsum(1) - 1).clamp(min=0))", "self.place = nn.Embedding(64, D)"
    ),
    "sines": Part("x = x + torch.sin(i[:, None] / 10 ** (torch.arange(D) / D)).to(x.dtype)"),
    "sliced table": Part("x = x + self.table[:T]", "self.table = nn.Parameter(torch.randn(64, D))"),
}

CONDITIONING = {
    "token types": Part("x = x + self.kind(types)", "self.kind = nn.Embedding(4, D)", inputs="types"),
    "gates": Part("x = x * gates[..., None]", inputs="gates"),
    "gates with gradient": Part("x = x * dgates[..., None]", inputs="dgates"),
    "a number per row": Part("x = x * level[:, None, None]", inputs="level"),
    "a number per row with gradient": Part("x = x + dlevel[:, None, None]", inputs="dlevel"),
    "a vector per row": Part("x = x + vector[:, None]", inputs="vector"),
    "a vector per row with gradient": Part("x = x + dvector[:, None]", inputs="dvector"),
    "a class per row": Part("x = x + self.sort(number)[:, None]", "self.sort = nn.Embedding(16, D)", inputs="number"),
    "noise on embeddings": Part("x = x + 0.1 * torch.randn_like(x)", traits="random"),
    "noise per row": Part("x = x * (1 + torch.rand(B, 1, 1, dtype=x.dtype))", traits="random"),
    "hidden at padding": Part("x = x * am[..., None]"),
    "token-valued feature": Part("x = x + (ids % 3 == 0)[..., None].to(x.dtype)"),
    "count of a token": Part("x = x + (ids == 3).cumsum(1)[..., None].to(x.dtype)"),
    "length of the row": Part("x = x + am.sum(1)[:, None, None].to(x.dtype) / T"),
    "requires_grad_": Part("x = x.detach().requires_grad_(); self.kept = x"),
    "dropped embeddings": Part("x = F.dropout(x, 0.3, self.training)", traits="random"),
}
