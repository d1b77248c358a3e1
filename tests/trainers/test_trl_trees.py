"""TRL's AsyncGRPO, whose batch is a tree: on treefx's attention it computes as on the rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import treefx
from tests.models import double, zoo
from tests.oracle import FLOAT64, Outcome, assert_close, relative_errors
from tests.trainers.support import NEEDS_TRAINERS

pytest.importorskip("trl", minversion="1.16", reason=NEEDS_TRAINERS)

from transformers import AttentionInterface  # noqa: E402

from tests.trainers.trees import (  # noqa: E402
    MODELS,
    PROMPT,
    WINDOW,
    Row,
    installed,  # noqa: F401 - a fixture
    packing,
    rows_of,
    tree_of,
    trl_trainer,
)
from treefx.integrations import async_grpo  # noqa: E402

pytestmark = pytest.mark.usefixtures("installed")


def model_of(name: str, **changes: Any) -> Any:
    """In float64 throughout, the casts of norms among it; experts one by one, whose grouped product has no float64."""
    model = double(name, **MODELS.get(name, {}), **changes)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    return model


def call(model: Any, tree: Row) -> Tensor:
    """Logits ``[N, V]``, the model called as TRL calls it."""
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), tree["tree_max_seqlens"].tolist(), strict=True))
    ids, positions = (tree[name][None] for name in ("input_ids", "position_ids"))
    logits: Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, **{n: tree[n] for n in names}, **longest
    ).logits
    return logits[0]


def step(model: Any, loss: Tensor) -> Outcome:
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Outcome(loss.detach(), gradients)


def on_tree(model: Any, samples: list[dict[str, Any]]) -> Outcome:
    tree = tree_of(samples)
    model.set_attn_implementation(packing.TREE_ATTENTION)
    logp = call(model, tree).log_softmax(-1)
    chosen = logp.gather(1, tree["shift_labels"].clamp(min=0)[:, None])[:, 0][tree["token_index"]]
    advantages = torch.tensor([sample["advantage"] for sample in samples], dtype=torch.float64)[tree["segment_id"]]
    outcome = step(model, -(advantages * chosen).sum())
    model.set_attn_implementation("eager")
    return outcome


def on_rows(model: Any, samples: list[dict[str, Any]]) -> Outcome:
    """Every row alone, with transformers' own attention."""
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = sample["input_ids"]
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        loss = loss - sample["advantage"] * logp.gather(1, ids[1:, None])[PROMPT - 1 :].sum()
    return step(model, loss)


@pytest.mark.parametrize("name", MODELS)
def test_trees_are_their_rows(name: str) -> None:
    model = model_of(name)
    samples = rows_of(model.config.vocab_size)
    assert len(tree_of(samples)["input_ids"]) < 0.7 * sum(len(sample["input_ids"]) for sample in samples)
    expected = on_rows(model, samples)
    assert_close(on_tree(model, samples), expected, FLOAT64)
    assert all(grad is not None for grad in expected.gradients.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_causal_mask_over_the_packed_row_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is a window in packed places, and sinks or a cap that are left out."""
    model = model_of(name)
    samples = rows_of(model.config.vocab_size)
    expected, right = on_rows(model, samples), async_grpo._find_tree

    def worst(outcome: Outcome) -> float:
        return max(relative_errors(outcome, expected).values())

    def causal(segments: Any, paths: Any) -> Any:
        starts, stops, firsts, ends = right(segments, paths)
        return starts, stops, firsts, [stops[-1]] * len(ends)

    with monkeypatch.context() as patch:
        patch.setattr(async_grpo, "_find_tree", causal)
        assert worst(on_tree(model, samples)) > 1e-2
    wrong = {"sliding_window": WINDOW + 1} if "sliding_window" in MODELS[name] else {}
    for left_out in (
        {"softcap": None} if name == "gemma2" else {},
        {"s_aux": None} if name == "gpt_oss" else {},
        wrong,
    ):
        if left_out:

            def attend(*args: Any, left_out: dict[str, Any] = left_out, **kwargs: Any) -> Any:
                given = {key: left_out.get(key, item) if item is not None else None for key, item in kwargs.items()}
                return async_grpo.attention(*args, **given)

            AttentionInterface.register(packing.TREE_ATTENTION, attend)
            assert worst(on_tree(model, samples)) > 1e-4
            packing.register_tree_attention()


def test_latent_attention_and_checkpoints() -> None:
    """Values narrower than keys; layers that run again in the backward."""
    model = model_of("deepseek_v3")
    samples = rows_of(model.config.vocab_size)
    expected = on_rows(model, samples)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(on_tree(model, samples), expected, FLOAT64)


def test_a_tree_is_found_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not per layer, nor again in the backward; but again for the next call, and where its bounds were overwritten."""
    model, found, right = model_of("llama"), [], async_grpo._find_tree
    monkeypatch.setattr(async_grpo, "_find_tree", lambda *bounds: found.append(bounds) or right(*bounds))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    samples = rows_of(model.config.vocab_size)
    for calls in (1, 2):
        on_tree(model, samples)
        assert len(found) == calls
    model.set_attn_implementation(packing.TREE_ATTENTION)
    tree, other = tree_of(samples[:2]), tree_of(samples[5:])
    assert all(tree[name].shape == other[name].shape for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k"))
    size = min(len(tree["input_ids"]), len(other["input_ids"]))
    call(model, tree)
    for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k"):
        tree[name].copy_(other[name])
    tree |= {name: other[name] for name in ("input_ids", "position_ids")}
    assert torch.equal(call(model, tree)[:size], call(model, other)[:size])


def test_compiled_by_another_backend() -> None:
    """The graph breaks at attention; results stay."""
    model = model_of("qwen3", num_hidden_layers=1)
    samples = rows_of(model.config.vocab_size)
    expected = on_tree(model, samples)
    model.compile(backend="eager")
    assert_close(on_tree(model, samples), expected, FLOAT64)


def test_trees_of_one_row_and_drawn_ones() -> None:
    """Against each token's parents, which the rows of the tree name."""
    random = np.random.default_rng(0)
    for _ in range(30):
        rows: list[list[int]] = []
        for _ in range(int(random.integers(1, 8))):
            source = rows[int(random.integers(len(rows)))] if rows else []
            rows.append(source[: int(random.integers(0, len(source) + 1))] + random.integers(0, 3, 4).tolist())
        tree = packing.TreeRow()
        for row in rows:
            ids = torch.tensor(row)
            kept = {"completion_mask": torch.ones_like(ids), "old_log_probs": torch.zeros(len(ids))}
            tree.add({"input_ids": ids, "advantage": 1.0, "group_id": 0, **kept})
        packed = tree.pack()
        found = async_grpo._tree_of(packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"])
        assert torch.equal(found.depth, packed["position_ids"].int())
        bounds, seen = packed["tree_cu_seqlens_k"].tolist(), torch.zeros(len(found.depth), len(found.depth)).bool()
        segments = packed["tree_cu_seqlens_q"].tolist()
        for number, (start, stop) in enumerate(zip(segments, segments[1:], strict=False)):
            path = packed["tree_kv_index"][bounds[number] : bounds[number + 1]]
            for token in range(start, stop):
                seen[token, path[path <= token]] = True
        places = torch.arange(len(found.depth))
        assert torch.equal(seen, (places <= places[:, None]) & (places[:, None] < found.subtree_end))


# Refusals -------------------------------------------------------------------------------------------------------------


def saved(name: str, folder: Path, **changes: Any) -> str:
    zoo(name, **MODELS.get(name, {}), **changes).save_pretrained(folder)
    return str(folder)


def build(folder: str) -> Any:
    return trl_trainer.create_model_from_path(folder, device_map=None, attn_implementation=packing.TREE_ATTENTION)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "llama4_text"])
def test_layers_that_are_no_attention_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        treefx.UnsupportedError, match=r"(linear_attention|conv|chunked_attention).*GRPOTrainer.*TFX207"
    ):
        build(saved(name, tmp_path))


@pytest.mark.parametrize("name", ["bloom", "xglm", "codegen", "rwkv", "mpt", "doge"])
def test_models_that_do_not_read_the_tree_are_found_on_a_small_one(name: str, tmp_path: Path) -> None:
    """TRL would train them: they name no kinds of layers, and attention of their own sees the packed row."""
    with pytest.raises(treefx.UnsupportedError, match=r"(differ by|failed on a small one) .*GRPOTrainer"):
        build(saved(name, tmp_path))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_read_the_tree_are_built(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    model = trl_trainer.create_model_from_path(
        folder, device_map=None, attn_implementation=packing.TREE_ATTENTION, dtype=dtype
    )
    assert model.config._attn_implementation == packing.TREE_ATTENTION
    assert model.dtype == dtype and not model.training


def test_what_attention_is_asked_for_besides_is_refused_by_name() -> None:
    x = torch.zeros(1, 2, 3, 4)
    bounds = torch.tensor([0, 3])
    tree = {"tree_cu_seqlens_q": bounds, "tree_cu_seqlens_k": bounds}
    module = SimpleNamespace(is_causal=True)

    def attend(q: Tensor = x, mask: Tensor | None = None, **given: Any) -> Any:
        return async_grpo.attention(module, q, x, x, mask, **given)  # type: ignore[arg-type]

    assert attend(**tree, sliding_window=0, softcap=None, position_ids=bounds)[0].shape == (1, 3, 2, 4)
    with pytest.raises(treefx.InputError, match="expects the tree of a training step"):
        attend()
    with pytest.raises(treefx.InputError, match=r"tree of 3 tokens expects queries"):
        attend(torch.zeros(1, 2, 4, 4), **tree)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("attention mask", {"mask": x}),
        ("attention_dropout=0", {"dropout": 0.1}),
        ("not causal", {"is_causal": False}),
        ("position_bias", {"position_bias": x}),
    ]
    for text, given in cases:
        with pytest.raises(treefx.UnsupportedError, match=text):
            attend(**tree, **given)


@pytest.mark.parametrize(
    ("segments", "paths"),
    [([0, 3, 5], [0, 3, 7]), ([0, 3, 3], [0, 3, 6]), ([0, 3, 5, 6], [0, 3, 8, 10]), ([0, 2], [0, 1])],
)
def test_bounds_of_no_tree_are_refused(segments: list[int], paths: list[int]) -> None:
    with pytest.raises(treefx.InputError, match="depth-first order"):
        async_grpo._find_tree(segments, paths)
