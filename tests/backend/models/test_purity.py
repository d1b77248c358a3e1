"""Draws of the forward are drawn once: nothing outside of the graph draws again."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tests.backend.support import compile_with
from tests.batches import IGNORED, distinct_tokens, shared_batch
from tests.oracle import stats_of
from treefx.passes.labels.purity import changed_inputs, has_effects, impurity

VOCAB, WIDTH = 61, 16
BATCH = shared_batch(rows=4, length=12, shared=6, vocab=VOCAB)
assert BATCH.attention_mask is not None


class Drawing(nn.Module):
    """A causal LM of one head; each hook may draw for every row. Returns the loss and all that was drawn."""

    def __init__(self, draw: Callable[["Drawing", Tensor], Tensor], place: str) -> None:
        super().__init__()
        self.embed, self.place_of = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.draw, self.place = draw, place
        self.register_buffer("step", torch.ones((), dtype=torch.int64))

    def forward(self, ids: Tensor, mask: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        drawn = self.draw(self, ids) if given is None else given
        at = {name: drawn if name == self.place else None for name in ("ids", "labels", "window", "position", "hidden")}
        tokens = ids if at["ids"] is None else at["ids"]
        place = torch.arange(ids.shape[1]) if at["position"] is None else at["position"]
        x = self.embed(tokens) + self.place_of(place)
        x = x if at["hidden"] is None else x + at["hidden"]
        query, key, value = self.mix(x)[:, None].chunk(3, -1)
        column = torch.arange(ids.shape[1])
        behind = column[:, None] - column
        seen = (behind >= 0) & mask[:, None, None].bool()
        seen = seen if at["window"] is None else seen & (behind < at["window"])
        logits = self.head(x + F.scaled_dot_product_attention(query, key, value, attn_mask=seen)[:, 0])
        labels = torch.where(mask.bool(), ids, IGNORED) if at["labels"] is None else at["labels"]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), drawn


def drawn_labels(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.where(torch.rand(ids.shape) < 0.5, ids, IGNORED)


def labels_after_a_drawn_start(model: nn.Module, ids: Tensor) -> Tensor:
    start = torch.randint(1, ids.shape[1] - 1, (len(ids), 1))
    return ids.masked_fill(torch.arange(ids.shape[1]) < start, IGNORED)


def window_per_row(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.randint(1, 5, (len(ids),))[:, None, None, None]


def window_of_bernoulli(model: nn.Module, ids: Tensor) -> Tensor:
    return 2 + 3 * torch.bernoulli(torch.full((len(ids),), 0.5))[:, None, None, None].long()


def window_for_all(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.randint(1, 5, ())


def window_like_inputs(model: nn.Module, ids: Tensor) -> Tensor:
    return 1 + torch.randint_like(ids[:, 0], 4)[:, None, None, None]


def dropped_tokens(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.where(torch.rand(ids.shape) < 0.2, 3, ids)


def shifted_positions(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]) + torch.randint(0, 40, (len(ids), 1))


def sorted_positions(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.randperm(64)[: ids.shape[1]].sort()[0]


def conditioning(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.randn(len(ids), 1, WIDTH, dtype=torch.float64)


DRAWS = [
    (drawn_labels, "labels"), (labels_after_a_drawn_start, "labels"), (window_per_row, "window"),
    (window_of_bernoulli, "window"), (window_for_all, "window"), (window_like_inputs, "window"),
    (dropped_tokens, "ids"), (shifted_positions, "position"), (sorted_positions, "position"),
    (conditioning, "hidden"),
]  # fmt: skip


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(("draw", "place"), DRAWS, ids=lambda item: getattr(item, "__name__", None))
def test_results_are_those_of_exactly_what_the_call_drew(draw: Any, place: str) -> None:
    model = Drawing(draw, place).double()
    compiled, state = compile_with(model), None
    for seed in range(4):
        torch.manual_seed(seed)
        loss, drawn = compiled(BATCH.input_ids, BATCH.attention_mask)
        state = torch.get_rng_state()
        got = gradients(model, loss)
        expected, _ = model(BATCH.input_ids, BATCH.attention_mask, drawn.detach().clone())
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
        for left, right in zip(got, gradients(model, expected), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
        torch.manual_seed(seed)
        model(BATCH.input_ids, BATCH.attention_mask)
        assert torch.equal(torch.get_rng_state(), state), "the stream of random numbers moved on as in eager"


def test_drawn_labels_stay_packed_and_keep_all_positions() -> None:
    model = Drawing(drawn_labels, "labels").double()
    compiled = compile_with(model)
    compiled(BATCH.input_ids, BATCH.attention_mask)
    assert stats_of(compiled)["attention_rewritten"] == 1
    assert stats_of(compiled)["tokens"] >= distinct_tokens(BATCH)


def test_a_drawn_window_is_named() -> None:
    compiled = compile_with(Drawing(window_per_row, "window").double())
    compiled(BATCH.input_ids, BATCH.attention_mask)
    assert "the mask" in stats_of(compiled)["fallback"] and "draws random numbers" in stats_of(compiled)["fallback"]


def growing(model: Any, ids: Tensor) -> Tensor:
    model.step += 1
    return model.step + 0


def test_a_counter_of_steps_in_the_mask_is_read_as_it_is_in_each_call() -> None:
    model = Drawing(growing, "window").double()
    twin = copy.deepcopy(model)
    compiled = compile_with(model)
    for _ in range(4):
        got, expected = (run(BATCH.input_ids, BATCH.attention_mask)[0] for run in (compiled, twin))
        for left, right in zip(gradients(model, got), gradients(twin, expected), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
        assert stats_of(compiled)["fallback"] is None
    assert stats_of(compiled)["shapes"] == 1, "a proof that leans on the counter would be repeated in each call"


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return torch.fx.experimental.proxy_tensor.make_fx(torch.func.functionalize(function))(*inputs)


def result(gm: fx.GraphModule) -> fx.Node:
    (output,) = gm.graph.find_nodes(op="output")
    node = output.args[0]
    assert isinstance(node, fx.Node)
    return node


@pytest.mark.parametrize(
    "function",
    [
        torch.rand_like, torch.bernoulli, lambda x: F.dropout(x, 0.5), lambda x: torch.randperm(3) + x,
        lambda x: torch.multinomial(x, 2), lambda x: x + torch.randn(3), lambda x: torch.empty(3) + x,
        lambda x: torch.empty(3).uniform_(), lambda x: x.new_empty(4).exponential_(), torch.empty_like,
    ],
)  # fmt: skip
def test_values_that_are_no_functions_of_the_inputs(function: Callable[[Tensor], Tensor]) -> None:
    assert impurity(result(traced(function, torch.full((3,), 0.5)))) is not None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2, lambda x: torch.empty(3, 3).fill_(float("-inf")).triu_(1) + x, torch.zeros_like,
        lambda x: torch.zeros_like(torch.rand_like(x)) + x, lambda x: torch.empty(3).copy_(x),
        lambda x: F.dropout(x, 0.5, training=False), lambda x: torch.rand(3).zero_() + x,
    ],
)  # fmt: skip
def test_values_that_are_functions_of_the_inputs(function: Callable[[Tensor], Tensor]) -> None:
    assert impurity(result(traced(function, torch.full((3,), 0.5)))) is None


def test_an_operator_of_another_library_may_draw() -> None:
    library = torch.library.Library("treefx_noise", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x + torch.rand_like(x), "CompositeExplicitAutograd")
    gm = traced(torch.ops.treefx_noise.noise, torch.ones(3))
    assert "may draw random numbers" in str(impurity(result(gm)))
    assert has_effects(gm)


def test_a_graph_that_changes_an_input_differs_when_it_runs_again() -> None:
    gm = traced(lambda x: x.add_(1) * 2, torch.ones(3))
    assert list(changed_inputs(gm)) == gm.graph.find_nodes(op="placeholder")
    assert has_effects(gm)
    assert not has_effects(traced(lambda x: x * 2, torch.ones(3)))
