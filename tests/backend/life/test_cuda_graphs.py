"""Modes that record CUDA graphs: what inductor is told with each graph. Recording itself needs a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.utils import get_first_incompatible_cudagraph_node

import treefx
from tests.backend.native import TakesCacheFlag
from tests.batches import shared_batch
from tests.models import TinyLM
from tests.oracle import (
    FLOAT64,
    assert_close,
    compile_with,
    eager_step,
    loss_of,
    outcome,
    refused,
    separate_rows,
    stats_of,
)
from tests.planning.cuts import every_node
from tests.planning.parts import run, weighted_forest
from tests.spellings import SPELLINGS
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.passes.packing import compile_inner
from treefx.passes.packing.compile_inner import Inner, calls_subgraphs

BATCH = shared_batch(rows=4, length=12, shared=8, vocab=61, padding=None)
Told = list[dict[str, Any]]


def tiny() -> nn.Module:
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16).double()


class Stateful(nn.Module):
    """A model with a buffer, one that its forward changes, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny()
        self.register_buffer("scale", torch.full((16,), 1.5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int64))

    def forward(self, **inputs: Any) -> Any:
        self.calls += 1
        found = self.model(**inputs)
        return type(found)(found.loss * self.scale.mean(), *found[1:])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """What inductor is told with each graph; the graph then runs unchanged."""
    found: Told = []

    def keep(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        config = torch._inductor.config
        partitioned = getattr(config, "custom_should_partition_ops", [])
        found.append({**options, "gm": gm, "inputs": list(inputs), "apart": list(partitioned),
                      "recording": config.triton.cudagraphs})  # fmt: skip
        return boxed_nop(gm, list(inputs))

    monkeypatch.setattr(compile_inner, "compile_fx_inner", keep)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield found


def step(model: nn.Module, **options: Any) -> Any:
    """One exact step that runs packed."""
    expected = eager_step(model, BATCH)
    compiled = compile_with(model, **{"inner": "inductor", **options})
    assert_close(outcome(model, lambda: loss_of(BATCH)(compiled)), expected, FLOAT64)
    assert stats_of(compiled)["ran"] == "packed"
    return compiled


def test_what_inductor_is_told(told: Told) -> None:
    """Which operators run between graphs, and which inputs are read where they lie."""
    model = Stateful()
    step(model, mode="max-autotune")
    forward, backward = told
    for item, name in ((forward, "tree_attention"), (backward, "tree_attention_backward")):
        first = get_first_incompatible_cudagraph_node(item["gm"])
        assert first is not None and first.target is getattr(torch.ops.treefx, name).default
        assert set(NOT_CAPTURED) <= set(first.target.tags) and item["recording"]
        assert "transformers::grouped_mm_fallback" in item["apart"]
    read = [forward["inputs"][i] for i in forward["static_input_idxs"]]
    held = sorted(tuple(x.shape) for x in (*model.parameters(), *model.buffers()))
    assert sorted(tuple(x.shape) for x in read) == held
    copied = [x for i, x in enumerate(forward["inputs"]) if i not in forward["static_input_idxs"]]
    assert {x.dtype for x in copied if isinstance(x, torch.Tensor)} == {torch.int64, torch.int32}
    assert len(backward["static_input_idxs"]) < len(backward["inputs"]), "gradients are copied"


def test_moved_inputs_are_not_taken_for_weights() -> None:
    """AOTAutograd takes out one of two equal inputs, which moves the weights behind it."""
    first, second = torch.empty(3, 4), torch.empty(5)
    inputs = [torch.empty(2), first, second, 7]
    assert compile_inner._are_in_order(inputs, inputs, [1, 2])
    assert not compile_inner._are_in_order(inputs[1:], inputs, [1, 2])
    assert not compile_inner._are_in_order([7, *inputs[:3]], inputs, [1, 2])
    assert not compile_inner._are_in_order([inputs[0], first.double(), second, 7], inputs, [1, 2])


def settings(inner: Inner) -> dict[str, Any]:
    return inner.settings(torch.fx.symbolic_trace(nn.Identity()))


def test_a_mode_without_graphs_says_nothing_of_them() -> None:
    assert settings(Inner("inductor", "reduce-overhead"))["custom_should_partition_ops"]
    for inner in (Inner("inductor", "max-autotune-no-cudagraphs"), Inner("inductor"), Inner("eager")):
        assert not inner.records_graphs and "custom_should_partition_ops" not in settings(inner)


def test_parts_of_a_plan_record_no_graphs(told: Told) -> None:
    """A part's backward runs after other parts' forwards, which would write into what it reads."""
    model, (forest, rows, weights) = TakesCacheFlag(tiny()), weighted_forest()
    compiled = compile_with(model, inner="inductor", mode="reduce-overhead")
    assert_close(run(compiled, model, every_node(forest)), separate_rows(model, rows, weights), FLOAT64)
    assert told and not any(item["recording"] for item in told)


def test_the_packed_row_of_a_forest_records_graphs(told: Told) -> None:
    model = TakesCacheFlag(tiny())
    forest = treefx.Forest.from_padded(BATCH.input_ids, torch.ones_like(BATCH.input_ids))
    with treefx.use(forest):
        compile_with(model, inner="inductor", mode="reduce-overhead")(**forest.model_inputs(), use_cache=False)
    assert told and all(item["recording"] for item in told)


def test_graphs_by_inductors_own_configuration() -> None:
    """It sets them for every backend, and counts like the mode."""
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert Inner("inductor").records_graphs and not Inner("aot_eager").records_graphs
        assert not calls_subgraphs(Inner("inductor")) and settings(Inner("inductor"))["custom_should_partition_ops"]
        assert settings(Inner("inductor", records=False))["triton.cudagraphs"] is False
    assert not Inner("inductor").records_graphs and calls_subgraphs(Inner("inductor"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"triton.cudagraphs": True}, ("'triton.cudagraphs'", "mode='reduce-overhead'", "config.triton.cudagraphs = ")),
        ({"max_autotune": True}, ("'max_autotune'", "mode='max-autotune'", "config.max_autotune = True")),
        ({"epilogue_fusion": False}, ("'epilogue_fusion'", "use torch._inductor.config.epilogue_fusion = False")),
    ],
)
def test_settings_of_inductor_are_refused_with_the_mode(option: dict[str, Any], words: tuple[str, ...]) -> None:
    model = tiny()
    with refused(*words, "setting of inductor"):
        loss_of(BATCH)(torch.compile(model, backend="treefx", options=option))


def test_other_unknown_options_name_no_mode() -> None:
    with pytest.raises(treefx.TreefxError, match="got 'min_shraing'$"):
        treefx.Config.from_options({"min_shraing": 1.0})
