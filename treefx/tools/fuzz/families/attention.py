"""Write an attention's text: queries, keys, scores, mask and values, many spellings."""

from __future__ import annotations

from treefx.tools.fuzz.families.masks import CONDITIONS, FILLS, OPENINGS
from treefx.tools.fuzz.families.parts import Part
from treefx.tools.fuzz.families.scores import QUERIES, SCORES
from treefx.tools.fuzz.program import Attention, Sizes

__all__ = ["SPELLINGS", "WRITTEN", "attention_part", "condition_part", "has_scores", "has_weights"]

SPELLINGS = ("sdpa", "sdpa is_causal", "sdpa enable_gqa", "matmul", "einsum", "softmax of float64", "softmax by hand",
             "sink", "learned memory", "sigmoid", "logsumexp", "weights dropped")  # fmt: skip
"""How scores and values meet; all but the first three have scores as a value."""
WRITTEN = ("bool", "additive", "each", "each from the right")


_OUT = "x = x + self.out{n}(y.transpose(1, 2).flatten(2))"


def has_scores(attention: Attention) -> bool:
    """Whether the scores are a value of the program."""
    return not attention.spelling.startswith("sdpa")


def has_weights(attention: Attention) -> bool:
    """Whether the attention weights are a value of the program, for the caller to read."""
    return attention.spelling in ("matmul", "einsum")


def condition_part(name: str) -> Part:
    """The part of a condition of an attention; "or <name>" opens instead of hiding."""
    return OPENINGS[name.removeprefix("or ")] if name.startswith("or ") else CONDITIONS[name]


def attention_part(attention: Attention, sizes: Sizes) -> Part:
    """The attention as a part of a model."""
    terms = [QUERIES.get(name) or SCORES[name] for name in attention.terms]
    used = [*terms, *map(condition_part, attention.conditions)]
    return Part(
        "\n".join([*_queries(attention, sizes), *_attend(attention, sizes), _OUT]),
        "\n".join([*_modules(sizes), *[part.init for part in used if part.init], *_own_modules(attention)]),
        "\n".join(dict.fromkeys(part.top for part in used if part.top)),
        " ".join(part.inputs for part in used if part.inputs),
        " ".join([*["random"] * (attention.spelling == "weights dropped"), *[part.traits for part in used]]),
    )  # fmt: skip


def _modules(sizes: Sizes) -> list[str]:
    lines = ["self.q{n}, self.out{n} = nn.Linear(D, D), nn.Linear(D, D)"]
    if sizes.heads == sizes.key_heads:
        return [*lines, "self.k{n}, self.v{n} = nn.Linear(D, D), nn.Linear(D, D)"]
    return [*lines, "self.k{n}, self.v{n} = nn.Linear(D, D // H * G), nn.Linear(D, D // H * G)"]


def _own_modules(attention: Attention) -> list[str]:
    made = {
        "sink": "self.sink{n} = nn.Parameter(torch.randn(H))",
        "learned memory": "self.memory{n} = nn.Parameter(torch.randn(2, 1, H, 2, D // H))",
    }
    return [made[attention.spelling]] if attention.spelling in made else []


def _queries(attention: Attention, sizes: Sizes) -> list[str]:
    lines = [f"{name} = self.{name}{{n}}(x).unflatten(-1, (-1, D // H)).transpose(1, 2)" for name in "qkv"]
    if sizes.heads != sizes.key_heads and attention.spelling != "sdpa enable_gqa":
        lines.append("k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)")
    return [*lines, *[QUERIES[name].forward for name in attention.terms if name in QUERIES]]


def _visible(attention: Attention) -> str:
    """All conditions as one boolean value."""
    hiding = [name for name in attention.conditions if not name.startswith("or ")]
    text = " & ".join(CONDITIONS[name].forward for name in hiding) or "torch.ones(T, T, dtype=torch.bool)"
    opening = [OPENINGS[name[3:]].forward for name in attention.conditions if name.startswith("or ")]
    return " | ".join([f"({text})", *opening]) if opening else text


def _attend(attention: Attention, sizes: Sizes) -> list[str]:
    if has_scores(attention):
        return [*_scores(attention), *_mask(attention), *_values(attention)]
    grouped = ", enable_gqa=True" if attention.spelling == "sdpa enable_gqa" else ""
    if attention.spelling == "sdpa is_causal":
        return [f"y = F.scaled_dot_product_attention(q, k, v, is_causal=True{grouped})"]
    mask = f"visible = {_visible(attention)}"
    if attention.written == "bool":
        return [mask, f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible{grouped})"]
    return [mask, f"y = F.scaled_dot_product_attention(q, k, v, attn_mask={_bias(attention)}{grouped})"]


def _scores(attention: Attention) -> list[str]:
    product = "torch.einsum('bhqe,bhke->bhqk', q, k)" if attention.spelling == "einsum" else "q @ k.mT"
    return [
        f"scores = {product} / (D // H) ** 0.5",
        *[SCORES[name].forward for name in attention.terms if name in SCORES],
    ]


def _mask(attention: Attention) -> list[str]:
    fill = FILLS[attention.fill]
    if attention.written.startswith("each") and not any(name.startswith("or ") for name in attention.conditions):
        texts = [CONDITIONS[name].forward for name in attention.conditions]
        texts = texts[::-1] if attention.written == "each from the right" else texts
        return [f"scores = torch.where({text}, scores, {fill})" for text in texts]
    mask = f"visible = {_visible(attention)}"
    if attention.written == "additive":
        return [mask, f"scores = scores + {_bias(attention)}"]
    if _is_tensor(attention):
        return [mask, f"scores = torch.where(visible, scores, {fill})"]
    return [mask, f"scores = scores.masked_fill(~visible, {fill})"]


def _is_tensor(attention: Attention) -> bool:
    return attention.fill.startswith(("tensor", "full"))


def _bias(attention: Attention) -> str:
    """The mask as numbers to add."""
    fill = FILLS[attention.fill]
    if _is_tensor(attention):
        return f"torch.where(visible, torch.zeros((), dtype=x.dtype), {fill})"
    return f"torch.zeros(visible.shape, dtype=x.dtype).masked_fill(~visible, {fill})"


def _values(attention: Attention) -> list[str]:
    ways = {
        "einsum": "weights = scores.softmax(-1)\ny = torch.einsum('bhqk,bhke->bhqe', weights, v)",
        "softmax of float64": "y = scores.softmax(-1, dtype=torch.float64).to(x.dtype) @ v",
        "softmax by hand": "e = (scores - scores.amax(-1, keepdim=True)).exp()\ny = e @ v / e.sum(-1, keepdim=True)",
        "sink": "scores = torch.cat([scores, self.sink{n}[:, None, None].expand(B, H, T, 1)], -1)\n"
        "y = scores.softmax(-1)[..., :-1] @ v",
        "learned memory": "mk, mv = (m.expand(B, -1, -1, -1) for m in self.memory{n})\n"
        "y = torch.cat([q @ mk.mT, scores], -1).softmax(-1) @ torch.cat([mv, v], -2)",
        "sigmoid": "y = scores.sigmoid() @ v",
        "logsumexp": "y = (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v",
        "weights dropped": "y = F.dropout(scores.softmax(-1), 0.2, self.training) @ v",
    }
    return ways.get(attention.spelling, "weights = scores.softmax(-1)\ny = weights @ v").split("\n")
