"""The reference against plain attention on every root-to-leaf row, in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.kernels import tree_attention

PARENTS = [-1, 0, 1, 2, 2, 4, 1, 6, 7, -1, 9, 10, 9, 12, 13, 13]
FEATURES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "window": ("window",),
    "softcap": ("softcap",),
    "alibi": ("alibi_slopes",),
    "sinks": ("sinks",),
    "everything": ("scale", "window", "softcap", "alibi_slopes", "sinks"),
}


def options(names: tuple[str, ...], heads: int) -> dict[str, Any]:
    values: dict[str, Any] = {"scale": 0.7, "window": 3, "softcap": 1.5}
    values["alibi_slopes"] = torch.rand(heads, dtype=torch.float64, requires_grad=True)
    values["sinks"] = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    return {name: values[name] for name in names}


def attend_row(q: Tensor, k: Tensor, v: Tensor, chosen: dict[str, Any]) -> Tensor:
    """Attend causally along one row, q [H, T, D], one query at a time."""
    heads, tokens, width = q.shape
    group, outputs = heads // k.shape[0], []
    for head in range(heads):
        for t in range(tokens):
            first = max(0, t + 1 - chosen.get("window", tokens))
            logits = chosen.get("scale", 1 / math.sqrt(width)) * (k[head // group, first : t + 1] @ q[head, t])
            if "softcap" in chosen:
                logits = chosen["softcap"] * torch.tanh(logits / chosen["softcap"])
            if "alibi_slopes" in chosen:
                logits = logits - chosen["alibi_slopes"][head] * (t - torch.arange(first, t + 1))
            if "sinks" in chosen:
                logits = torch.cat([logits, chosen["sinks"][head, None]])
            outputs.append(torch.softmax(logits, dim=0)[: t + 1 - first] @ v[head // group, first : t + 1])
    return torch.stack(outputs).view(heads, tokens, -1)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, parents: list[int], chosen: dict[str, Any]) -> Tensor:
    """Attend on every root-to-leaf row alone; a shared token takes its output from the first row."""
    found: dict[int, Tensor] = {}
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        out = attend_row(q[0][:, path], k[0][:, path], v[0][:, path], chosen)
        for position, token in enumerate(path):
            found.setdefault(token, out[:, position])
    return torch.stack([found[token] for token in range(len(parents))], dim=1)[None]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("names", FEATURES.values(), ids=FEATURES.keys())
def test_reference_matches_separate_rows(
    names: tuple[str, ...], kv_heads: int, ends_of: Callable[[list[int]], Tensor]
) -> None:
    torch.manual_seed(0)
    tokens, heads = len(PARENTS), 4
    q = torch.randn(1, heads, tokens, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, kv_heads, tokens, 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, kv_heads, tokens, 5, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(1, heads, tokens, 5, dtype=torch.float64)
    chosen = options(names, heads)
    leaves = [q, k, v, *(value for value in chosen.values() if isinstance(value, Tensor))]
    expected = attend_rows(q, k, v, PARENTS, chosen)
    actual = tree_attention(q, k, v, ends_of(PARENTS), impl="reference", **chosen)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    for got, want in zip(torch.autograd.grad(actual, leaves, grad), expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def relative_difference(first: Tensor, second: Tensor) -> float:
    return ((first - second).norm() / second.norm()).item()


def test_plain_causal_mask_is_another_result(ends_of: Callable[[list[int]], Tensor]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, len(PARENTS), 8, dtype=torch.float64)
    ends = ends_of(PARENTS)
    right = tree_attention(q, k, v, ends)
    assert relative_difference(tree_attention(q, k, v, torch.full_like(ends, len(PARENTS))), right) > 0.01


@pytest.mark.parametrize("names", [("window",), ("alibi_slopes",)], ids=["window", "alibi"])
def test_packed_distance_is_another_result(names: tuple[str, ...], ends_of: Callable[[list[int]], Tensor]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, len(PARENTS), 8, dtype=torch.float64)
    ends, chosen = ends_of(PARENTS), options(names, 2)
    right = tree_attention(q, k, v, ends, **chosen)
    packed = tree_attention(q, k, v, ends, torch.arange(len(PARENTS)), **chosen)
    assert relative_difference(packed, right) > 1e-3


def test_reference_blocks_agree_with_one_block(
    monkeypatch: pytest.MonkeyPatch, ends_of: Callable[[list[int]], Tensor]
) -> None:
    from treefx.kernels import reference

    q, k, v = torch.randn(3, 1, 2, len(PARENTS), 8, dtype=torch.float64)
    whole = tree_attention(q, k, v, ends_of(PARENTS), impl="reference")
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 1)
    blocks = tree_attention(q, k, v, ends_of(PARENTS), impl="reference")
    torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-14)
