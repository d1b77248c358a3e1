"""Native level: a forest's packed row through the compiled model, equal to every row on its own."""

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import treefx
from tests.backend.native import Rows, TakesCacheFlag, branches, native_loss, random_weights, rollouts
from tests.backend.small import Small
from tests.backend.support import in_case
from tests.models import Output, TinyLM, double, zoo
from tests.oracle import (
    FLOAT32,
    FLOAT64,
    Outcome,
    assert_close,
    compile_with,
    outcome,
    refused,
    separate_rows,
    stats_of,
)
from tests.spellings import GROUPED, SPELLINGS

NATIVE: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1}, "qwen3": {"num_hidden_layers": 1}, "gpt2": {"num_hidden_layers": 1},
    "mistral": {"num_hidden_layers": 1}, "gemma2": {},
}  # fmt: skip
"""Plain, normalised heads, learned positions, sliding window, softcap with alternating windows in two layers."""


def run_native(compiled: Any, model: nn.Module, forest: treefx.Forest, reduction: Any = "sum") -> Outcome:
    return outcome(model, lambda: native_loss(forest, reduction)(compiled))


@pytest.mark.parametrize("name", NATIVE)
def test_weighted_rows_in_float64(name: str) -> None:
    model, rows = double(name, **NATIVE[name]), rollouts()
    weights = random_weights(rows)
    forest = treefx.Forest.from_sequences(rows, weights=weights)
    compiled = compile_with(model, inner="aot_eager" if name == "mistral" else "eager")
    assert_close(run_native(compiled, model, forest), separate_rows(model, rows, weights), FLOAT64)
    stats = stats_of(compiled)
    assert stats["fallback"] is None
    assert stats["attention_rewritten"] == model.config.num_hidden_layers
    assert stats["tokens"] == forest.num_tokens
    assert stats["raw_tokens"] == sum(map(len, rows))
    assert stats["expansions"] == []


def test_weighted_rows_in_float32() -> None:
    model, truth = (make("gemma2", num_hidden_layers=1) for make in (zoo, double))
    rows = rollouts()
    truth.load_state_dict(model.state_dict())
    weights = random_weights(rows)
    forest = treefx.Forest.from_sequences(rows, weights=weights)
    got = run_native(compile_with(model, inner="eager"), model, forest)
    assert_close(got, separate_rows(truth, rows, weights), FLOAT32)


def test_inductor() -> None:
    model, rows = tiny_causal(), rollouts()
    forest = treefx.Forest.from_sequences(rows)
    got = run_native(compile_with(model, inner="inductor"), model, forest)
    assert_close(got, separate_rows(model, rows, [[1.0] * len(row) for row in rows]), FLOAT32)


def test_spellings_of_attention() -> None:
    """In three blocks of one model; and grouped heads."""
    left = iter(["chunked", "sliding_softcap", "alibi"])
    check_tiny(TinyLM(lambda: SPELLINGS[next(left)](), layers=3), 3)
    check_tiny(TinyLM(GROUPED["sdpa_enable_gqa"], kv_heads=2, layers=1), 1)


def check_tiny(tiny: nn.Module, layers: int) -> None:
    model, rows = TakesCacheFlag(tiny).double(), rollouts()
    compiled = compile_with(model, inner="eager")
    got = run_native(compiled, model, treefx.Forest.from_sequences(rows))
    assert_close(got, separate_rows(model, rows, [[1.0] * len(row) for row in rows]), FLOAT64)
    assert stats_of(compiled)["attention_rewritten"] == layers


class Layouts(nn.Module):
    """Returns hidden states in several orders of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM(GROUPED["sdpa_enable_gqa"], kv_heads=2, layers=1)
        self.model.head = nn.Linear(32, 32, bias=False)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool = False
    ) -> tuple[torch.Tensor, ...]:
        x = self.model(input_ids, position_ids=position_ids).logits
        rows, columns = input_ids.shape
        heads = x.view(rows, columns, 4, 8)
        return x, x.transpose(1, 2), heads, heads.transpose(1, 2), x.permute(2, 0, 1), x.reshape(rows * columns, 32)


def layouts(compiled: Any, forest: treefx.Forest) -> list[torch.Tensor]:
    """The outputs on a forest, each brought to [N, 32]."""
    with treefx.use(forest):
        x, turned, heads, in_front, first, flat = compiled(**forest.model_inputs())
    count = forest.num_tokens
    merged = in_front.transpose(1, 2).reshape(count, 32)
    return [x[0], turned[0].T, heads.reshape(count, 32), merged, first[:, 0].T, flat]


def test_outputs_in_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forest, of one row and of rows that share all; outputs that are not [1, N, ...] are put in order."""
    model = Layouts().double()
    compiled = compile_with(model, inner="eager")
    for rows in (rollouts(), [[5, 6, 7]], [[5, 6], [5, 6]]):
        forest = treefx.Forest.from_sequences(rows)
        alone = [model(torch.tensor([row]), torch.arange(len(row))[None])[0][0] for row in rows]
        for found in layouts(compiled, forest):
            for row, expected in enumerate(alone):
                assert torch.allclose(found[forest.token_of[row]], expected, rtol=0, atol=1e-12)
    taken_for_plain = property(lambda self: frozenset(self.packed_outputs))
    monkeypatch.setattr("treefx.passes.analysis.Analysis.plain_outputs", taken_for_plain)
    with pytest.raises((RuntimeError, AssertionError)):
        x, *others = layouts(compiled, forest)
        assert all(torch.equal(x, other) for other in others)


def test_gradient_checkpointing() -> None:
    model, rows = double("llama", num_hidden_layers=1), rollouts()
    expected = separate_rows(model, rows, [[1.0] * len(row) for row in rows])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = run_native(compile_with(model, inner="eager"), model, treefx.Forest.from_sequences(rows))
    assert_close(got, expected, FLOAT64)


def test_other_forests_compile_nothing() -> None:
    """Also several in one step: the forest of a forward is its backward's, whichever forest came in between.

    Nor do means over tokens and over rows.
    """
    model = double("llama", num_hidden_layers=1)
    compiled = compile_with(model, inner="eager")
    compiles, samples = [], [rollouts(seed)[: 8 - seed] for seed in range(4)]
    forests = [treefx.Forest.from_sequences(rows) for rows in samples]
    for rows, forest in zip(samples, forests, strict=True):
        got = run_native(compiled, model, forest)
        assert_close(got, separate_rows(model, rows, [[1.0] * len(row) for row in rows]), FLOAT64)
        compiles.append(stats_of(compiled)["compiles"])
    # Dynamo itself makes the length symbolic when it changes for the first time.
    assert compiles[1:] == compiles[1:2] * 3
    got = outcome(model, lambda: sum(native_loss(forest)(compiled) for forest in forests))
    rows = sum(samples, [])
    assert_close(got, separate_rows(model, rows, [[1.0] * len(row) for row in rows]), FLOAT64)
    check_means(compiled, model)
    assert stats_of(compiled)["compiles"] == compiles[-1]


def check_means(compiled: Any, model: nn.Module) -> None:
    rows = [row for row in rollouts() if len(row) > 1]
    forest, predicted = treefx.Forest.from_sequences(rows), [len(row) - 1 for row in rows]
    shares = {
        "token_mean": [1.0 / sum(predicted)] * len(rows),
        "row_mean": [1.0 / (count * len(rows)) for count in predicted],
    }
    for reduction, share in shares.items():
        weights = [[each] * len(row) for each, row in zip(share, rows, strict=True)]
        with in_case(reduction):
            got = run_native(compiled, model, forest, reduction)
            assert_close(got, separate_rows(model, rows, weights), FLOAT64)


class Scaled(nn.Module):
    """Has a float, which is an input of the graph with ``dynamic=True``, as that of embeddings is."""

    def __init__(self) -> None:
        super().__init__()
        self.lm, self.scale = double("llama", num_hidden_layers=1), 0.7

    def forward(self, **given: Any) -> Output:
        logits = self.scale * self.lm(**given).logits
        return Output(None, logits, logits)


def test_symbolic_sizes_from_the_start() -> None:
    """Forests through one graph, which is compiled once."""
    model = Scaled()
    compiled = torch.compile(model, backend="treefx", dynamic=True, options={"inner": "eager"})
    for seed in range(3):
        rows = rollouts(seed)[: 8 - seed]
        got = run_native(compiled, model, treefx.Forest.from_sequences(rows))
        assert_close(got, separate_rows(model, rows, [[1.0] * len(row) for row in rows]), FLOAT64)
        assert stats_of(compiled)["compiles"] == 1 and stats_of(compiled)["ran"] == "packed"


def test_forest_and_padded_batch_in_one_model() -> None:
    """Inside of `use` the row is a tree, outside it is a row."""
    model, rows = tiny_causal().double(), rollouts()
    compiled = compile_with(model, inner="eager")
    forest = treefx.Forest.from_sequences(rows)
    ids = forest.model_inputs()["input_ids"]
    for _ in range(2):
        expected = separate_rows(model, rows, [[1.0] * len(row) for row in rows])
        assert_close(run_native(compiled, model, forest), expected, FLOAT64)
        plain = outcome(model, lambda: compiled(input_ids=ids, labels=ids).loss)
        twin = copy.deepcopy(model)
        assert_close(plain, outcome(twin, lambda twin=twin: twin(input_ids=ids, labels=ids).loss), FLOAT64)


def test_random_forests() -> None:
    model = tiny_causal().double()
    compiled = compile_with(model, inner="eager")

    @settings(max_examples=12)
    @given(trees=st.lists(branches, min_size=1, max_size=3), seed=st.integers(0, 99))
    def check(trees: list[Rows], seed: int) -> None:
        rows = [row for tree in trees for row in tree]
        random.Random(seed).shuffle(rows)
        if max(map(len, rows)) == 1:
            rows.append(rows[0] * 2)
        weights = random_weights(rows, seed)
        forest = treefx.Forest.from_sequences(rows, weights=weights)
        expected = separate_rows(model, rows, weights)
        if all(g is None or not g.any() for g in expected.gradients.values()):
            return
        assert_close(run_native(compiled, model, forest), expected, FLOAT64)

    check()


def tiny_causal() -> nn.Module:
    return TakesCacheFlag(Small(SPELLINGS["sdpa_is_causal"]))


def test_forest_with_other_input() -> None:
    """A shorter row, rows, and the tokens of another forest."""
    forest = treefx.Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
    other = treefx.Forest.from_sequences([[15, 16, 17], [15, 16, 18]])
    shorter = {name: value[:, :-1] for name, value in forest.model_inputs().items()}
    for wrong in (shorter, {"input_ids": torch.tensor([[5, 6, 7], [5, 6, 8]])}, other.model_inputs()):
        compiled = compile_with(tiny_causal(), inner="eager")
        with refused("forest"), treefx.use(forest):
            compiled(**wrong, use_cache=False)


def test_second_forest_with_the_input_of_the_first() -> None:
    """Checked at every call, not only when compiling."""
    model = tiny_causal()
    compiled = compile_with(model, inner="eager")
    forest, other = (treefx.Forest.from_sequences(rows) for rows in ([[5, 6, 7, 9]], [[5, 6, 7], [5, 6, 8]]))
    run_native(compiled, model, forest)
    with refused("forest"), treefx.use(other):
        compiled(**forest.model_inputs(), use_cache=False)


class Recurrent(nn.Module):
    """Dynamo leaves it to eager execution, which runs it along the packed row."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gru(x)[0]  # type: ignore[no-any-return]


class Mean(nn.Module):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)


FOREST = treefx.Forest.from_sequences([[5, 6, 7, 9], [5, 6, 8, 9]])


@pytest.mark.parametrize(("module", "place"), [(Recurrent, "before"), (Mean, "after")])
def test_a_model_that_dynamo_cuts_is_refused(module: type[nn.Module], place: str) -> None:
    """What runs between two graphs runs along the packed row, through all branches."""
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16, **{place: module()})
    with refused("one whole graph", "Dynamo cut it"), treefx.use(FOREST):
        compile_with(TakesCacheFlag(model))(**FOREST.model_inputs())


class Embedded(nn.Module):
    """Takes hidden states, as a model does whose embedding runs elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(x)[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]


def test_a_graph_without_token_ids_is_refused() -> None:
    with refused("no token ids"), treefx.use(FOREST):
        compile_with(Embedded())(torch.randn(1, FOREST.num_tokens, 16))


def test_a_model_that_runs_uncompiled_is_an_error() -> None:
    forest = treefx.Forest.from_sequences(rollouts())
    with refused("compiled", "none did"), treefx.use(forest):
        logits = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1)(forest.model_inputs()["input_ids"]).logits
    with refused("no compiled model has run"):
        treefx.edge_logprobs(logits, forest)


def test_shallower_forests_run_on_what_a_deeper_one_compiled() -> None:
    model = tiny_causal().double()
    compiled = compile_with(model, inner="eager")
    for length in (40, 12, 25):
        rows = [[3 + (7 * i) % 50 for i in range(length)], [3 + (5 * i) % 50 for i in range(length - 3)]]
        forest = treefx.Forest.from_sequences(rows)
        expected = separate_rows(model, rows, [[1.0] * len(row) for row in rows])
        assert_close(outcome(model, lambda forest=forest: native_loss(forest)(compiled)), expected, FLOAT64)
    assert stats_of(compiled)["compiles"] == 1
