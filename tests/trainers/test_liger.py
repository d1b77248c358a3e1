"""Models with Liger's functions: packed like those without, where the functions compute what their names say."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

from tests.batches import Side, distinct_tokens, shared_batch
from tests.models import TinyLM, zoo
from tests.oracle import FLOAT32, FLOAT64, assert_close, compile_with, eager_step, loss_of, outcome, stats_of
from tests.spellings import PADDED, SPELLINGS
from tests.trainers.liger import FUNCTIONS, LigerGELUMulFunction, LigerRMSNormFunction, gelu, patch_llama, slope_of_gelu
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
        assert_close(outcome(model, lambda batch=batch: loss_of(batch)(compiled)), expected, tolerance)
    return stats_of(compiled)


@pytest.mark.parametrize("gate", ["LigerSiLUMulFunction", "LigerGELUMulFunction"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.sample(8)
def test_llama(inner: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_llama(monkeypatch, gate)
    stats = steps(zoo("llama"), FLOAT32, "right", inner=inner)
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


@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_in_float64(padding: Side | None) -> None:
    model = TinyLM(SPELLINGS["sdpa_is_causal"] if padding is None else PADDED["sdpa_padding"], layers=1, before=Block())
    stats = steps(model.double(), FLOAT64, padding, inner="eager")
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


OTHERS = [{"norm": OtherNorm}, {"gate": OtherGate}, {"gate": SwappedGate}]


@pytest.mark.parametrize("other", OTHERS)
def test_functions_that_compute_something_else_are_called_as_they_are(other: dict[str, Any]) -> None:
    for function in other.values():
        function.__name__ = next(name for name in FUNCTIONS if issubclass(function, FUNCTIONS[name]))
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=Block(**other)).double()
    steps(model, FLOAT64, None, inner="eager")


@pytest.mark.parametrize("other", OTHERS)
def test_they_would_be_wrong_by_name_alone(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_computes", lambda *_: True)
    with pytest.raises(AssertionError, match="differ by more than"):
        test_functions_that_compute_something_else_are_called_as_they_are(other)


def test_other_backends_trace_the_functions_themselves() -> None:
    recorded = EagerAndRecordGraphs()
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=Block()).double()
    compile_with(model)(shared_batch(rows=2, length=8, shared=3, vocab=61).input_ids)  # which puts ours in place
    torch._dynamo.reset()
    torch.compile(model, backend=recorded)(shared_batch(rows=2, length=8, shared=3, vocab=61).input_ids)
    targets = {str(node.target) for node in recorded.graphs[0].graph.nodes}
    assert any("autograd_function_apply" in target for target in targets)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_check_takes_what_computes_the_same(name: str, dtype: torch.dtype) -> None:
    known = liger._KNOWN[name]
    types = tuple((operand, dtype) for operand, _ in known.operands)
    settings = (("eps", 1e-6), ("casting_mode", "llama")) if "eps" in known.arguments else ()
    assert liger._computes(FUNCTIONS[name], known, types, settings, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_tells_a_small_number_beside_a_root_from_one_below_it(dtype: torch.dtype) -> None:
    known = liger._KNOWN["LigerRMSNormFunction"]
    types, settings = (("X", dtype), ("W", dtype)), (("eps", 1e-6), ("offset", 0.0), ("casting_mode", "llama"))
    assert not liger._computes(OtherNorm, known, types, settings, torch.device("cpu"))


def test_options_without_a_plain_form_are_left_to_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights by position would be dropped, were the plain form taken for what it does not know."""
    assert not liger._KNOWN["LigerRopeFunction"].takes({"unsqueeze_dim": 2})
    assert not liger._KNOWN["LigerRMSNormFunction"].takes({"casting_mode": -1})
    four = {"q": torch.ones(1, 2, 3, 4), "k": torch.ones(1, 2, 3, 4), "cos": torch.ones(1, 1, 3, 4)}
    assert not liger._KNOWN["LigerRopeFunction"].fits({**four, "sin": four["cos"]})
    part = {"cos": torch.ones(1, 3, 2), "sin": torch.ones(1, 3, 2)}  # of a head's width
    assert not liger._KNOWN["LigerRopeFunction"].fits({**four, **part})
