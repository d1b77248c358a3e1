"""Observed models: nothing changes, figures are those of the forest of the rows, settings are named."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import treefx
from treefx.inspection.observation.observed import Observation
from treefx.inspection.observation.scatter import find_scatter
from treefx.runtime.observed.observer import Settings
from treefx.runtime.observed.tallies import Epoch, TallyOfCalls
from treefx.runtime.observed.tokens import ObservedCall, merge, read_call
from treefx.torch_patches import substitution

Rows = list[list[int]]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OPTIONS = {"observe": True}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES | changes))


def observed(model: Any) -> Observation:
    """Without the dry run, which takes seconds."""
    return treefx.observed(model, predict=False)


def padded(rows: Rows, *, left: bool = False) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(row, dtype=torch.int64), 1
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
STEP = [[*PROMPTS[i % 2], 13 + i, 21 + i] for i in range(4)]
"""Two prompts, which take turns."""


def train(model: Any, batches: list[Any], calls: int = 2) -> tuple[list[float], list[Tensor]]:
    """Losses and weights after a step per `calls` batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        if number % calls == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [x.detach() for x in model.parameters()]


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="treefx", options=OPTIONS)


def compiled_and_observed(model: nn.Module) -> nn.Module:
    return treefx.observe(torch.compile(model, backend="eager"))  # type: ignore[arg-type]


def in_place_and_observed(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return treefx.observe(model)


BATCHES = [padded(STEP[:2]), padded(STEP[2:]), padded([row[:5] for row in STEP]), padded(STEP, left=True)]


@pytest.mark.parametrize("make", [treefx.observe, compiled, compiled_and_observed, in_place_and_observed])
def test_losses_and_weights_are_those_of_the_model_alone(make: Callable[[Any], Any]) -> None:
    """With dropout, whose draws must stay what they are."""
    torch.compiler.reset()
    wanted = train(llama(attention_dropout=0.1), BATCHES)
    model = make(llama(attention_dropout=0.1))
    found = train(model, BATCHES)
    assert found[0] == wanted[0] and len(set(wanted[0])) == len(BATCHES)
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))
    figures = observed(model).figures
    assert (figures.steps, figures.calls) == (2, 4) and figures.raw_tokens == sum(map(len, STEP)) * 2 + 20
    assert observed(model).cost.seconds > 0


@pytest.mark.parametrize(("options", "asked"), [(OPTIONS, False), ({"inner": "eager"}, True)])
def test_an_observed_graph_is_traced_without_our_substitutions(options: dict[str, Any], asked: bool) -> None:
    """They compute the same numbers in other operators, or draw fewer random numbers."""
    seen: list[Any] = []
    torch.compiler.reset()
    substitution.substitute_called(lambda function, *given: seen.append(function))
    try:
        torch.compile(llama(), backend="treefx", options=options)(**padded(STEP))
    finally:
        substitution._called.pop()
    assert bool(seen) == asked


rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=6), min_size=1, max_size=6)


def call_of(named: dict[str, Any]) -> ObservedCall:
    found = read_call(named)
    assert found is not None
    return found[0]


def forms_of(rows: Rows) -> Iterator[dict[str, Tensor]]:
    """A batch padded on either side, and one packed row."""
    yield padded(rows)
    yield padded(rows, left=True)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    yield {"input_ids": torch.tensor(sum(rows, []))[None], "position_ids": positions[None]}


@settings(max_examples=80, deadline=None)
@given(calls=st.lists(rows_of_tokens, min_size=1, max_size=3))
def test_figures_are_those_of_the_forest(calls: list[Rows]) -> None:
    for form in zip(*(list(forms_of(rows)) for rows in calls), strict=True):
        tally = TallyOfCalls(0, 0.0)
        for named, rows in zip(form, calls, strict=True):
            call = call_of(named)
            tally.count(call)
            assert sorted(row.tolist() for row in call.rows()) == sorted(rows)
        step, _ = tally.close(None)
        forest = treefx.Forest.from_sequences(sum(calls, []))
        assert (step.raw_tokens, step.step_tokens) == (forest.raw_tokens, forest.num_tokens)
        assert step.call_tokens == sum(treefx.Forest.from_sequences(rows).num_tokens for rows in calls)
        tokens = merge(tally.tokens)
        through = torch.cat([torch.as_tensor(path) for path in forest.token_of]).bincount()
        assert sorted(tokens.rows.tolist()) == sorted(through.tolist())


def test_columns_in_place_of_positions_would_count_too_many() -> None:
    """Rows padded on the left begin in different columns; a count by columns shares none of them."""
    rows = [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    named = padded(rows, left=True)
    wrong = read_call(named | {"position_ids": torch.arange(6).expand(3, 6)})
    right = read_call(named)
    assert right is not None and wrong is not None
    (found, _) = right[0].count()
    assert len(found) == 6
    by_column = {(column, int(x)) for row in named["input_ids"] for column, x in enumerate(row)}
    assert len(by_column) > 6
    (scatter,) = find_scatter([right[0]], Epoch(), Settings())
    assert (scatter.where, scatter.tokens, scatter.of_tokens) == ("columns", 9, 6)
    assert find_scatter([wrong[0]], Epoch(), Settings()) == ()


def test_suffix_tokens_without_loss() -> None:
    """Of two rows with a prompt of two tokens, three tokens each follow; the first is a tool's, without loss."""
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]])
    labels = torch.tensor([[-100, -100, -100, 4, 5], [-100, -100, -100, 7, 8]])
    for named in (
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 3},
    ):
        tally = TallyOfCalls(0, 0.0)
        tally.count(call_of(named))
        step, _ = tally.close(None)
        assert (step.suffix_tokens, step.suffix_without_loss) == (6, 2)
    unknown = TallyOfCalls(0, 0.0)
    unknown.count(call_of({"input_ids": ids}))
    assert unknown.close(None)[0].suffix_without_loss is None


def scatter_of(calls: list[Rows], **given: Any) -> dict[str, int]:
    found = find_scatter([call_of(padded(rows)) for rows in calls], Epoch(), Settings(**given))
    return {f"{item.where}: {item.setting}": item.tokens for item in found}


def test_the_order_of_rows_is_told_from_their_number() -> None:
    scattered, in_order = [STEP[:2], STEP[2:]], [STEP[::2], STEP[1::2]]
    assert scatter_of(scattered, order="shuffle=True") == {"order: shuffle=True": 12}
    assert scatter_of(in_order) == {}
    alone = [[row] for row in STEP[::2]]
    assert scatter_of(alone, batch="per_device_train_batch_size=1") == {"batch: per_device_train_batch_size=1": 6}
    assert scatter_of(alone) == {"batch: 1 rows in a call": 6}


def test_rows_of_different_steps_are_told_once_an_epoch() -> None:
    epoch = Epoch()
    for number, rows in enumerate((STEP[:2], STEP[2:], STEP[:2])):
        tally = TallyOfCalls(number, 0.0)
        tally.count(call_of(padded(rows)))
        epoch.add(tally.close(None)[1], tally.ends)
    assert (epoch.steps, epoch.step_tokens, epoch.distinct_tokens()) == (2, 32, 20)
    (found,) = find_scatter([], epoch, Settings(order="shuffle=True"))
    assert (found.where, found.tokens) == ("steps", 12)
    assert find_scatter([], epoch, Settings(samples=True)) == ()


def test_predictions_are_those_of_explain() -> None:
    model = treefx.observe(llama())
    batch = padded([row for prompt in PROMPTS for row in ([*prompt, 20], [*prompt, 21])])
    train(model, [batch] * 3, calls=1)
    draws, found = torch.get_rng_state(), treefx.observed(model)
    assert torch.equal(torch.get_rng_state(), draws)
    assert found.prediction is not None and found.prediction.seconds is not None
    told = treefx.explain(llama(), batch | {"labels": batch["input_ids"]}).verdict
    assert (found.prediction.flops, found.prediction.flops_packed) == (told.flops_before, told.flops_after)
    assert found.prediction.seconds_packed == pytest.approx(
        found.prediction.seconds * told.flops_after / told.flops_before
    )
    assert found.figures.sharing == pytest.approx(28 / 16) and found.figures.steps == 3
    assert "16" in found.summary() and "predicted step" in found.summary()
    again = treefx.Observation.from_json(found.to_json())
    assert again == found and found.to_json().startswith('{"schema": "treefx.observation/1"')
    with pytest.raises(treefx.InputError, match="'treefx.observation/1', got 'treefx.observation/0'"):
        treefx.Observation.from_json(found.to_json().replace("observation/1", "observation/0"))


def test_repeats_and_calls_that_do_not_count() -> None:
    model, batch = treefx.observe(llama()), padded(STEP)
    model(**batch)
    model(**batch)
    with torch.no_grad():
        model(**batch)
    model(inputs_embeds=torch.zeros(1, 3, 16))
    figures = observed(model).figures
    assert (figures.calls, figures.repeats, figures.calls_without_gradients) == (1, 1, 1)
    with pytest.raises(treefx.InputError, match="treefx.observed expects"):
        observed(llama())
    with pytest.raises(treefx.ConfigError, match="treefx.observe expects a model"):
        treefx.observe(lambda x: x)  # type: ignore[arg-type]


def test_a_call_runs_whatever_becomes_of_its_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such row")

    model = treefx.observe(llama())
    wanted = model(**padded(STEP)).logits
    monkeypatch.setattr("treefx.runtime.observed.observer.read_call", fail)
    with caplog.at_level("WARNING", "treefx"):
        assert all(torch.equal(model(**padded(STEP)).logits, wanted) for _ in range(2))
    assert caplog.text.count("treefx stops observing LlamaForCausalLM: ValueError: no such row") == 1
    assert observed(model).figures.calls == 1 and "no such row" in observed(model).summary()
    with pytest.raises(treefx.InputError, match="only observed; use treefx.observed"):
        treefx.inspect(compiled(model))


def test_copies_are_not_observed_and_observing_can_be_undone() -> None:
    model = treefx.observe(llama())
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, loaded):
        other(**padded(STEP))
        with pytest.raises(treefx.InputError):
            observed(other)
    treefx.observe(treefx.observe(model))(**padded(STEP))
    treefx.unobserve(model)(**padded(STEP[:2]))
    assert observed(model).figures.raw_tokens == sum(map(len, STEP))
    assert not model._forward_pre_hooks


def test_a_wrapper_that_is_called_without_ids_is_seen_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            found: Tensor = self.model(**batch).logits
            return found

    wrapper = Wrapper()
    treefx.observe(wrapper)(padded(STEP)).sum().backward()
    found = observed(wrapper)
    assert (found.origin.model, found.figures.calls) == ("LlamaForCausalLM", 1)


def test_observing_costs_less_than_a_hundredth_of_a_step() -> None:
    model = treefx.observe(llama(hidden_size=256, intermediate_size=512, num_hidden_layers=2))
    batch = padded([[1, 2, 3, *torch.randint(0, 32, (253,)).tolist()] for _ in range(8)])
    train(model, [batch] * 5, calls=1)
    cost = observed(model).cost
    print(f"{1000 * cost.seconds / 5:.3f} ms a call, {100 * cost.share:.2f} % of the run")
    assert cost.share < 0.01


@pytest.mark.parametrize("other", [{"min_sharing": 2.0}, {"inner": "eager"}, {"mode": "max-autotune"}])
def test_no_other_option_is_taken_and_left_out(other: dict[str, Any]) -> None:
    with pytest.raises(treefx.ConfigError, match=f"must be the only one, got {next(iter(other))} too"):
        treefx.Config(observe=True, **other)
