"""Models that call flash attention: one graph, shared like any other; the kernels are stubs (``tests.backend.flash``).

The truth is the caller's own call in eager mode, with the same stubs.
"""

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations import flash_attention

import treefx
from tests.backend.flash import flash_attn_varlen_func, flash_stubs, with_flash
from tests.backend.life.test_packed_lengths import PACKINGS, drawn, exact_step
from tests.backend.native import native_loss, rollouts
from tests.backend.packed import AGENTS, Packed, loss_inside, loss_outside, pack, trie_size
from tests.backend.support import Pair, assert_packed, compare, in_case, logits_at_real_tokens
from tests.batches import Batch, Side, distinct_tokens, padded
from tests.models import Output, double, zoo
from tests.oracle import (
    FLOAT64,
    Checked,
    Step,
    assert_close,
    compile_with,
    loss_of,
    outcome,
    relative_errors,
    separate_rows,
    stats_of,
)
from treefx.passes.scores import flash_facts
from treefx.passes.trace import trace
from treefx.passes.trace.flash import FlashCall
from treefx.passes.trace.flash import flash as flash_operator

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1}, "mistral": {"num_hidden_layers": 1, "sliding_window": 4},
    "gemma2": {"num_hidden_layers": 1, "sliding_window": 4, "attn_logit_softcapping": 0.5},
    "gpt_oss": {"num_hidden_layers": 1, "sliding_window": 4},
}  # fmt: skip
"""Of one layer, which has a window where layers take turns: ``test_padded_rows`` has two."""
SIDES: tuple[Side, ...] = ("right", "left")
SINGLE = {"gpt_oss"}
"""Compared in float32: its file casts to it in places that ``double`` does not reach."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with flash_stubs():
        yield


def flash_model(name: str, **changes: Any) -> nn.Module:
    make = zoo if name in SINGLE else double
    return with_flash(make(name, **{**MODELS[name], **changes}))


class Bare(nn.Module):
    """One call of transformers' function for flash attention, between an embedding and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.is_causal, self.dropout = (
            SimpleNamespace(_attn_implementation="flash_attention_2"),
            True,
            dropout,
        )
        self.embed, self.head = nn.Embedding(61, 32).double(), nn.Linear(32, 61).double()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False, **given: Any
    ) -> Output:
        heads = self.embed(input_ids).unflatten(-1, (2, 16)).transpose(1, 2)
        out, _ = flash_attention.flash_attention_forward(
            self, 3.0 * heads, heads, heads, attention_mask, self.dropout, **given
        )
        logits = self.head(out.flatten(2))
        return Output(None, logits, logits)


@contextmanager
def one_graph() -> Iterator[None]:
    """Assert that Dynamo made one graph."""
    counters.clear()
    torch._dynamo.reset()
    yield
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


def compare_whole(model: nn.Module, step: Step | Batch, **options: Any) -> Checked:
    with one_graph():
        return compare(model, step, **options)


def ends_of(packed: Packed) -> dict[str, Any]:
    """``cu_seq_lens`` and what goes with them."""
    lengths = torch.tensor([len(item) for item in packed.segments])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def assert_shared(checked: Checked, tokens: int) -> None:
    assert_packed(checked, tokens)
    assert checked.stats["ran"] == "packed" and not checked.stats["expansions"]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_padded_rows(name: str) -> None:
    """Windows in every second layer, soft caps and sinks, with padding on either side."""
    with one_graph():
        pair = Pair(flash_model(name, num_hidden_layers=2))
        for side in SIDES:
            batch = padded(AGENTS, side)
            with in_case(side):
                assert_shared(pair.check(batch), distinct_tokens(batch))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_packed_rows_by_positions(name: str) -> None:
    """``test_checkpoints`` has Llama."""
    packed = pack(AGENTS)
    step = loss_inside if name == "gpt_oss" else loss_outside
    assert_shared(compare_whole(flash_model(name), step(packed)), trie_size(packed))


def test_packed_rows_by_their_ends() -> None:
    packed = pack(AGENTS)
    assert_shared(compare_whole(flash_model("gpt_oss"), loss_inside(packed, **ends_of(packed))), trie_size(packed))


def test_several_packed_rows_see_across_segments() -> None:
    """As transformers computes them: without a mask, rows of a batch are whole."""
    packed = pack(AGENTS, AGENTS)
    assert_shared(compare_whole(flash_model("mistral"), loss_inside(packed)), packed.input_ids.numel() // 2)


# Forms of a call ------------------------------------------------------------------------------------------------------


def test_pads_that_the_caller_reads_are_zero() -> None:
    """Not what a query at a padded place would see."""
    batch = padded(AGENTS)
    checked = compare_whole(flash_model("llama"), everywhere(batch))
    assert checked.stats["ran"] == "packed" and checked.stats["fallback"] is None


def everywhere(batch: Batch) -> Step:
    """A loss that reads all places, those of padding included."""

    def step(model: nn.Module) -> Tensor:
        logits: Tensor = model(**batch.without("labels").inputs()).logits
        return (
            logits.square().mean(-1) * torch.linspace(0.5, 2.0, logits[..., 0].numel()).view(logits.shape[:2])
        ).sum()

    return step


def test_ends_in_tensors_of_their_own() -> None:
    """Tensors moved to a device one by one hold the same numbers, in two places."""
    packed = pack(AGENTS)
    ends = ends_of(packed)
    ends["cu_seq_lens_k"] = ends["cu_seq_lens_q"].clone()
    assert_shared(compare_whole(Bare(), loss_outside(packed, **ends)), trie_size(packed))


def test_ends_go_before_positions() -> None:
    """Two sequences that are one to the kernel see each other, though positions restart between them."""
    packed = pack(AGENTS)
    ends = ends_of(packed)
    joined = {**ends, "max_length_q": 40, "max_length_k": 40}
    joined["cu_seq_lens_q"] = joined["cu_seq_lens_k"] = torch.cat(
        [ends["cu_seq_lens_q"][:1], ends["cu_seq_lens_q"][2:]]
    )
    checked = compare_whole(Bare(), loss_outside(packed, **joined))
    assert checked.stats["fallback"] is None and checked.stats["tokens"] > trie_size(packed)


def test_ends_of_several_rows_are_refused_by_name() -> None:
    """A sequence may run on from one row into the next."""
    rows = pack(AGENTS[:2], AGENTS[:2])
    whole = torch.tensor([0, 4, 9, 13, 18], dtype=torch.int32)
    ends = {"cu_seq_lens_q": whole, "cu_seq_lens_k": whole, "max_length_q": 5, "max_length_k": 5}
    stats = compare_whole(Bare(), loss_outside(rows, **ends)).stats
    assert "cu_seq_lens of several rows" in stats["fallback"]


def test_a_mask_over_one_packed_row() -> None:
    """Positions cut the row where the mask hides nothing; where it hides something, transformers does not look."""
    packed, mask = pack(AGENTS), torch.ones_like(pack(AGENTS).input_ids)
    with one_graph():
        pair = Pair(flash_model("llama"))
        assert_shared(pair.check(loss_inside(packed, attention_mask=mask)), trie_size(packed))
        mask[:, -1] = 0
        checked = pair.check(loss_inside(packed, attention_mask=mask))
    assert checked.stats["fallback"] is None and checked.stats["tokens"] == mask.sum()


def with_holes() -> Step:
    """Rows with padding inside; the kernel counts its window over the tokens that are kept."""
    batch = padded([[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 9, 3, 4, 12], [5, 6, 7, 8, 9, 10, 11, 12]])
    assert batch.attention_mask is not None
    batch.attention_mask[:, [4, 6]] = 0
    return everywhere(batch)


def test_a_window_over_holes_is_refused_by_name() -> None:
    stats = compare_whole(flash_model("mistral"), with_holes()).stats
    assert "more than one run" in stats["fallback"]


def test_holes_without_a_window() -> None:
    checked = compare_whole(flash_model("llama"), with_holes())
    assert checked.stats["ran"] == "packed" and checked.stats["fallback"] is None


def test_calls_that_do_not_share_call_the_kernel() -> None:
    """The ordinary graph, forward and backward, with sinks and with soft caps; `test_inductor` has padded rows."""
    packed = pack(AGENTS)
    by_ends = loss_inside(packed, **ends_of(packed))
    for name, step in (("gpt_oss", loss_inside(packed)), ("gemma2", by_ends)):
        assert compare_whole(flash_model(name), step, min_sharing=99.0).stats["ran"] == "ordinary"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    model, packed = flash_model("llama", num_hidden_layers=2), pack(AGENTS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    step = loss_inside(packed) if reentrant else loss_inside(packed, **ends_of(packed))
    assert_shared(compare_whole(model, step), trie_size(packed))


def test_inductor() -> None:
    """The ordinary graph calls the kernel; `test_direct_flash` compiles packed rows."""
    step = logits_at_real_tokens(padded(AGENTS))
    assert compare_whole(Bare(), step, inner="inductor", min_sharing=99.0).stats["ran"] == "ordinary"


def test_lengths_compile_twice_at_most() -> None:
    """By their ends; `test_random_rows` has positions."""
    model = flash_model("llama")
    compiled = compile_with(model, inner="eager")
    for seed in range(4):
        packed = pack(drawn(seed, 3 + seed), pads=seed % 3, counted=seed % 2 == 0)
        step = functools.partial(loss_inside, **ends_of(packed))
        stats = exact_step(compiled, model, packed, step)
        assert stats["tokens"] == trie_size(packed) and stats["fallback"] is None and stats["compiles"] <= 2


@functools.cache
def compiled_for_all() -> tuple[Any, nn.Module]:
    """One model for all packings."""
    model = flash_model("mistral")
    return torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0}, dynamic=True), model


@settings(max_examples=12)
@given(PACKINGS, st.integers(0, 3), st.booleans(), st.booleans())
def test_random_rows(rows: list[list[int]], pads: int, counted: bool, by_ends: bool) -> None:
    packed = pack(rows, pads=pads, counted=counted)
    if packed.input_ids.numel() > 1 and bool((packed.labels >= 0).any()):
        more = ends_of(packed) if by_ends else {}
        stats = exact_step(*compiled_for_all(), packed, lambda packed: loss_inside(packed, **more))
        assert stats["fallback"] is None and stats["tokens"] == trie_size(packed)


# Kernels, and what stands in their place ------------------------------------------------------------------------------


def test_a_kernel_without_sinks_does_without_them() -> None:
    """FlashAttention 2: transformers leaves them out without a word."""
    lengths = functools.partial(flash_attn_varlen_func)
    parameters = dict(inspect.signature(lengths).parameters)
    del parameters["s_aux"]
    lengths.__signature__ = inspect.Signature([*parameters.values()])
    with flash_stubs(lengths=lengths):
        checked = compare_whole(flash_model("gpt_oss"), loss_inside(pack(AGENTS)))
    assert_shared(checked, trie_size(pack(AGENTS)))
    assert checked.model.model.layers[0].self_attn.sinks.grad is None


def test_dropout_is_left_to_the_kernel() -> None:
    """Dynamo cuts the graph there as without treefx."""
    model, step = Bare(dropout=0.5), loss_outside(pack(AGENTS))
    counters.clear()
    with torch.no_grad():
        torch.testing.assert_close(step(compile_with(model, inner="eager")), step(model), rtol=FLOAT64, atol=0)
    assert counters["graph_break"]


@pytest.mark.parametrize(("wraps", "everywhere"), [(False, True), (True, False)])
def test_a_function_in_their_place_that_calls_them(
    monkeypatch: pytest.MonkeyPatch, wraps: bool, everywhere: bool
) -> None:
    """What a trainer puts there is traced, and called once."""
    original = utils._flash_attention_forward

    def doubled(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * original(0.5 * query, *args, **kwargs)

    function = functools.wraps(original)(doubled) if wraps else doubled
    for module in [flash_attention, *([utils] if everywhere else [])]:
        monkeypatch.setattr(module, "_flash_attention_forward", function)
    packed = pack(AGENTS)
    assert_shared(compare_whole(Bare(), loss_outside(packed)), trie_size(packed))
    if wraps:
        assert compare_whole(Bare(), loss_outside(packed), min_sharing=99.0).stats["ran"] == "ordinary"


def test_other_backends_see_the_original() -> None:
    """Also where treefx has been at work in the process."""
    model, packed, graphs = Bare(), pack(AGENTS), []

    def backend(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        graphs.append(gm)
        return gm

    loss_outside(packed)(compile_with(model, inner="eager"))
    torch._dynamo.reset()
    loss_outside(packed)(torch.compile(model, backend=backend))
    targets = [str(node.target) for gm in graphs for node in gm.graph.nodes]
    assert len(graphs) > 1 and not any("treefx" in target for target in targets)


def test_forests() -> None:
    """The native level: positions count up along each path, and cut nothing."""
    model, rows = flash_model("gemma2"), rollouts()
    forest = treefx.Forest.from_sequences(rows, weights=[[1.0] * len(row) for row in rows])
    compiled = compile_with(model, inner="eager")
    wanted = separate_rows(model, rows, [[1.0] * len(row) for row in rows])
    assert_close(outcome(model, lambda: native_loss(forest)(compiled)), wanted, FLOAT64)


# Mistakes on purpose --------------------------------------------------------------------------------------------------


def assert_wrong(model: nn.Module, step: Step | Batch) -> None:
    run = loss_of(step) if isinstance(step, Batch) else step
    twin = copy.deepcopy(model)
    compiled = compile_with(twin, inner="eager")
    got, expected = outcome(twin, lambda: run(compiled)), outcome(model, lambda: run(model))
    assert stats_of(compiled)["ran"] == "packed" and max(relative_errors(got, expected).values()) > 1e-3


@pytest.mark.parametrize("by_ends", [False, True])
def test_without_segments_packed_rows_would_be_wrong(monkeypatch: pytest.MonkeyPatch, by_ends: bool) -> None:
    monkeypatch.setattr(flash_facts, "_tells_segments", lambda call, constants: False)
    packed = pack(AGENTS)
    assert_wrong(Bare(), loss_outside(packed, **(ends_of(packed) if by_ends else {})))


def test_segments_in_several_rows_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that positions alone would tell."""
    packed = pack(AGENTS, AGENTS)
    model = flash_model("llama")
    model.set_attn_implementation("sdpa")
    alone = outcome(model, lambda: loss_inside(packed)(model))
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_close(alone, outcome(with_flash(model), lambda: loss_inside(packed)(model)), FLOAT64)


@pytest.mark.parametrize(
    ("name", "ignored", "step"),
    [
        ("mistral", "window", loss_inside(pack(AGENTS))), ("gemma2", "softcap", padded(AGENTS)),
        ("gpt_oss", "sinks", loss_inside(pack(AGENTS))),
    ],
    ids=["window", "softcap", "sinks"],
)  # fmt: skip
def test_what_a_kernel_is_asked_for_may_not_be_ignored(
    monkeypatch: pytest.MonkeyPatch, name: str, ignored: str, step: Step | Batch
) -> None:
    monkeypatch.setattr(flash_facts, "FlashCall", lambda *args: FlashCall(*args)._replace(**{ignored: None}))
    assert_wrong(flash_model(name), step)


def test_garbage_at_pads_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "call_flash", lambda call, known: flash_operator(*call))
    assert_wrong(flash_model("llama"), everywhere(padded(AGENTS)))


def test_a_window_over_holes_by_columns_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_facts, "_is_among", lambda inputs, mask: True)
    assert_wrong(flash_model("mistral"), with_holes())
