"""Catalogue inputs besides token ids, mask and labels, of a batch and a generator ``g``."""

__all__ = ["FLOATING", "INPUTS"]

_RANDOM = "torch.rand(B, T, generator=g, dtype=torch.float64)"

INPUTS = {
    "positions": (
        "torch.arange(T).expand(B, T)",
        "(am.cumsum(1) - 1).clamp(min=0)",
        "torch.arange(T).expand(B, T) + torch.randint(0, 9, (B, 1), generator=g)",
        "torch.arange(T).expand(B, T) % 5",
    ),
    "segments": (
        "1 + (torch.arange(T) // 4).expand(B, T)",
        "am * (1 + torch.arange(T) // 3)",
        "torch.randint(0, 3, (B, T), generator=g).sort(1).values",
        "torch.zeros(B, T, dtype=torch.int64)",
    ),
    "types": ("torch.randint(0, 4, (B, T), generator=g)", "(ids % 4)", "(torch.arange(T) > 3).long().expand(B, T)"),
    "number": ("torch.randint(1, 7, (B,), generator=g)", "torch.full((B,), 3)", "am.sum(1)"),
    "gates": (_RANDOM, "torch.rand(V, generator=g, dtype=torch.float64)[ids]", "am.double()"),
    "level": ("0.5 + torch.rand(B, generator=g, dtype=torch.float64)", "torch.full((B,), 0.7, dtype=torch.float64)"),
    "vector": (
        "torch.randn(B, D, generator=g, dtype=torch.float64)",
        "torch.randn(1, D, generator=g, dtype=torch.float64).repeat(B, 1)",
    ),
    "heat": ("torch.tensor(1.3, dtype=torch.float64)",),
    "old": ("-4 * " + _RANDOM, "-4 * torch.rand(V, generator=g, dtype=torch.float64)[ids]"),
    "teacher": ("torch.randn(B, T, V, generator=g, dtype=torch.float64)",),
    "mask1": ("am.bool()", "torch.rand(B, T, generator=g) < 0.8"),
    "mask2": ("torch.ones(T, T, dtype=torch.bool).tril()", "torch.ones(T, T, dtype=torch.bool).tril().triu(-3)"),
    "mask3": (
        "torch.ones(T, T, dtype=torch.bool).tril() & am[:, None].bool()",
        "(torch.rand(B, T, T, generator=g) < 0.7) | torch.eye(T, dtype=torch.bool)",
        "torch.ones(B, T, T, dtype=torch.bool)",
    ),
    "mask4": (
        "(torch.ones(T, T, dtype=torch.bool).tril() & am[:, None].bool())[:, None]",
        "torch.ones(B, 1, T, T, dtype=torch.bool).tril()",
    ),
    "bias4": (
        "torch.randn(B, 1, T, T, generator=g, dtype=torch.float64)",
        "torch.zeros(B, 1, T, T, dtype=torch.float64)",
    ),
    "dgates": (_RANDOM + ".requires_grad_()", "torch.ones(B, T, dtype=torch.float64).requires_grad_()"),
    "dlevel": ("torch.ones(B, dtype=torch.float64).requires_grad_()",),
    "dvector": ("torch.ones(B, D, dtype=torch.float64).requires_grad_()",),
}
"""Several ways per input: rows that differ everywhere, rows that agree where their tokens do."""

FLOATING = ("gates", "level", "vector", "heat", "old", "teacher", "bias4", "dgates", "dlevel", "dvector")
