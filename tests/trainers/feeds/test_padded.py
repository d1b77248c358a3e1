"""Padded rows as trainers compute losses of them: adapters, heads without logits, Liger's functions, FlashAttention.

The steps themselves, call after call, are those of ``test_steps``; here stands what a trainer does to the model.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treefx
from tests.backend.flash import flash_stubs, with_flash
from tests.backend.support import in_case
from tests.batches import Batch, distinct_tokens, distinct_with_padding, padded, shared_batch
from tests.models import double, zoo
from tests.oracle import FLOAT32, FLOAT64, assert_close, compile_with, eager_step, loss_of, outcome, stats_of
from tests.trainers.feeds.test_steps import llama, pairs, rollouts
from tests.trainers.liger import patch_llama
from tests.trainers.support import NEEDS_TRAINERS

Step = Callable[[Any], Tensor]


def assert_same(model: Any, compiled: Any, twin: Any, step: Step, limit: float = FLOAT64) -> dict[str, Any]:
    """A step of the compiled model and of its twin that is not; the statistics of the call."""
    assert_close(outcome(model, lambda: step(compiled)), outcome(twin, lambda: step(twin)), limit)
    return stats_of(compiled)


# Groups in order, and groups with rows that a trainer scatters ----------------------------------------


def test_groups_in_order_share_their_prompts_and_scattered_ones_less() -> None:
    """GRPO: prompts of two lengths, padded left, so that the groups start in different columns."""
    tokens = []
    for scattered in (False, True):
        batch = rollouts(0, 5, scattered)
        model, found = llama(), 0
        compiled = compile_with(model, inner="eager")
        for first in range(0, 8, 2):
            rows = batch.rows(slice(first, first + 2))
            with torch.no_grad():
                compiled(input_ids=rows.ids, attention_mask=rows.mask, logits_to_keep=6, use_cache=False)
            found += stats_of(compiled)["tokens"]
            assert found and stats_of(compiled)["fallback"] is None
        tokens.append(found)
    assert tokens[0] < tokens[1]


# Preferences: a reference that is the model without its adapter, and logits in single precision -----------------------


def preference(model: Any, columns: int, reference: Any) -> Tensor:
    """Chosen rows, then rejected ones; logits cast as LLaMA-Factory casts them."""
    ids, mask = pairs(columns, columns)
    labels = torch.where((mask == 0) | (torch.arange(columns) < 6), -100, ids)[:, 1:]

    def scores() -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.to(torch.float32)
        picked = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
        return (picked * (labels != -100)).sum(-1)

    with torch.no_grad(), reference():
        chosen_before, rejected_before = scores().split(4)
    chosen, rejected = scores().split(4)
    return -F.logsigmoid(0.1 * ((chosen - rejected) - (chosen_before - rejected_before))).mean()


def test_preferences_of_columns_in_eights_and_logits_in_float32() -> None:
    model = llama()
    compiled, twin = compile_with(model, inner="eager"), copy.deepcopy(model)
    for columns in (16, 24, 16):
        stats = assert_same(model, compiled, twin, lambda run: preference(run, columns, nullcontext), FLOAT32)  # noqa: B023
        assert (stats["ran"], stats["fallback"]) == ("packed", None)
    assert stats["compiles"] <= 4


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_reference_without_the_adapter(use_dora: bool) -> None:
    """LoRA under checkpoints; without them it is a run of TRL's (``test_trl``). A checkpoint of DoRA cuts the graph."""
    peft = pytest.importorskip("peft", reason=NEEDS_TRAINERS)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_dropout": 0.0}
    config = peft.LoraConfig(r=2, use_dora=use_dora, **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), config).double().train()
    if not use_dora:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    twin = copy.deepcopy(model)
    compiled = compile_with(model, inner="eager")
    for columns in (16, 24, 16):
        got, expected = (
            outcome(owner, lambda run=run, owner=owner: preference(run, columns, owner.disable_adapter))  # noqa: B023
            for owner, run in ((model, compiled), (twin, twin))
        )
        assert_close(got, expected, FLOAT32)
        stats = stats_of(compiled)
        assert (stats["ran"], stats["fallback"]) == ("packed", None) and not stats["expansions"]
    assert stats["compiles"] <= 4


# Heads without logits, put in the place of ``forward`` before the model is compiled or after --------------------------


def fused(model: Any) -> None:
    pytest.importorskip("trl", reason=NEEDS_TRAINERS).trainer.utils.add_fused_lm_head(model, outputs=("log_probs",))


def in_chunks(model: Any) -> None:
    """TRL 1.10's ``chunked_nll``: tokens with a label first, in chunks under checkpoints, as many as there are."""

    def scored(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=-100)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden, targets = out.last_hidden_state[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        order = torch.argsort((targets == -100).int(), stable=True)
        count = int((targets != -100).sum())
        if count == 0:
            return {"loss": hidden.sum() * 0.0}
        total = hidden.new_zeros(())
        for first in range(0, count, 8):
            part = order[first : first + 8]
            total = total + checkpoint(scored, hidden[part], targets[part], self.lm_head.weight, use_reentrant=False)
        return {"loss": total / count}

    model.forward = MethodType(forward, model)


@pytest.mark.parametrize(("replace", "first"), [(fused, "compiled"), (in_chunks, "replaced")])
def test_a_forward_in_place_of_the_models(replace: Callable[[Any], None], first: str) -> None:
    model, twin = llama(), llama()
    replace(twin)
    if first == "replaced":
        replace(model)
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    if first == "compiled":
        replace(model)
    more, limit = ({"fused_lm_head": True}, FLOAT32) if replace is fused else ({}, FLOAT64)  # TRL's scores in float32
    for seed, (rows, length) in enumerate(((4, 12), (3, 9), (5, 15))):
        batch = shared_batch(rows=rows, length=length, shared=6, vocab=61, seed=seed)
        stats = assert_same(model, model, twin, lambda run: run(**batch.inputs(), **more)["loss"], limit)  # noqa: B023
        assert stats["ran"] == "packed" and stats["attention_rewritten"] == 1
        if replace is fused:
            assert stats["tokens"] == distinct_tokens(batch) and stats["fallback"] is None
        else:  # operators behind the break read all rows, and the report names it
            assert stats["tokens"] == distinct_with_padding(batch.input_ids, batch.attention_mask)
            assert "Dynamo cut the model" in stats["fallback"]


# Liger's functions, and a backbone that the trainer calls behind the compiled model's back ----------------------------


def behind_its_back(model: Any, batch: Batch) -> Tensor:
    """TRL with Liger's losses: hidden states of ``base_model``, the head's weight by hand."""
    hidden = model.base_model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)[0]
    logits = hidden[:, :-1] @ model.lm_head.weight.T
    return F.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten())  # type: ignore[index]


def compiled_outside(model: Any) -> Any:
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    return model


def compiled_inside(model: Any) -> Any:
    model.base_model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    return model


def converted(model: Any) -> Any:
    return treefx.convert(model, min_sharing=1.0)


@pytest.mark.parametrize("how", [compiled_inside, converted])
def test_a_backbone_that_is_called_by_itself(how: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    patch_llama(monkeypatch)
    twin = zoo("llama", num_hidden_layers=1)
    model = how(copy.deepcopy(twin))
    for seed, (rows, length) in enumerate(((4, 12), (3, 9))):
        batch = shared_batch(rows=rows, length=length, shared=6, vocab=61, seed=seed)
        got = outcome(model, lambda batch=batch: behind_its_back(model, batch))
        assert_close(got, outcome(twin, lambda batch=batch: behind_its_back(twin, batch)), FLOAT32)
        stats = stats_of(model.base_model if how is compiled_inside else model)
        assert (stats["ran"], stats["fallback"], stats["expansions"]) == ("packed", None, [])
        read = how is compiled_inside  # hidden states of padding are the caller's, where no hook sees what they are for
        count = distinct_with_padding if read else lambda *_: distinct_tokens(batch)  # noqa: B023
        assert stats["tokens"] == count(batch.input_ids, batch.attention_mask)


def test_the_model_around_it_is_compiled_for_nothing_and_says_so() -> None:
    twin = llama()
    model = compiled_outside(copy.deepcopy(twin))
    batch = shared_batch(rows=4, length=12, shared=6, vocab=61)
    got = outcome(model, lambda: behind_its_back(model, batch))
    assert_close(got, outcome(twin, lambda: behind_its_back(twin, batch)), FLOAT64)
    with pytest.raises(treefx.InputError, match="no graph of treefx has run"):
        treefx.inspect(model)


# FlashAttention over padded rows --------------------------------------------------------------------------------------


@pytest.fixture
def kernels() -> Iterator[None]:
    with flash_stubs():
        yield


def test_flash_attention_of_padded_rows(kernels: None) -> None:
    """Padding on either side, and a mask of ones: one compiled model for all, and no compilation for each."""
    model = with_flash(double("mistral", num_hidden_layers=1, sliding_window=4))
    compiled = compile_with(model, inner="eager")
    for seed, (rows, length, side) in enumerate(((4, 12, "right"), (3, 9, "left"), (4, 12, None), (5, 8, "right"))):
        batch = shared_batch(rows=rows, length=length, shared=6, vocab=61, padding=side, seed=seed)
        if side is None:
            full = padded(batch.input_ids.tolist(), seed=seed)
            assert full.attention_mask is not None and bool(full.attention_mask.all())
            batch = full
        with in_case((rows, length, side)):
            got = outcome(model, lambda batch=batch: loss_of(batch)(compiled))
            assert_close(got, eager_step(model, batch), FLOAT64)
            stats = stats_of(compiled)
            assert (stats["ran"], stats["fallback"], stats["expansions"]) == ("packed", None, [])
            assert stats["tokens"] == distinct_tokens(batch) and stats["compiles"] <= 2
