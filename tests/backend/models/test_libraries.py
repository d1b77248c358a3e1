"""Hybrid models with the GPU libraries installed that transformers binds to them: one graph, packed, exact.

The libraries are stand-ins (``tests.libraries``) with their names, signatures and decorators.
"""

import copy
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, DataCollatorWithFlattening

import treefx
from tests.backend.life.test_packed_lengths import drawn
from tests.backend.packed import AGENTS, Packed, loss_inside, pack, trie_size
from tests.backend.support import compile_with, in_case
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.libraries import CALLS, double_with_libraries
from tests.oracle import FLOAT64, assert_close, eager_step, loss_of, outcome, stats_of
from treefx.kernels.recurrence import tree_scan as kernel
from treefx.passes.causal import tree_mixers
from treefx.passes.labels import segments
from treefx.passes.packing import emit_scans

DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
KDA = {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention"], "mlp_only_layers": [0], **DELTA},
    "qwen3_5_text": {"layer_types": ["linear_attention"], **DELTA},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    "nemotron_h": {
        "layers_block_type": ["mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
        "chunk_size": 4, "expand": 1,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    "lfm2": {"layer_types": ["conv"]},
    "kimi_linear": KDA,
    "mamba": {"state_size": 8},
    "jamba": {"num_experts": 1, "attn_layer_period": 8, "attn_layer_offset": 4},
}  # fmt: skip
ON_ROWS = {"mamba": "mamba_inner_fn", "jamba": "selective_scan_fn"}
"""Functions without a form along a tree, which run on rows while everything around them runs once per token."""
ALWAYS_WHOLE = {"kimi_linear": "chunk_kda"}
"""Functions that run along a tree by themselves alone."""
BATCH = shared_batch(rows=3, length=10, shared=4, vocab=61)


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


@functools.cache
def model_of(name: str) -> nn.Module:
    return double_with_libraries(name, num_hidden_layers=1, **MODELS[name])


def check(model: nn.Module, compiled: Any, batch: Batch) -> dict[str, Any]:
    """Statistics of a call that is exact."""
    expected = eager_step(model, batch)
    CALLS.clear()
    assert_close(outcome(model, lambda: loss_of(batch)(compiled)), expected, FLOAT64)
    return stats_of(compiled)


THROUGH_ONE_COMPILATION = ("qwen3_next", "mamba2")


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in MODELS if name not in THROUGH_ONE_COMPILATION])
def test_one_graph_that_is_packed(name: str) -> None:
    """``test_lengths_and_paddings_through_one_compilation`` has the others."""
    try:
        AutoConfig.for_model(name)
    except ValueError:
        pytest.skip(f"this version of transformers has no {name}")
    model = model_of(name)
    stats = check(model, compile_with(model, inner="eager"), BATCH)
    assert stats["fallback"] is None and stats["ran"] == "packed" and stats["graphs"] == 1
    assert stats["tokens"] <= distinct_tokens(BATCH) < stats["raw_tokens"]
    expansions = [(item["op"], item["contracted"]) for item in stats["expansions"]]
    assert expansions == ([("treefx.library.default", True)] if name in ON_ROWS else [])
    called = {**ON_ROWS, **ALWAYS_WHOLE}.get(name)
    assert set(CALLS) == (set() if called is None else {called})
    if name in ON_ROWS:
        assert "modeling_" in stats["expansions"][0]["line"]


@pytest.mark.parametrize("name", THROUGH_ONE_COMPILATION)
def test_lengths_and_paddings_through_one_compilation(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    compiled = compile_with(model)
    batches = [BATCH, shared_batch(4, 13, 6, 61, seed=1), shared_batch(3, 11, 5, 61, seed=2, padding="left")]
    batches += [shared_batch(2, 70, 50, 61, seed=3, padding="right")]
    for batch in batches:
        stats = check(model, compiled, batch)
        assert stats["ran"] == "packed" and stats["expansions"] == [] and stats["fallback"] is None
        assert stats["graphs"] == 1 and CALLS == {}
        assert batch is not BATCH or stats["tokens"] <= distinct_tokens(batch) < stats["raw_tokens"]
    assert stats["compiles"] == 2


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_rows_of_one_token(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    compiled = compile_with(model, inner="eager", min_sharing=1.0)
    ids = torch.tensor([[5], [5], [6]])
    weights = torch.randn(3, 1, 1, dtype=torch.float64)
    expected = outcome(model, lambda: (model(input_ids=ids).logits.square() * weights).sum())
    assert_close(outcome(model, lambda: (compiled(input_ids=ids).logits.square() * weights).sum()), expected, FLOAT64)
    assert stats_of(compiled)["tokens"] == 2


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "kimi_linear"])
def test_calls_that_share_nothing_run_the_library(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    compiled = compile_with(model, min_sharing=100.0)
    eager_step(model, BATCH)
    library = set(CALLS)
    stats = check(model, compiled, BATCH)
    assert stats["ran"] == "ordinary" and stats["graphs"] == 1
    assert set(CALLS) == library


def test_recomputed_blocks() -> None:
    model = copy.deepcopy(model_of("mamba2"))
    model.gradient_checkpointing_enable()
    assert check(model, compile_with(model), BATCH)["ran"] == "packed"


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_forests(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    compiled = compile_with(model, inner="eager")
    for rows in ([[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12], [5, 6, 13]], [[3, 4, 5], [3, 4, 6, 7], [8, 9]]):
        forest = treefx.Forest.from_sequences(rows)

        def on_tree(forest: treefx.Forest = forest) -> Tensor:
            with treefx.use(forest):
                logits = compiled(**forest.model_inputs(), use_cache=False).logits
                return treefx.losses.sft(treefx.edge_logprobs(logits, forest), forest)

        def on_rows(rows: list[list[int]] = rows) -> Tensor:
            losses = []
            for row in rows:
                logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
                losses.append(F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
            return torch.stack(losses).sum()

        assert_close(outcome(model, on_tree), outcome(model, on_rows), FLOAT64)


def test_a_state_of_the_token_before_in_packed_order_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def along_one_chain(*args: Any, **kwargs: Any) -> Tensor:
        *values, ends = args
        return kernel.tree_scan(*values, torch.full_like(ends, ends.shape[0]), **kwargs)

    monkeypatch.setattr(tree_mixers, "tree_scan", along_one_chain)
    model = copy.deepcopy(model_of("qwen3_next"))
    with pytest.raises(AssertionError):
        check(model, compile_with(model, inner="eager"), BATCH)


def says_that_it_exports() -> bool:
    """PyTorch 2.11 answers so while it compiles; transformers then calls its own body, and no library."""
    found: Tensor = torch.compile(lambda x: x + torch.compiler.is_exporting(), backend="eager")(torch.zeros(1))
    return bool(found)


calls_libraries = pytest.mark.skipif(says_that_it_exports(), reason="transformers calls no library under this PyTorch")


# Sequences packed into one row ----------------------------------------------------------------------------------------

HYBRID = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1], **DELTA}
PACKED: dict[str, dict[str, Any]] = {
    "qwen3_next": HYBRID, **{name: MODELS[name] for name in ("lfm2", "nemotron_h", "falcon_h1")},
}  # fmt: skip


@functools.cache
def model_of_packed(name: str) -> nn.Module:
    return double_with_libraries(name, num_hidden_layers=len(PACKED[name].get("layer_types", [0])), **PACKED[name])


def flattened(rows: Sequence[Sequence[int]]) -> tuple[Packed, dict[str, Any]]:
    """A row of sequences as transformers' collator makes it, with ends and numbers of sequences."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = dict(collate([{"input_ids": list(row), "labels": list(row)} for row in rows]))
    given = [batch.pop(name) for name in ("input_ids", "position_ids", "labels")]
    return Packed(*given, tuple(map(tuple, rows))), batch


def packed_step(model: nn.Module, compiled: Any, packed: Packed, **more: Any) -> dict[str, Any]:
    """Statistics of an exact call with packed sequences."""
    step = loss_inside(packed, **more)
    expected = outcome(model, lambda: step(model))
    CALLS.clear()
    assert_close(outcome(model, lambda: step(compiled)), expected, FLOAT64)
    return stats_of(compiled)


@calls_libraries
@pytest.mark.zoo
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str) -> None:
    """Sizes are symbols from the start, or become symbols when they change."""
    model = copy.deepcopy(model_of_packed(name))
    options: Any = {"inner": "eager", "min_sharing": 1.0}
    compiled = torch.compile(model, backend="treefx", options=options, dynamic=None if name == "lfm2" else True)
    for rows in (AGENTS, drawn(1, 4), drawn(2, 7)):
        packed, more = flattened(rows)
        stats = packed_step(model, compiled, packed, **more)
        assert (stats["ran"], stats["fallback"], stats["expansions"]) == ("packed", None, [])
        assert stats["tokens"] <= trie_size(packed) < stats["raw_tokens"] and CALLS == {}
    assert stats["compiles"] <= (2 if name == "lfm2" else 1)


@calls_libraries
def test_packed_sequences_through_inductor() -> None:
    """Without norms and MLP, which are a kernel or more each."""
    model = copy.deepcopy(model_of_packed("lfm2"))
    model.model.embedding_norm = nn.Identity()
    for layer in model.model.layers:
        layer.operator_norm, layer.ffn_norm, layer.feed_forward = nn.Identity(), nn.Identity(), nn.Identity()
    packed, more = flattened(AGENTS)
    assert packed_step(model, compile_with(model, inner="inductor"), packed, **more)["ran"] == "packed"


@calls_libraries
def test_packed_sequences_in_several_rows() -> None:
    model = copy.deepcopy(model_of_packed("lfm2"))
    packed = pack(AGENTS[:4], AGENTS[1:])
    numbers = (packed.position_ids == 0).cumsum(1).int() - 1
    stats = packed_step(model, compile_with(model, inner="eager"), packed, seq_idx=numbers)
    assert stats["ran"] == "packed" and stats["tokens"] <= trie_size(packed)


@calls_libraries
def test_numbers_of_other_sequences_run_on_rows() -> None:
    """The library takes them; what it does then is on the row alone."""
    model = copy.deepcopy(model_of_packed("qwen3_next"))
    packed, more = flattened(AGENTS)
    index, compiled = more["seq_idx"], compile_with(model, inner="eager")
    numbers = {
        "comes again": index % 3,
        "padding": torch.where(index == 5, -1, index),
        "elsewhere": (torch.arange(index.shape[1])[None] // 4).to(index.dtype),
    }
    for name, other in numbers.items():
        with in_case(name):
            stats = packed_step(model, compiled, packed, **{**more, "seq_idx": other})
            assert stats["ran"] == "ordinary" and CALLS == {"causal_conv1d_fn": 2, "chunk_gated_delta_rule": 2}


class CountingFromOne(nn.Module):
    """Numbers sequences from 1 on for its caller; 0 is padding, as -1 is for the library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, numbers: Tensor, **inputs: Any) -> Any:
        return self.model(seq_idx=numbers.int() - 1, **inputs)


@calls_libraries
def test_numbers_that_a_model_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CountingFromOne(copy.deepcopy(model_of_packed("lfm2")))
    packed, more = flattened(AGENTS)
    numbers, compiled = more.pop("seq_idx") + 1, compile_with(model, inner="eager")
    padded = torch.where(numbers == 3, 0, numbers)
    assert packed_step(model, compiled, packed, numbers=numbers, **more)["ran"] == "packed"
    assert packed_step(model, compiled, packed, numbers=padded, **more)["ran"] == "ordinary"
    # The library's zeros at padding are no convolution.
    torch._dynamo.reset()
    monkeypatch.setattr(segments.Segments, "positive", property(lambda _: {}, lambda *_: None), raising=False)
    with pytest.raises(AssertionError, match="differ by more than"):
        packed_step(model, compile_with(model, inner="eager"), packed, numbers=padded, **more)


@calls_libraries
def test_a_mixer_that_runs_over_sequences_keeps_rows() -> None:
    """transformers gives KDA no ends; its convolution starts over at each sequence."""
    model = copy.deepcopy(model_of("kimi_linear"))
    packed, more = flattened(AGENTS)
    compiled = compile_with(model, inner="eager", on_unsupported="expand")
    with pytest.warns(treefx.SharingWarning, match="not all of the graph does at the same tokens"):
        stats = packed_step(model, compiled, packed, **more)
    assert stats["ran"] == "ordinary"


@calls_libraries
def test_parents_by_the_column_of_a_packed_row_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_scans, "depths", lambda packer: packer.metadata.column)
    model = copy.deepcopy(model_of_packed("lfm2"))
    packed, more = flattened(AGENTS)
    with pytest.raises(AssertionError, match="differ by more than"):
        packed_step(model, compile_with(model, inner="eager"), packed, **more)


@calls_libraries
@pytest.mark.parametrize("asked", [{"initial_state": torch.ones(2, 1, 2, 2)}, {"cu_seqlens": torch.tensor([0, 2, 5])}])
def test_calls_with_states_or_sequences_are_exact(asked: dict[str, Tensor]) -> None:
    function = vars(sys.modules[type(model_of("qwen3_next")).__module__])["torch_chunk_gated_delta_rule"]
    x = torch.rand(1 if "cu_seqlens" in asked else 2, 5, 1, 2)

    def call(x: Tensor) -> Any:
        return function(x, x, x, -x[..., 0], x[..., 0].sigmoid(), output_final_state=False, **asked)

    expected, _ = call(x)
    CALLS.clear()
    found, _ = torch.compile(call, backend="treefx")(x)
    torch.testing.assert_close(found, expected)
    assert CALLS == {"chunk_gated_delta_rule": 1}, "called as written"
    assert not torch.allclose(function(x, x, x, -x[..., 0], x[..., 0].sigmoid())[0], expected)


@calls_libraries
def test_an_activation_that_the_library_refuses_is_refused() -> None:
    function = vars(sys.modules[type(model_of("qwen3_next")).__module__])["causal_conv1d_fn"]
    called = torch.compile(lambda x, weight: function(x, weight, None, activation="relu"), backend="treefx")
    with pytest.raises(AssertionError):
        called(torch.randn(1, 4, 5), torch.randn(4, 3))
