"""NaN and infinity in one branch, for any implementation: they reach the tokens that see them, and no other one.

The truth is every query alone with its ancestors, gathered, in float64: no masked pair exists there.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tests.kernels.forests import chain_forest
from treefx.kernels import tree_attention

__all__ = ["CASES", "EVERYTHING", "FORESTS", "NotFinite", "differs_from_paths"]

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_SLOPES = (0.5, 0.25)
FORESTS = {
    "small": chain_forest((-1, 4), (0, 3), (1, 2), (1, 3), (0, 2), (-1, 3), (5, 2), (5, 1)),
    "tiled": chain_forest((-1, 70), (0, 60), (1, 30), (1, 33), (0, 40), (-1, 40), (5, 20), (5, 31)),
    "two tiles": chain_forest((-1, 70), (0, 20), (1, 9), (0, 14)),
}
PLACES = {"a leaf": (-1,), "two leaves": (-1, 5), "a shared prefix": (1,), "inside a tile": (60,)}


@dataclass(frozen=True)
class NotFinite:
    """One call.

    Attributes:
        where: the tensor that holds the value: one of q, k, v and grad (the gradient of the output).
        value: NaN or infinity.
        place: a name of `PLACES`; a number there is a token, counted from the end if negative.
        forest: a name of `FORESTS`.
        options: names of the arguments that are given.
        dtype: of all floating tensors.
        heads: of queries and of keys.
    """

    where: str
    value: float = math.nan
    place: str = "a leaf"
    forest: str = "tiled"
    options: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (2, 2)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return "-".join([self.where, str(self.value), self.place, self.forest, "+".join(self.options) or "plain", kind])


EVERYTHING = ("window", "softcap", "alibi_slopes", "sinks")
_FORESTS = ("small", "tiled")
CASES = [
    *(NotFinite(where, math.nan, "a leaf", forest) for where in ("q", "k", "v", "grad") for forest in _FORESTS),
    *(NotFinite(where, math.inf, "a shared prefix", forest) for where in ("k", "v", "grad") for forest in _FORESTS),
    *(NotFinite(where, place="two leaves", forest="small", options=(name,))
      for where in ("k", "v", "grad") for name in EVERYTHING),
    *(NotFinite(where, place="inside a tile", options=EVERYTHING) for where in ("q", "k", "v", "grad")),
    *(NotFinite(where, -math.inf, dtype=dtype, heads=(4, 2), forest=forest)
      for where in ("v", "grad") for dtype in (torch.float16, torch.float64) for forest in _FORESTS),
]  # fmt: skip


def differs_from_paths(case: NotFinite, impl: str) -> str | None:
    """Return an implementation's error, or ``None`` if all is right."""
    tensors, ends = _draw(case)
    *given, grad = [tensor.clone() for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in given]
    q, k, v, *rest = leaves
    vectors = dict(zip([name for name in ("alibi_slopes", "sinks") if name in case.options], rest, strict=True))
    options = {name: value for name, value in {"window": 9, "softcap": 1.5}.items() if name in case.options}
    out = tree_attention(q, k, v, ends, impl=impl, **options, **vectors)  # type: ignore[arg-type]
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    for name, first, second in zip(("out", "dq", "dk", "dv", *vectors), got, _wanted(case), strict=True):
        finite = second.isfinite()
        if not torch.equal(first.isfinite(), finite):
            wrong = (first.isfinite() != finite).flatten(0, 1).any(0)
            return f"{name} is not finite elsewhere: {sorted(set(wrong.nonzero()[:, 0].tolist()))[:20]}"
        error = (first.double() - second).where(finite, 0.0).abs().max().item()
        if not error <= _TOLERANCE[case.dtype] * max(1.0, second.where(finite, 0.0).abs().max().item()):
            return f"{name} is off by {error:.1e}"
    return None


@lru_cache(maxsize=len(CASES))
def _wanted(case: NotFinite) -> list[Tensor]:
    tensors, _ = _draw(case)
    *given, grad = [tensor.double() for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in given]
    sums: list[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
    parents, out = FORESTS[case.forest], grad.new_empty(grad.shape)
    for token in range(len(parents)):
        path = [token]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        one = _attend_path(leaves, path[:9] if "window" in case.options else path, case)
        out[:, :, token] = one.detach()
        grads = torch.autograd.grad(one, leaves, grad[:, :, token], allow_unused=True)
        for total, part in zip(sums, grads, strict=True):
            total += 0 if part is None else part
    return [out, *sums]


def _attend_path(leaves: list[Tensor], path: list[int], case: NotFinite) -> Tensor:
    """Attend from the first token of a path, ``[B, H, D]``. Other tokens get no gradient, not even zeros times NaN."""
    q, k, v, *vectors = leaves
    group = q.shape[1] // k.shape[1]
    keys, values = (x[:, :, path].repeat_interleave(group, 1) for x in (k, v))
    logits = (q[:, :, path[0], None] * keys).sum(-1) / math.sqrt(q.shape[-1])
    if "softcap" in case.options:
        logits = 1.5 * torch.tanh(logits / 1.5)
    if "alibi_slopes" in case.options:
        logits = logits - vectors[0][:, None] * torch.arange(len(path))
    if "sinks" in case.options:
        logits = torch.cat([logits, vectors[-1][None, :, None].expand(*logits.shape[:2], 1)], -1)
    weights = logits.softmax(-1)[..., : len(path)]
    return (weights[..., None] * values).sum(2)


def _draw(case: NotFinite) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, the given vectors and a gradient, and the forest."""
    generator = torch.Generator().manual_seed(0)
    parents, (heads, kv_heads) = FORESTS[case.forest], case.heads
    tokens = len(parents)
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "grad": heads}
    drawn = {name: torch.randn(1, h, tokens, 8, generator=generator).to(case.dtype) for name, h in shapes.items()}
    for place in PLACES[case.place]:
        drawn[case.where][:, -1, place, 3] = case.value
    vectors = [torch.tensor(_SLOPES) if name == "alibi_slopes" else torch.randn(heads, generator=generator)
               for name in ("alibi_slopes", "sinks") if name in case.options]  # fmt: skip
    ends = list(range(1, tokens + 1))
    for token in reversed(range(tokens)):
        if parents[token] >= 0:
            ends[parents[token]] = max(ends[parents[token]], ends[token])
    found = [drawn["q"], drawn["k"], drawn["v"], *(x.to(case.dtype) for x in vectors), drawn["grad"]]
    return found, torch.tensor(ends, dtype=torch.int32)
