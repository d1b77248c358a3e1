"""Catalogue: which keys a query may see, and what the scores of the others become."""

from treefx.tools.fuzz.families.parts import Part

__all__ = ["CONDITIONS", "FILLS", "OPENINGS"]

CONDITIONS = {
    "causal": Part("(i[:, None] >= i)"),
    "causal by tril": Part("torch.ones(T, T, dtype=torch.bool).tril()"),
    "causal by triu": Part("(torch.triu(torch.ones(T, T), 1) == 0)"),
    "causal by a buffer": Part(
        "self.tri[:T, :T]", "self.register_buffer('tri', torch.ones(64, 64, dtype=torch.bool).tril())"
    ),
    "causal by given positions": Part("(positions[:, None, :, None] >= positions[:, None, None])", inputs="positions"),
    "padding": Part("am[:, None, None].bool()"),
    "padding by token": Part("(ids != 0)[:, None, None]"),
    "padding of the query": Part("am[:, None, :, None].bool()"),
    "padding as numbers": Part("(am[:, None, None] * 1.0 > 0.5)"),
    "padding on both sides": Part("(am[:, None, :, None] == am[:, None, None])"),
    "a token hidden": Part("(ids != 7)[:, None, None]"),
    "tokens of a class hidden": Part("(ids % 4 != 1)[:, None, None]"),
    "gate of the key": Part("(gates > 0.3)[:, None, None]", inputs="gates"),
    "type of the key": Part("(types < 2)[:, None, None]", inputs="types"),
    "a column hidden": Part("(i != 2)"),
    "window": Part("(i[:, None] - i < 3)"),
    "window and first column": Part("((i[:, None] - i < 3) | (i < 1))"),
    "window per row": Part("(i[:, None] - i < number[:, None, None, None])", inputs="number"),
    "window drawn per row": Part("(i[:, None] - i < torch.randint(1, 5, (B, 1, 1, 1)))", traits="random"),
    "window drawn": Part("(i[:, None] - i < torch.randint(1, 5, ()))", traits="random"),
    "keys dropped at random": Part("(torch.rand(B, 1, 1, T) > 0.2)", traits="random"),
    "chunks": Part("(i[:, None] // 4 == i // 4)"),
    "chunks of real tokens": Part("((am.cumsum(1) // 4)[:, None, :, None] == (am.cumsum(1) // 4)[:, None, None])"),
    "dilated": Part("((i[:, None] - i) % 2 == 0)"),
    "every third key": Part("(i % 3 == 0)"),
    "segments": Part("(segments[:, None, :, None] == segments[:, None, None])", inputs="segments"),
    "real segments": Part(
        "((segments[:, None, :, None] == segments[:, None, None]) & (segments > 0)[:, None, None])", inputs="segments"
    ),
    "documents by a token": Part("((ids == 5).cumsum(1)[:, None, :, None] == (ids == 5).cumsum(1)[:, None, None])"),
    "same class of tokens": Part("(ids[:, None, :, None] % 2 == ids[:, None, None] % 2)"),
    "not the same token": Part("(ids[:, None, :, None] != ids[:, None, None])"),
    "length of the row": Part("(i < am.sum(1)[:, None, None, None])"),
    "length per row": Part("(i < number[:, None, None, None])", inputs="number"),
    "given mask [B, T, T]": Part("mask3[:, None]", inputs="mask3"),
    "given mask [B, 1, T, T]": Part("mask4", inputs="mask4"),
    "given mask [T, T]": Part("mask2", inputs="mask2"),
    "given mask of keys": Part("mask1[:, None, None]", inputs="mask1"),
    "per head": Part("((i[:, None] - i) < torch.arange(2, H + 2)[:, None, None])"),
}
"""Conditions that only hide more: the causal one is added to them. They broadcast to [B, H, T, T]."""

OPENINGS = {
    "itself": Part("(i[:, None] == i)"),
    "first columns": Part("(i < 2)"),
    "prefix per row": Part("(i < number[:, None, None, None])", inputs="number"),
    "the next column": Part("(i == i[:, None] + 1)"),
    "its chunk": Part("(i[:, None] // 4 == i // 4)"),
    "everything in late columns": Part("(i[:, None] > 7)"),
    "tokens of a class": Part("(ids % 4 == 1)[:, None, None]"),
}
"""Conditions that let more be seen: "or <name>" in a program. Most are not causal."""

FILLS = {
    "-inf": "float('-inf')",
    "finfo.min": "torch.finfo(x.dtype).min",
    "-1e9": "-1e9",
    "-1e4": "-1e4",
    "-30": "-30.0",
    "tensor(finfo.min)": "torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype)",
    "tensor(-inf)": "torch.tensor(float('-inf'), dtype=x.dtype)",
    "full(finfo.min)": "torch.full((), torch.finfo(x.dtype).min, dtype=x.dtype)",
}
