"""Scores that a converted model may have: biases and masks by position, document and layer, exact against rows."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import treefx
from tests.batches import Batch, shared_batch
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome, relative_errors
from tests.trainers.converted.test_convert import check, converted, total
from treefx.runtime.converted import planner, seam, variants
from treefx.runtime.converted.skeleton import refresh, skeleton

Rule = Callable[[Tensor, Tensor], Tensor]
"""Of numbers of queries [B, 1, T, 1] and keys [B, 1, 1, T]: the term added to their score, -inf where it is hidden."""
HIDDEN = -torch.inf


def chunks(q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q // 4 == k // 4, 0.0, HIDDEN).double()


def documents(q: Tensor, k: Tensor) -> Tensor:
    return torch.where((q < 5) | (k >= 5), 0.0, HIDDEN).double()


def nearness(q: Tensor, k: Tensor) -> Tensor:
    return -0.3 * (q - k).abs().double()


RULES: dict[str, Rule] = {"chunks": chunks, "documents": documents, "bias": nearness}


def masked(rule: Rule, monkeypatch: pytest.MonkeyPatch, by_column: bool = False, **changes: Any) -> Any:
    """A model whose masks are made by a rule of positions, or of columns."""
    model = double("llama", num_hidden_layers=1, **changes)

    def create(*, attention_mask: Any = None, inputs_embeds: Tensor, position_ids: Any = None, **_: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 4:
            return attention_mask
        column = torch.arange(inputs_embeds.shape[1])
        number = column[None] if by_column else position_ids
        score = rule(number[:, None, :, None], number[:, None, None, :])
        seen = (column[:, None] >= column)[None, None]
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None, None, :] != 0)
        return torch.where(seen, score, HIDDEN)

    monkeypatch.setitem(vars(sys.modules[type(model.model).__module__]), "create_causal_mask", create)
    return model


def rows(padding: Any = None) -> Batch:
    return shared_batch(rows=4, length=12, shared=6, padding=padding)


def placed(batch: Batch) -> dict[str, Any]:
    """A batch with positions that count each row from its first token."""
    mask = batch.attention_mask
    own = torch.arange(12).expand(4, 12) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    return {**batch.inputs(), "position_ids": own}


def step(batch: Batch) -> Callable[[Any], Tensor]:
    return lambda run: run(**placed(batch), use_cache=False).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", RULES)
def test_masks_and_biases_by_position(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches one after another through one model, padded on either side; with chunks, what depends on them."""
    model, twin = converted(masked(RULES[name], monkeypatch))
    for padding in ("right", "left", "right"):
        check(model, twin, step(rows(padding)))
    if name == "chunks":
        numbers_beyond_32_bits_run_on_rows(model, twin)
        wrong_planes_are_found(model, twin)


def numbers_beyond_32_bits_run_on_rows(model: Any, twin: Any) -> None:
    given = {**rows().inputs(), "position_ids": torch.arange(12).expand(4, 12) + (1 << 33)}
    with pytest.warns(UserWarning, match="does not fit into 32 bits"):
        check(model, twin, lambda run: run(**given, use_cache=False).loss, packed=False)
    check(model, twin, step(rows()))


def wrong_planes_are_found(model: Any, twin: Any) -> None:
    """Mistakes on purpose, and then the right planes."""
    batch = rows("left")
    wanted = outcome(twin, lambda: step(batch)(twin))
    right = planner.plane_of

    def unshifted(plane: Any, batch: Any, *given: Any) -> Any:
        found = right(plane, batch, *given)
        return batch.metadata[1].to(torch.int32) if plane[0] == "token" else found  # the column

    def shuffled(plane: Any, *given: Any) -> Any:
        found = right(plane, *given)
        return found.flip(0) if plane[0] == "token" else found

    for wrong in (unshifted, shuffled):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "plane_of", wrong)
            errors = relative_errors(outcome(model, lambda: step(batch)(model)), wanted)
        assert max(errors.values()) > 1e-6, wrong
    assert_close(outcome(model, lambda: step(batch)(model)), wanted, FLOAT64)


def test_chunks_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that start in another column have other chunks: they do not share."""
    model, twin = converted(masked(chunks, monkeypatch, by_column=True))
    for padding in (None, "left"):
        batch = rows(padding)
        check(model, twin, lambda run, batch=batch: total(run, [batch]))  # type: ignore[misc]


def alibi(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Attention with a bias that differs from head to head and from layer to layer."""
    column = torch.arange(query.shape[2])
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling - module.slopes[:, None, None] * (column[:, None] - column)
    scores = scores.masked_fill(column > column[:, None], HIDDEN) if mask is None else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.fixture
def slanted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of two layers with ALiBi, each with other slopes."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "alibi", alibi)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "alibi", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = double("llama", num_hidden_layers=2)
    for i, layer in enumerate(model.model.layers):
        heads = model.config.num_attention_heads
        layer.self_attn.register_buffer("slopes", (2.0 + i) ** -torch.arange(1, heads + 1).double())
    model.config._attn_implementation = "alibi"
    return model


def test_a_bias_that_differs_from_head_to_head(slanted: Any) -> None:
    model, twin = converted(slanted)
    for padding in (None, "right", "left"):
        check(model, twin, lambda run, padding=padding: total(run, [rows(padding)]))  # type: ignore[misc]
    for run in (model, twin):  # the proof was made with other slopes
        run.model.layers[0].self_attn.slopes.mul_(3)
    check(model, twin, lambda run: total(run, [rows()]))
    attention = model.model.layers[0].self_attn
    size, heads = max(attention.treefx_scores), model.config.num_attention_heads
    tree = seam.tree_of(torch.tensor([3, 2, 3], dtype=torch.int32), [torch.arange(3, dtype=torch.int32)], size)
    q = torch.zeros(1, heads // 2, 3, attention.head_dim, dtype=torch.float64)
    with pytest.raises(treefx.UnsupportedError, match=f"proved for {heads} query heads, .* attends with {heads // 2}"):
        seam.attend_on_tree(attention, q, q, q, tree, attention.scaling)


def one_slope(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Attention with one slope, a tensor that is no buffer."""
    column = torch.arange(query.shape[2])
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling - module.slope * (column[:, None] - column)
    scores = scores.masked_fill(column > column[:, None], HIDDEN) if mask is None else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def sloping(slanted: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "alibi", one_slope)
    for layer in slanted.model.layers:
        layer.self_attn.slope = torch.tensor(0.3, dtype=torch.float64)
    model, twin = converted(slanted)
    check(model, twin, lambda run: total(run, [rows()]))
    return model, twin


def test_a_tensor_in_an_attribute_changes(slanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, by another one, and by one that is trained: that one is refused."""
    model, twin = sloping(slanted, monkeypatch)
    for run in (model, twin):
        run.model.layers[0].self_attn.slope.mul_(3)
    check(model, twin, lambda run: total(run, [rows()]))
    for run in (model, twin):
        run.model.layers[0].self_attn.slope = torch.tensor(0.7, dtype=torch.float64)
    check(model, twin, lambda run: total(run, [rows()]))
    slope = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for run in (model, twin):
        run.model.layers[0].self_attn.slope = 2 * slope
    check(model, twin, lambda run: total(run, [rows()]), packed=False)


def test_a_table_in_an_attribute_shares(slanted: Any) -> None:
    """One number for each head: its size is no size of a batch."""
    for layer in slanted.model.layers:
        slopes = layer.self_attn.slopes
        del layer.self_attn.slopes
        layer.self_attn.slopes = slopes
    model, twin = converted(slanted)
    for padding in (None, "left"):
        check(model, twin, lambda run, padding=padding: total(run, [rows(padding)]))  # type: ignore[misc]
    for run in (model, twin):
        run.model.layers[1].self_attn.slopes = run.model.layers[1].self_attn.slopes * 2
    check(model, twin, lambda run: total(run, [rows()]))


def test_a_value_that_a_module_keeps_is_not_held() -> None:
    """The copy knows its shape and that it is trained; its memory is free as soon as the module lets go of it."""
    module = torch.nn.Linear(2, 2)
    copied = skeleton(module)
    module.kept = module(torch.ones(3, 2))
    assert not refresh([(module, copied)])
    kept: Any = copied.kept
    assert kept.shape == (3, 2) and kept.requires_grad and kept.untyped_storage().nbytes() == 4


def test_a_missed_attribute_is_found(slanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = sloping(slanted, monkeypatch)
    monkeypatch.setattr(planner, "refresh", lambda pairs: False)
    for run in (model, twin):
        run.model.layers[0].self_attn.slope = torch.tensor(0.7, dtype=torch.float64)
    with pytest.raises(AssertionError, match="differ"):
        check(model, twin, lambda run: total(run, [rows()]))


def test_a_trained_bias_is_refused(slanted: Any) -> None:
    attention = slanted.model.layers[0].self_attn
    slopes = attention.slopes
    del attention.slopes
    attention.slopes = torch.nn.Parameter(slopes)
    with pytest.raises(treefx.UnsupportedError, match="made of trained weights"):
        total(treefx.convert(slanted, on_unsupported="error"), [rows()])


# Blocks that run again ------------------------------------------------------------------------------------------------


def several(run: Any) -> Tensor:
    """Calls with another number of planes each, before one backward: a key in the middle is hidden in one of them."""
    given = rows()
    mask = torch.ones_like(given.input_ids)
    mask[:, 3] = 0
    hidden = Batch(given.input_ids, mask, given.labels)
    return torch.stack([step(batch)(run) for batch in (hidden, rows())]).sum()


def test_blocks_run_again_with_the_planes_of_their_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = converted(masked(nearness, monkeypatch))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    wanted = outcome(twin, lambda: several(twin))
    assert_close(outcome(model, lambda: several(model)), wanted, FLOAT64)
    assert len(model.model.layers[0].self_attn.treefx_scores) == 2
    find = variants.Variants.find

    def same_size(self: Any, scores: Any, planes: int) -> Any:
        return variants.Variant(9, find(self, scores, planes).scores)  # type: ignore[union-attr]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants.Variants, "find", same_size)
        errors = relative_errors(outcome(model, lambda: several(model)), wanted)
    assert max(errors.values()) > 1e-6


# Mistakes on purpose --------------------------------------------------------------------------------------------------


def test_a_module_that_changes_its_mask_is_an_error() -> None:
    """What it makes of a tree is no mask."""
    q = torch.zeros(1, 2, 3, 4)
    function = seam.reads_trees(lambda *given, **more: None)
    tree = seam.tree_of(torch.tensor([3, 2, 3], dtype=torch.int32), [])
    with pytest.raises(treefx.UnsupportedError, match="changes or replaces it before"):
        function(torch.nn.Module(), q, q, q, tree + 0.5)


def test_a_block_that_makes_a_mask_of_its_own_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph on rows is that of chunks; on the packed row it would hide what columns of that row say."""
    model = double("llama", num_hidden_layers=1)
    layer = type(model.model.layers[0])
    original = layer.forward

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        column = torch.arange(hidden_states.shape[1])
        own = (column[:, None] >= column) & (column[:, None] // 4 == column // 4)
        return original(self, hidden_states, attention_mask=own[None, None], **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(treefx.UnsupportedError, match="changes or replaces it before"):
        total(treefx.convert(model), [rows()])
    treefx.unconvert(model)
    assert torch.isfinite(total(model, [rows()]))
