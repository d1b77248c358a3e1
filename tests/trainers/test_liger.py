"""Models with Liger's functions: packed like those without, where the functions compute what their names say."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

from tests.backend import support
from tests.batches import Batch, Side, distinct_tokens, shared_batch
from tests.models import TinyLM, zoo
from tests.oracle import (
    FLOAT32,
    FLOAT64,
    assert_close,
    compile_with,
    eager_step,
    loss_of,
    outcome,
    stats_of,
    zero_gradients,
)
from tests.spellings import PADDED, SPELLINGS
from tests.trainers.liger import (
    FUNCTIONS,
    LigerFusedLinearCrossEntropyFunction,
    LigerGELUMulFunction,
    LigerLayerNormFunction,
    LigerReLUSquaredFunction,
    LigerRMSNormFunction,
    fused_loss,
    gelu,
    loss_and_slopes,
    patch_llama,
    slope_of_gelu,
)
from treefx.runtime.whole import liger

SHAPES = [(4, 12), (6, 17), (3, 9)]


def steps(
    model: nn.Module, tolerance: float = FLOAT32, padding: Side | None = "right", **options: Any
) -> dict[str, Any]:
    """Exact steps of several shapes, the first call without gradients."""
    compiled = compile_with(model, **options)
    with torch.no_grad():
        compiled(**shared_batch(rows=2, length=8, shared=3, vocab=61, padding=padding).without("labels").inputs())
    for seed, (rows, length) in enumerate(SHAPES):
        batch = shared_batch(rows=rows, length=length, shared=length // 2, vocab=61, seed=seed, padding=padding)
        expected = eager_step(model, batch)
        got = outcome(model, lambda batch=batch: loss_of(batch)(compiled))
        assert_close(got, expected, tolerance, lambda batch=batch: zero_gradients(model, loss_of(batch)))
    return stats_of(compiled)


def test_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gate; the other one is in ``test_in_float64``."""
    patch_llama(monkeypatch, "LigerSiLUMulFunction")
    stats = steps(zoo("llama", num_hidden_layers=1), FLOAT32, "right", inner="aot_eager")
    rows, length = SHAPES[-1]
    batch = shared_batch(rows=rows, length=length, shared=length // 2, vocab=61, seed=len(SHAPES) - 1)
    assert stats["expansions"] == [] and stats["tokens"] == distinct_tokens(batch)


class Block(nn.Module):
    """A norm and a gated product, in the type of the model."""

    def __init__(self, norm: Any = LigerRMSNormFunction, gate: Any = LigerGELUMulFunction, offset: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.norm, self.gate, self.offset = norm, gate, offset

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm.apply(x, self.weight, 1e-2, self.offset, "none", False)
        return self.gate.apply(normed, x)  # type: ignore[no-any-return]


class Centred(nn.Module):
    """A layer norm and a squared ReLU."""

    def __init__(self, norm: Any = LigerLayerNormFunction, square: Any = LigerReLUSquaredFunction) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.linspace(*ends, 32)) for ends in ((0.5, 1.5), (-0.4, 0.6)))
        self.norm, self.square = norm, square

    def forward(self, x: Tensor) -> Tensor:
        return x + self.square.apply(self.norm.apply(x, self.weight, self.bias, 1e-2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("padding", [None, "left"])
def test_in_float64(padding: Side | None) -> None:
    spelling = SPELLINGS["sdpa_is_causal"] if padding is None else PADDED["sdpa_padding"]
    model = TinyLM(spelling, layers=1, before=nn.Sequential(Block(), Centred())).double()
    stats = steps(model, FLOAT64, padding, inner="eager")
    assert stats["expansions"] == [] and stats["ran"] == "packed"


class OtherNorm(LigerRMSNormFunction):
    """eps outside of the root: another function under the same name."""

    @staticmethod
    def forward(
        ctx: Any, X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
        in_place: bool = True, row_mode: Any = None,
    ) -> Tensor:  # fmt: skip
        rstd = 1 / ((X * X).mean(-1, keepdim=True).sqrt() + eps)
        ctx.save_for_backward(X, W, rstd)
        ctx.offset, ctx.in_place = offset, False
        return X * rstd * (offset + W)


class OtherGate(LigerGELUMulFunction):
    """A backward that leaves out a part."""

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return dc * b, dc * a


class SwappedGate(LigerGELUMulFunction):
    """The other operand goes through the gate."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * gelu(b)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return dc * gelu(b), dc * slope_of_gelu(b) * a


class Uncentred(LigerLayerNormFunction):
    """Nothing is taken off: a norm by the root of squares, with a bias."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt((X * X).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(X * rstd, W, rstd)
        return X * rstd * W + B

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:  # type: ignore[override]
        normed, W, rstd = ctx.saved_tensors
        m = dY * W
        dX = rstd * (m - normed * (m * normed).mean(-1, keepdim=True))
        return dX, (dY * normed).flatten(0, -2).sum(0), dY.flatten(0, -2).sum(0), None


class Halved(LigerReLUSquaredFunction):
    """A slope of half the size."""

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:  # type: ignore[override]
        (X,) = ctx.saved_tensors
        return dY * X.clamp(min=0)


OTHERS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Block, {"norm": OtherNorm}), (Block, {"gate": OtherGate}), (Block, {"gate": SwappedGate}),
    (Centred, {"norm": Uncentred}), (Centred, {"square": Halved}),
]  # fmt: skip


def one_step(*parts: nn.Module) -> None:
    """An exact step of a model with these modules before its blocks."""
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=nn.Sequential(*parts)).double()
    support.compare(model, shared_batch(rows=4, length=12, shared=6, vocab=61, padding=None))


def made(block: type[nn.Module], other: dict[str, Any]) -> nn.Module:
    """A block with another function, which has the name of Liger's."""
    for function in other.values():
        function.__name__ = next(name for name in FUNCTIONS if issubclass(function, FUNCTIONS[name]))
    return block(**other)


def test_functions_that_compute_something_else_are_called_as_they_are() -> None:
    one_step(*(made(block, other) for block, other in OTHERS))


@pytest.mark.parametrize(("block", "other"), OTHERS)
def test_they_would_be_wrong_by_name_alone(block: Any, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_computes", lambda *_: True)
    with pytest.raises(AssertionError, match="differ by more than"):
        one_step(made(block, other))


def test_other_backends_trace_the_functions_themselves() -> None:
    recorded = EagerAndRecordGraphs()
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=Block()).double()
    compile_with(model)(shared_batch(rows=2, length=8, shared=3, vocab=61).input_ids)  # which puts ours in place
    torch._dynamo.reset()
    torch.compile(model, backend=recorded)(shared_batch(rows=2, length=8, shared=3, vocab=61).input_ids)
    targets = {str(node.target) for node in recorded.graphs[0].graph.nodes}
    assert any("autograd_function_apply" in target for target in targets)


# A head and its loss -------------------------------------------------------------------------------------------------


def fused_model(**changes: Any) -> nn.Module:
    model = zoo("llama", num_hidden_layers=1)
    fused_loss(model, **changes)
    return model


def test_a_head_that_gives_its_loss_runs_on_distinct_tokens() -> None:
    """With a cap of its logits; without one it is in the two tests below."""
    stats = steps(fused_model(softcap=2.0), inner="eager", max_logits=1)
    rows, length = SHAPES[-1]
    batch = shared_batch(rows=rows, length=length, shared=length // 2, vocab=61, seed=len(SHAPES) - 1)
    assert (stats["ran"], stats["fallback"], stats["expansions"]) == ("packed", None, [])
    assert stats["tokens"] == distinct_tokens(batch)


def test_a_number_of_items_and_labels_of_which_none_counts() -> None:
    model = fused_model(reduction="sum")
    compiled = compile_with(model, inner="eager")
    batch = shared_batch(rows=4, length=12, shared=6, vocab=61)
    for labels in (batch.labels, torch.full_like(batch.input_ids, -100)):
        given = Batch(batch.input_ids, batch.attention_mask, labels)
        got, expected = (
            outcome(model, lambda run=run: loss_of(given, num_items_in_batch=17)(run))  # noqa: B023
            for run in (compiled, model)
        )
        assert_close(got, expected, FLOAT32)
    mean = fused_model()
    nothing = Batch(batch.input_ids, batch.attention_mask, torch.full_like(batch.input_ids, -100))
    assert float(loss_of(nothing)(compile_with(mean, inner="eager"))) == float(loss_of(nothing)(mean)) == 0.0


class OfAllTokens(LigerFusedLinearCrossEntropyFunction):
    """A mean over all tokens, of those that count and the others."""

    @staticmethod
    def forward(
        ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Any = None, ce_weight: Any = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
        softcap: Any = None, *rest: Any,
    ) -> tuple[Tensor, None, None, None]:  # fmt: skip
        loss = loss_and_slopes(ctx, _input, weight, target, bias, ignore_index, softcap, len(target))
        ctx.given = len(ctx.needs_input_grad)
        return loss, None, None, None


def step_with_another_mean() -> None:
    OfAllTokens.__name__ = "LigerFusedLinearCrossEntropyFunction"
    support.compare(fused_model(function=OfAllTokens), shared_batch(rows=4, length=12, shared=6, vocab=61))


def test_another_mean_is_computed_as_it_is() -> None:
    step_with_another_mean()


def test_another_mean_would_be_wrong_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_computes", lambda *_: True)
    with pytest.raises(AssertionError, match="differ by more than"):
        step_with_another_mean()


# The check ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_check_takes_what_computes_the_same(name: str, dtype: torch.dtype) -> None:
    """But for a loss in float32 of a model in float64, which the plain form has in float64."""
    known = liger._KNOWN[name]
    types = tuple((operand, torch.int64 if kind == "targets" else dtype) for operand, kind in known.operands)
    settings = (("eps", 1e-6), ("casting_mode", "llama")) if "eps" in known.arguments else ()
    if (known.arguments[0], dtype) == ("_input", torch.float64):
        assert not liger._computes(FUNCTIONS[name], known, types, settings, torch.device("cpu"))
        return
    assert liger._computes(FUNCTIONS[name], known, types, settings, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_tells_a_small_number_beside_a_root_from_one_below_it(dtype: torch.dtype) -> None:
    known = liger._KNOWN["LigerRMSNormFunction"]
    types, settings = (("X", dtype), ("W", dtype)), (("eps", 1e-6), ("offset", 0.0), ("casting_mode", "llama"))
    assert not liger._computes(OtherNorm, known, types, settings, torch.device("cpu"))


def test_options_of_a_head_without_a_plain_form_are_left_to_it() -> None:
    known = liger._KNOWN["LigerFusedLinearCrossEntropyFunction"]
    for option in ({"label_smoothing": 0.1}, {"reduction": "none"}, {"return_z_loss": True}, {"ignore_index": 0}):
        assert not known.takes(option)
    assert known.takes({"reduction": "sum", "softcap": 30.0, "accum_dtype": torch.float32})


def test_options_without_a_plain_form_are_left_to_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights by position would be dropped, were the plain form taken for what it does not know."""
    assert not liger._KNOWN["LigerRopeFunction"].takes({"unsqueeze_dim": 2})
    assert not liger._KNOWN["LigerRMSNormFunction"].takes({"casting_mode": -1})
    four = {"q": torch.ones(1, 2, 3, 4), "k": torch.ones(1, 2, 3, 4), "cos": torch.ones(1, 1, 3, 4)}
    assert not liger._KNOWN["LigerRopeFunction"].fits({**four, "sin": four["cos"]})
    part = {"cos": torch.ones(1, 3, 2), "sin": torch.ones(1, 3, 2)}  # of a head's width
    assert not liger._KNOWN["LigerRopeFunction"].fits({**four, **part})
