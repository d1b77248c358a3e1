"""``treefx.convert`` in one process: calls as trainers make them, exact against the unconverted model on rows."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import treefx
from tests.batches import Batch, shared_batch
from tests.models import double, zoo
from tests.oracle import FLOAT32, FLOAT64, assert_close, outcome, relative_errors
from treefx.kernels.score import Score
from treefx.runtime.converted import own_function, planner, seam, variants, written


def small(name: str = "llama", **changes: Any) -> Any:
    return double(name, num_hidden_layers=1, **changes)


def converted(model: Any, **options: Any) -> tuple[Any, Any]:
    """The model, converted, and its twin as it was."""
    twin = copy.deepcopy(model)
    return treefx.convert(model, **options), twin


def check(model: Any, twin: Any, step: Callable[[Any], Tensor], limit: float = FLOAT64, *, packed: bool = True) -> Any:
    """The step on both; the statistics of the converted one."""
    got = outcome(model, lambda: step(model))
    assert_close(got, outcome(twin, lambda: step(twin)), limit)
    stats = treefx.inspect(model).stats
    assert stats["ran"] == ("packed" if packed else "ordinary")
    assert not packed or (stats["fallback"] is None and stats["tokens"] < stats["raw_tokens"])
    return stats


def batches(padding: Any = "right") -> list[Batch]:
    return [shared_batch(rows=4, length=n, shared=6, padding=padding, seed=n) for n in (12, 13, 9)]


def total(model: Any, given: list[Batch], **inputs: Any) -> Tensor:
    """The loss of several forwards before one backward."""
    return torch.stack([model(**batch.inputs(), **inputs).loss for batch in given]).sum()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """For calls that leave a model as it was."""
    return converted(small())


def packed_row(batch: Batch, cut: int = 0) -> dict[str, Tensor]:
    """The rows of a batch one behind another, positions restarting."""
    rows = batch.rows()
    ids = torch.tensor(sum(rows, []))[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    end = ids.shape[1] - cut
    return {"input_ids": ids[:, :end], "position_ids": positions[:, :end]}


# What runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [True, False])
def test_trees_of_several_forwards_are_kept_apart(checkpoint: bool) -> None:
    """``checkpoint``: whether reentrant. Recomputation comes when other trees have run."""
    model, twin = converted(small())
    model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
    check(model, twin, lambda run: total(run, batches(None)))


def test_padding_on_both_sides_positions_and_packed_rows(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    left = shared_batch(rows=4, length=12, shared=6, padding="left")
    assert left.attention_mask is not None
    stats = check(model, twin, lambda run: total(run, [left]))
    by_column = stats["tokens"]
    own = (left.attention_mask.cumsum(1) - 1).clamp(min=0)
    stats = check(model, twin, lambda run: total(run, [left], position_ids=own))
    assert stats["tokens"] < by_column  # rows that start in other columns share too
    both = left.input_ids.clone(), left.attention_mask.clone()
    both[1][:2, -2:] = 0
    labels = torch.where(both[1] == 0, -100, left.labels)
    check(model, twin, lambda run: run(input_ids=both[0], attention_mask=both[1], labels=labels).loss)
    row = packed_row(shared_batch(rows=4, length=12, shared=6), cut=3)
    check(model, twin, lambda run: run(**row, labels=row["input_ids"]).loss)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_padding_that_sees_no_key_comes_back_as_zero(name: str, pair: tuple[Any, Any]) -> None:
    """A whole window behind a row's last token; nearer to it the model computes what it does on rows."""
    window = 4 if name == "mistral" else None
    model, twin = converted(small(name, sliding_window=window)) if window else pair
    ids = torch.randint(1, 60, (1, 18)).expand(4, 18).clone()
    ids[1:, 6:] = torch.randint(1, 60, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:], mask[2, 12:] = 0, 0
    got, wanted = (run.model(input_ids=ids, attention_mask=mask)[0] for run in (model, twin))
    assert treefx.inspect(model).stats["ran"] == "packed"
    blind = mask.cumsum(1) == torch.nn.functional.pad(mask.cumsum(1), (window or 18, 0))[:, :18]
    assert int(blind.sum()) == (7 + 3 if window else 0)
    torch.testing.assert_close(got, wanted.masked_fill(blind[..., None], 0), rtol=1e-10, atol=1e-12)


def test_a_trainer_calls_as_it_likes(pair: tuple[Any, Any]) -> None:
    """Evaluation first, other shapes each call, a single row, logits and hidden states read."""
    model, twin = pair
    first, *others = batches()
    with torch.no_grad():
        logits = model.eval()(**first.inputs()).logits
        torch.testing.assert_close(logits, twin.eval()(**first.inputs()).logits, rtol=1e-10, atol=1e-12)
    model.train(), twin.train()
    check(model, twin, lambda run: total(run, others, num_items_in_batch=torch.tensor(20)))
    check(model, twin, lambda run: run(**first.without("labels").inputs()).logits.pow(2).sum())
    asked = {"output_hidden_states": True}
    check(model, twin, lambda run: torch.stack([x.sin().sum() for x in run(**first.inputs(), **asked)[2]]).sum())
    assert first.attention_mask is not None
    everything = Batch(first.input_ids, first.attention_mask, first.input_ids)  # padding has labels too
    check(model, twin, lambda run: total(run, [everything]))
    single = {name: x[:1] for name, x in first.inputs().items()}
    stats = check(model, twin, lambda run: run(**single).loss, packed=False)
    assert stats["fallback"] is None  # nothing to share is no reason to complain
    ids = first.input_ids[:2, :5]
    assert torch.equal(*(run.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0) for run in (model, twin)))


def test_old_probabilities_under_inference_mode_come_first() -> None:
    """What the first call leaves is changed by the check of the next kind of call."""
    model, twin = converted(small())
    batch = batches(None)[0]
    with torch.inference_mode():
        assert torch.isfinite(model(**batch.inputs()).loss)
    inputs = packed_row(batch)
    check(model, twin, lambda run: run(**inputs, labels=inputs["input_ids"]).loss)


def test_padding_may_be_dropped_and_later_calls_trace_nothing() -> None:
    """Though attentions get another forward in the first call: a trace of many layers takes long."""
    model, twin = converted(small(), padding="drop")
    counts = []
    for batch in batches():
        check(model, twin, lambda run, batch=batch: total(run, [batch]))  # type: ignore[misc]
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[0] == counts[1] == counts[2] > 0
    batch = batches()[0]
    assert batch.attention_mask is not None
    hidden = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    assert bool((hidden[batch.attention_mask == 0] == 0).all())
    assert bool((hidden[batch.attention_mask == 1] != 0).any(-1).all())


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_windows_and_softcaps(name: str) -> None:
    """Two layers of gemma2: only one has a window."""
    model = double(name) if name == "gemma2" else small(name, **NO_DROPOUT)
    check(*converted(model), lambda run: total(run, [batches()[0], shared_batch(4, 12, 6, padding="left")]))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_and_sinks(name: str) -> None:
    model, twin = converted(zoo(name, num_hidden_layers=1))
    asked = {"output_router_logits": True} if name == "qwen3_moe" else {}
    check(model, twin, lambda run: total(run, batches(None)[:1], **asked), FLOAT32)


def test_adapters_after_conversion_and_switched_off() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    given = batches(None)[:1]
    model = treefx.convert(small())
    total(model, given)
    adapted = get_peft_model(model, config).double()
    twin = get_peft_model(small(), config).double()
    twin.load_state_dict(adapted.state_dict())
    check(adapted, twin, lambda run: total(run, given))
    with adapted.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(total(adapted, given), total(twin, given), rtol=1e-10, atol=0)
    lora = [module for module in adapted.modules() if hasattr(module, "lora_dropout")]
    lora[0].lora_dropout["default"] = torch.nn.Dropout(0.5).train()
    with pytest.warns(UserWarning, match="dropout.default:? draws random numbers"):
        total(adapted, given)
    assert "dropout.default" in treefx.inspect(adapted).stats["fallback"]


@pytest.mark.parametrize(
    ("compiler", "shapes"),
    [({"backend": "treefx", "options": {"inner": "aot_eager"}}, 2), ({"backend": "inductor"}, 1)],
    ids=["treefx", "inductor"],
)
def test_blocks_compiled_one_by_one(compiler: dict[str, Any], shapes: int) -> None:
    torch._dynamo.reset()
    model, twin = converted(small("mistral"))
    for block in model.model.layers:
        block.compile(fullgraph=True, **compiler)
    check(model, twin, lambda run: total(run, batches(None)[:shapes]))


def test_a_copy_of_a_converted_model_is_converted(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    again = copy.deepcopy(model)
    check(again, twin, lambda run: total(run, batches(None)[:1]))
    assert again.model.treefx_hooks.owner is again.model
    with pytest.raises(treefx.ConfigError, match="expects a model, got NoneType"):
        treefx.convert(None)  # type: ignore[arg-type]


# What does not ------------------------------------------------------------------------------------------------------


def test_calls_on_rows_are_exact_and_named(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    batch, left = batches()[0], shared_batch(rows=4, length=12, shared=6, padding="left")
    ids, labels = batch.input_ids, batch.labels
    whole = torch.ones(4, 1, 12, 12).tril().bool()
    calls: dict[str, Callable[[Any], Tensor]] = {
        "cache": lambda run: run(ids, labels=labels, use_cache=True).loss,
        "attention_mask that is not": lambda run: run(ids, attention_mask=whole, labels=labels).loss,
        "no input_ids": lambda run: run(inputs_embeds=run.get_input_embeddings()(ids), labels=labels).loss,
        "read by the loss": lambda run: run(left.input_ids, left.attention_mask, labels=left.input_ids).loss,
        "token_type_ids": lambda run: run(ids, labels=labels, token_type_ids=torch.zeros_like(ids)).loss,
    }
    for reason, call in calls.items():
        assert reason in check(model, twin, call, packed=False)["fallback"]
    check(model, twin, lambda run: total(run, [batch]))  # and the next one runs packed again


def refuses(model: Any, reason: str) -> None:
    """A call that would share is refused, and says why."""
    treefx.convert(model, on_unsupported="error")
    with pytest.raises(treefx.UnsupportedError, match=reason):
        total(model, batches(None)[:1])


def test_settings_changed_after_the_proof_are_seen() -> None:
    model = small("gpt2", **NO_DROPOUT)
    treefx.convert(model, on_unsupported="error")
    total(model, batches(None)[:1])
    model.transformer.h[0].mlp.dropout.p = 0.5
    with pytest.raises(treefx.UnsupportedError, match="dropout.default:? draws random numbers"):
        total(model, batches(None)[:1])
    total(model.eval(), batches(None)[:1])
    assert treefx.inspect(model).stats["ran"] == "packed"


def test_models_are_refused_by_name() -> None:
    refuses(small(attention_dropout=0.1), "dropout in attention draws for every row")
    with pytest.raises(treefx.UnsupportedError, match="gets other values than on rows"):
        # Its positions come from the mask.
        total(treefx.convert(small("opt"), on_unsupported="error"), batches()[:1])
    for name in ("bloom", "falcon"):
        with pytest.raises(treefx.ConfigError, match="of transformers"):
            treefx.convert(zoo(name))


def test_an_attention_function_that_does_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands behind the products, token by token: the proof of the graph alone would let it pass."""
    model = small("gemma2")
    names = seam.attention_modules(model)["model.layers.0.self_attn"].forward.__globals__
    original = names["eager_attention_forward"]

    def gated(*args: Any, **kwargs: Any) -> Any:
        out, weights = original(*args, **kwargs)
        return 1.01 * out, weights

    monkeypatch.setitem(names, "eager_attention_forward", gated)
    refuses(model, "computes more than attention")


@pytest.mark.parametrize(("factor", "why"), [(1.01, "computes more than attention"), (None, "TypeError: mine")])
def test_a_registered_function_is_compared_whatever_its_name(
    factor: float | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were a kernel that does not run here. None: one that does not run on what it is compared on."""

    def my_flash_attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if factor is None and query.shape[-1] == own_function._FEATURES:
            raise TypeError("mine")
        out, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)
        return (factor or 1.0) * out, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "my_flash_attention", my_flash_attention)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "my_flash_attention", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = small()
    model.config._attn_implementation = "my_flash_attention"
    refuses(model, why)


def test_products_are_named_without_their_places() -> None:
    """The message about a logit that is refused: a product has no index where heads and rows are one."""
    assert written.named(("add", ("mul", ("dot", None, ()), ("const", 0.5)), ("cq",))) == "add(mul(dot, const), cq)"


def test_blocks_that_count_columns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    mlp = type(model.model.layers[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: original(self, x + torch.arange(x.shape[1])[:, None]))
    refuses(model, "counts columns inside of a block")


def test_branches_on_the_size_of_a_batch_run_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed row is longer than rows are: the branch would go the other way."""
    model = small()
    mlp = type(model.model.layers[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: original(self, x if x.shape[1] < 15 else 2 * x))
    model, twin = converted(model)
    stats = check(model, twin, lambda run: total(run, batches()[:1]), packed=False)
    assert "decides by the size of a batch" in stats["fallback"]
    check(model, twin, lambda run: total(run, [shared_batch(rows=4, length=6, shared=4)]))


def test_a_backbone_with_positions_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    rotary = type(model.model.rotary_emb)
    original = rotary.forward
    by_column = lambda self, x, position_ids: original(self, x, torch.arange(x.shape[1])[None])  # noqa: E731
    monkeypatch.setattr(rotary, "forward", by_column)
    refuses(model, "gets other values than on rows")


def test_an_operator_that_mixes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    mlp = type(model.model.layers[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: original(self, x.cumsum(1)))
    refuses(model, "cumsum")


def test_a_changed_attention_is_refused() -> None:
    """What was proved holds for the scale that was proved: a block compiled or checkpointed sees the change too."""
    model, _ = converted(small())  # whose calls all had a tree without further planes
    total(model, batches()[:1])
    attention = model.model.layers[0].self_attn
    tree = seam.tree_of(torch.tensor([3, 2, 3], dtype=torch.int32), [])
    q = torch.zeros(1, 4, 3, 16)
    for changed in ({"scaling": 0.5}, {"scaling": attention.scaling, "softcap": 5.0}, {"dropout": 0.1}):
        with pytest.raises(treefx.UnsupportedError, match="were proved.*convert the model again.*attn_implementation"):
            seam.attend_on_tree(attention, q, q, q, tree, **changed)  # type: ignore[arg-type]


# Mistakes on purpose ------------------------------------------------------------------------------------------------


def errors_with(module: Any, name: str, wrong: dict[str, Callable[..., Any]], model: Any, batch: Batch) -> list[float]:
    """Largest relative errors of a converted model: plain, then with each mistake in the place of a function."""
    model, twin = converted(model)
    wanted, found = outcome(twin, lambda: total(twin, [batch])), list[float]()
    for mistake in (getattr(module, name), *wrong.values()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, mistake)
            found.append(max(relative_errors(outcome(model, lambda: total(model, [batch])), wanted).values()))
    return found


def test_wrong_trees_are_found() -> None:
    batch = shared_batch(rows=4, length=12, shared=6)
    assert batch.attention_mask is not None
    batch.attention_mask[:, 3] = 0  # padding matters where it stands between tokens
    make, place = seam.tree_of, lambda x: torch.arange(len(x), dtype=torch.int32)
    wrong = {
        "causal": lambda end, planes, size: make(torch.full_like(end, len(end)), planes, size),
        "index for place": lambda end, planes, size: make(end, [place(end), *planes[1:]], size),
        "padding seen": lambda end, planes, size: make(end, [planes[0], torch.ones_like(end)], size),
        "wrong plane": lambda end, planes, size: make(end, [planes[1], planes[0]], size),
    }
    everything = Batch(batch.input_ids, batch.attention_mask, batch.input_ids)
    right, *errors = errors_with(planner, "tree_of", wrong, small("mistral", sliding_window=4), everything)
    assert right <= FLOAT64 and min(errors) > 1e-4, errors


def test_wrong_scores_are_found() -> None:
    model, batch = small("gemma2", sliding_window=4, attn_logit_softcapping=0.5), batches(None)[0]

    def without(what: str) -> Callable[..., Any]:
        def find(self: Any, scores: Any, planes: int) -> Any:
            changed = {name: _without(what, item) for name, item in scores.items()}
            return variants.Variant(2 + planes, changed)

        return find

    wrong = {what: without(what) for what in ("window", "softcap")}
    right, *errors = errors_with(variants.Variants, "find", wrong, model, batch)
    assert right <= FLOAT64 and min(errors) > 1e-6, errors


def _without(what: str, stated: Any) -> Any:
    score = stated.score
    if what == "window":
        return replace(stated, score=Score(score.value, None))
    _, (_, (_, inner, _)), _ = score.value  # cap * tanh(inner / cap)
    return replace(stated, score=Score(inner, score.visible))
