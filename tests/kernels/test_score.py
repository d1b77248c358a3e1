"""Score expressions: text form, evaluation, the linear form; and the checks of the public function."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.kernels import tree_attention
from treefx.kernels.score import Expr, Score, evaluate, linear_in_dot, make_score

CONSTANTS = [
    True,
    False,
    0,
    1,
    -7,
    1.0,
    0.1,
    1e-310,
    -0.0,
    math.inf,
    -math.inf,
    torch.finfo(torch.float32).min,
]


def run(expr: Expr, buffers: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    index = torch.arange(4)
    dot = torch.arange(-16.0, 16.0, dtype=dtype).view(1, 2, 4, 4)
    head = torch.arange(2)[:, None, None]
    return evaluate(
        expr,
        dot=dot,
        q=index[:, None],
        k=index[None, :],
        head=head,
        batch=torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        buffers=buffers,
    )


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_constants_survive_the_text(value: float) -> None:
    again = Score.from_json(Score(("const", value)).to_json()).value[1]
    assert type(again) is type(value) and repr(again) == repr(value)


def test_score_survives_the_text_and_shares_equal_parts() -> None:
    part = ("load", 0, ("q",))
    score = Score(("add", ("mul", ("dot",), part), part), ("lt", ("const", 1), ("const", 1.0)))
    again = Score.from_json(score.to_json())
    assert again == score
    assert again.value[2] is again.value[1][2]
    assert again.visible is not None and type(again.visible[1][1]) is int and type(again.visible[2][1]) is float


@pytest.mark.parametrize("text", ["", "[]", "3", '["dot"'])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="to_json"):
        Score.from_json(text)


DOT, Q, K = ("dot",), ("q",), ("k",)
EXPRESSIONS: dict[str, tuple[Expr, Any]] = {
    "neg": (("neg", DOT), lambda d, q, k: -d),
    "not": (("not", ("eq", Q, K)), lambda d, q, k: q != k),
    "tanh": (("tanh", DOT), lambda d, q, k: d.tanh()),
    "sigmoid": (("sigmoid", DOT), lambda d, q, k: d.sigmoid()),
    "exp_log": (("log", ("exp", DOT)), lambda d, q, k: d),
    "sqrt_abs": (("sqrt", ("abs", DOT)), lambda d, q, k: d.abs().sqrt()),
    "float": (("float", Q), lambda d, q, k: q.double()),
    "int": (("int", ("div", DOT, ("const", 3.0))), lambda d, q, k: (d / 3).trunc().long()),
    "pow": (("pow", DOT, ("const", 2)), lambda d, q, k: d * d),
    "min_max": (("min", ("max", Q, K), ("const", 2)), lambda d, q, k: torch.maximum(q, k).clamp(max=2)),
    "floordiv": (("floordiv", ("sub", Q, K), ("const", 2)), lambda d, q, k: (q - k) // 2),
    "mod": (("mod", ("sub", Q, K), ("const", 3)), lambda d, q, k: (q - k) % 3),
    "and_or": (("or", ("and", ("le", K, Q), ("gt", Q, ("const", 1))), ("ge", K, ("const", 3))),
               lambda d, q, k: ((k <= q) & (q > 1)) | (k >= 3)),
    "where": (("where", ("lt", K, Q), DOT, ("const", -1.0)), lambda d, q, k: torch.where(k < q, d, -1.0)),
    "ne": (("ne", Q, K), lambda d, q, k: q != k),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_evaluate(name: str) -> None:
    expr, expected = EXPRESSIONS[name]
    index = torch.arange(4)
    wanted = expected(torch.arange(-16.0, 16.0, dtype=torch.float64).view(1, 2, 4, 4), index[:, None], index[None])
    torch.testing.assert_close(run(expr), wanted, check_dtype=True)


def test_constants_take_the_accumulation_type() -> None:
    assert run(("mul", DOT, ("const", 0.1)), dtype=torch.float32).dtype == torch.float32
    assert run(("mul", DOT, ("const", 0.1)))[0, 0, 0, 0].item() == -16 * 0.1


def test_load_indexes_like_torch_and_clamps_what_nobody_sees() -> None:
    table = torch.arange(8.0).view(2, 4)
    distance = ("sub", Q, K)
    index = torch.arange(4)
    wanted = table[:, (index[:, None] - index[None])]  # negative distances count from the end
    torch.testing.assert_close(run(("load", 0, ("head",), distance), (table,)), wanted)
    far = run(("load", 0, ("head",), ("mul", distance, ("const", 100))), (table,))
    assert far[0, 3, 0] == 3 and far[0, 0, 3] == 0
    assert run(("load", 0), (torch.tensor(5.0),)) == 5


@pytest.mark.parametrize("expr", [("load", 1, Q), ("load", 0, Q, K), ("sinh", DOT), ("add", DOT), ("where", DOT, DOT)])
def test_bad_expressions_are_refused(expr: Expr) -> None:
    with pytest.raises(InputError, match="got"):
        run(expr, (torch.zeros(4),))


BIAS = ("load", 0, K)
LINEAR: dict[str, tuple[Expr, float]] = {
    "dot": (DOT, 1.0),
    "scaled": (("mul", ("const", 0.5), DOT), 0.5),
    "divided": (("div", DOT, ("const", 8)), 0.125),
    "bias": (("add", ("mul", DOT, ("const", 2.0)), BIAS), 2.0),
    "subtracted": (("sub", BIAS, ("float", DOT)), -1.0),
    "nested": (
        ("mul", ("sub", ("neg", DOT), ("add", BIAS, ("mul", DOT, ("const", 2)))), ("const", 0.5)),
        -1.5,
    ),
    "masked": (("where", ("le", K, Q), ("mul", DOT, ("const", 0.5)), ("const", -math.inf)), 0.5),
    "masked_low": (("where", ("lt", Q, K), ("const", -3e38), ("add", DOT, BIAS)), 1.0),
    "chosen": (("where", ("le", K, Q), ("add", DOT, BIAS), DOT), 1.0),
    "constant": (BIAS, 0.0),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_form_equals_the_expression(name: str) -> None:
    expr, factor = LINEAR[name]
    buffers = (torch.randn(4, dtype=torch.float64),)
    linear = linear_in_dot(expr)
    assert linear is not None and linear[0] == factor
    dot = run(DOT)
    value = linear[0] * dot + (run(linear[1], buffers) if linear[1] is not None else 0.0)
    torch.testing.assert_close(value, run(expr, buffers).expand_as(dot))


@pytest.mark.parametrize(
    "expr",
    [("tanh", DOT), ("mul", DOT, DOT), ("mul", DOT, BIAS), ("div", BIAS, DOT), ("max", DOT, BIAS),
     ("where", ("lt", DOT, BIAS), DOT, BIAS), ("where", ("lt", Q, K), DOT, BIAS),
     ("mul", DOT, ("const", math.inf))],
    ids=repr,
)  # fmt: skip
def test_other_expressions_are_not_linear(expr: Expr) -> None:
    assert linear_in_dot(expr) is None


def test_window_and_alibi_need_a_depth() -> None:
    with pytest.raises(InputError, match="depth"):
        make_score(scale=1.0, window=3)


def good() -> dict[str, Any]:
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 6)
    return {"q": q, "k": k, "v": v, "subtree_end": torch.full((5,), 5, dtype=torch.int32)}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"q": [1.0]}, r"q must be a torch.Tensor, got list"),
    "ends missing": ({"subtree_end": None}, r"subtree_end must be a torch.Tensor, got NoneType"),
    "ends dtype": ({"subtree_end": torch.ones(5)},
                   r"subtree_end must have dtype int32 or int64, got torch.float32"),
    "integer q": ({"q": torch.ones(1, 4, 5, 8, dtype=torch.int32)}, r"q must have a floating-point dtype"),
    "mixed": ({"v": torch.ones(1, 2, 5, 6).double()}, r"v must have the dtype of q, torch.float32"),
    "device": ({"k": torch.ones(1, 2, 5, 8, device="meta")}, r"k must be on the device of q, cpu, got meta"),
    "rank": ({"q": torch.randn(4, 5, 8)},
             r"q must have shape \[batch, heads, tokens, head_dim\], got \[4, 5, 8\]"),
    "heads": ({"k": torch.randn(1, 3, 5, 8)}, r"k must have kv_heads dividing the 4 heads of q"),
    "tokens": ({"v": torch.randn(1, 2, 4, 6)},
               r"v must have shape \[batch, kv_heads, tokens, value_dim\] = \[1, 2, 5, 6\], got \[1, 2, 4"),
    "ends shape": ({"subtree_end": torch.ones(4, dtype=torch.int32)},
                   r"subtree_end must have shape \[tokens\]"),
    "ends value": ({"subtree_end": torch.tensor([5, 5, 2, 5, 5])}, r"subtree_end must lie in"),
    "depth shape": ({"depth": torch.arange(4)}, r"depth must have shape \[tokens\] = \[5\], got \[4\]"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must have shape \[heads\] = \[4\], got \[3\]"),
    "sinks": ({"sinks": torch.ones(4, 1)}, r"sinks must have shape \[heads\], got \[4, 1\]"),
    "scale": ({"scale": math.nan}, r"scale must be a finite number or None, got nan"),
    "window": ({"window": 0}, r"window must be an integer of at least 1 or None, got 0"),
    "softcap": ({"softcap": -1.0}, r"softcap must be a positive number or None, got -1.0"),
    "impl": ({"impl": "cuda"}, r"impl must be one of auto, reference, cpu, flex, triton, got 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(InputError, match=message):
        tree_attention(**{**good(), **changes})


def test_package_has_no_other_names() -> None:
    import treefx.kernels

    assert treefx.kernels.tree_attention is tree_attention
    with pytest.raises(AttributeError, match="flash"):
        treefx.kernels.flash  # noqa: B018
