"""``treefx.convert`` on hybrids: modules with recurrences run on the paths of the tree, all else on distinct tokens.

The recurrence libraries are stand-ins (``tests.libraries``).
"""

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import treefx
from tests.backend.models.test_libraries import HYBRID, MODELS, calls_libraries
from tests.batches import distinct_tokens, shared_batch
from tests.libraries import double_with_libraries
from tests.models import double
from tests.oracle import FLOAT64, assert_close, loss_of, outcome
from tests.trainers.converted.test_convert import check, converted, total
from treefx.runtime.converted import hooks, paths
from treefx.runtime.converted.seam import tree_of

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": HYBRID, "lfm2": {"layer_types": ["full_attention", "conv"]}, "falcon_h1": MODELS["falcon_h1"],
    "nemotron_h": {**MODELS["nemotron_h"], "layers_block_type": ["mamba", "attention"]},
    "bamba": {**MODELS["bamba"], "attn_layer_indices": [1]},
    "kimi_linear": {
        **MODELS["kimi_linear"], "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
    },
}  # fmt: skip
BATCH = shared_batch(rows=4, length=12, shared=6, vocab=61, padding="right")
LEFT = shared_batch(rows=4, length=13, shared=6, vocab=61, padding="left", seed=2)

pytestmark = calls_libraries


@functools.cache
def model_of(name: str) -> nn.Module:
    return double_with_libraries(name, num_hidden_layers=2, **HYBRIDS[name])


def pair(name: str = "lfm2", **options: Any) -> tuple[Any, Any]:
    return converted(copy.deepcopy(model_of(name)), **options)


@pytest.fixture(scope="module")
def kept() -> tuple[Any, Any]:
    """For calls that leave a model as it was: each kind of call is traced once."""
    return pair(min_sharing=1.0)


def mixers_of(stats: dict[str, Any]) -> set[str]:
    assert {item["code"] for item in stats["expansions"]} <= {"TFX134"}
    return {item["op"] for item in stats["expansions"]}


@pytest.mark.zoo
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name: str) -> None:
    try:
        model, twin = pair(name, min_sharing=1.0)
    except ValueError:
        pytest.skip(f"this version of transformers has no {name}")
    for batch in (BATCH, shared_batch(rows=3, length=17, shared=9, vocab=61)):
        stats = check(model, twin, loss_of(batch))
        assert stats["tokens"] == distinct_tokens(batch) and mixers_of(stats)
    got = outcome(model, lambda: loss_of(LEFT)(model))
    assert_close(got, outcome(twin, lambda: loss_of(LEFT)(twin)), FLOAT64)


def test_rows_padded_on_the_left_share_where_padding_is_zero() -> None:
    model, twin = pair("qwen3_next")
    rows = [[0, 0, 0, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11], [0, 5, 6, 7, 12, 13, 14], [0, 0, 5, 6, 7, 8, 9]]
    ids = torch.tensor(rows)
    mask = (ids != 0).long()
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)
    stats = check(model, twin, lambda run: run(**given, labels=labels, use_cache=False).loss)
    real = {tuple(x for x in row[: end + 1] if x) for row in rows for end in range(7) if row[end]}
    assert stats["tokens"] == len(real)


@pytest.mark.parametrize("reentrant", [True, False])
def test_trees_of_several_forwards_under_checkpoints(reentrant: bool) -> None:
    """Each recomputation takes the paths of the call that it belongs to."""
    model, twin = pair()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    twin.train()
    batches = [shared_batch(rows=4, length=n, shared=6, vocab=61, seed=n) for n in (12, 13, 9)]
    check(model, twin, lambda run: total(run, batches))


def test_compiled_blocks() -> None:
    model, twin = pair()
    for block in model.model.layers:
        block.compile(backend="eager")
    check(model, twin, loss_of(BATCH))
    check(model, twin, loss_of(shared_batch(rows=3, length=15, shared=7, vocab=61, seed=4)))


def square(run: Any) -> Tensor:
    """Reads the results at padding too."""
    found: Tensor = run(**BATCH.without("labels").inputs(), use_cache=False).logits.square().sum()
    return found


def test_results_at_padding_are_those_of_rows(kept: tuple[Any, Any]) -> None:
    """With ``padding="drop"`` they are not defined."""
    check(*kept, square)
    dropped, twin = pair(padding="drop")
    check(dropped, twin, loss_of(BATCH))


@pytest.mark.parametrize("ids", [[[5, 6, 7, 8]] * 3, [[5], [5], [6]], [[5, 6, 7], [5, 6, 0]]])
def test_few_paths(ids: list[list[int]], kept: tuple[Any, Any]) -> None:
    """One path for all rows, rows of one token, a row that is a prefix of the other."""
    model, twin = kept
    tensor = torch.tensor(ids)
    mask = (tensor != 0).long()
    check(model, twin, lambda run: run(input_ids=tensor, attention_mask=mask, use_cache=False).logits.square().sum())


@pytest.mark.parametrize("how", ["one row", "a mask of fractions"])
def test_masks_that_paths_cannot_carry(how: str, kept: tuple[Any, Any]) -> None:
    model, twin = kept
    ids = torch.tensor([[5, 6, 7, 8, 0]] if how == "one row" else [[5, 6, 7, 8], [5, 6, 7, 9]])
    mask = (ids != 0).long() if how == "one row" else torch.tensor([[1.0, 1.0, 0.5, 1.0]] * 2)
    step = lambda run: run(input_ids=ids, attention_mask=mask, use_cache=False).logits.square().sum()  # noqa: E731
    stats = check(model, twin, step, packed=False)
    assert ("a single row" if how == "one row" else "other numbers than 0 and 1") in stats["fallback"]


def test_no_gradients_and_back_and_undone() -> None:
    model, twin = pair()
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            torch.testing.assert_close(loss_of(BATCH)(model), loss_of(BATCH)(twin), rtol=1e-10, atol=1e-10)
    check(model, twin, loss_of(BATCH))
    treefx.unconvert(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert_close(outcome(model, lambda: loss_of(BATCH)(model)), outcome(twin, lambda: loss_of(BATCH)(twin)), FLOAT64)


# Wrong versions are noticed -------------------------------------------------------------------------------------------


def test_paths_without_the_mask_of_the_call_are_wrong(kept: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded token that runs must read its own hidden state as zero."""
    check(*kept, square)
    lines = paths._paths_of

    def unmasked(tree: Tensor) -> Any:
        found = lines(tree)
        return paths._Paths(found.token_of, found.place_of, torch.ones_like(found.mask))

    monkeypatch.setattr(paths, "_paths_of", unmasked)
    with pytest.raises(AssertionError):
        check(*kept, square)


def test_a_recurrence_along_the_packed_row_is_wrong(kept: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(*kept, square)
    monkeypatch.setattr(paths, "_lines", lambda end: (torch.arange(len(end)).repeat(2, 1), torch.arange(len(end))))
    with pytest.raises(AssertionError):
        check(*kept, square)


def test_a_mask_that_does_not_reach_the_recurrence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the call itself: without the first line, the changed code would be proved again."""
    monkeypatch.setattr("treefx.runtime.converted.planner.codes_of", lambda modules: [])
    model, _ = pair()
    loss_of(BATCH)(model)
    mixer = model.model.layers[1].conv
    original = mixer.forward

    def dropping(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setitem(mixer.__dict__, "forward", dropping)
    monkeypatch.setattr(hooks, "run_on_paths", lambda module: None)
    with pytest.raises(treefx.UnsupportedError, match="changes or drops it"):
        loss_of(BATCH)(model)


def test_without_the_library_rows_run() -> None:
    """Its PyTorch body computes with the number of columns."""
    model, twin = converted(double("qwen3_next", num_hidden_layers=2, **HYBRID), on_unsupported="expand")
    with pytest.warns(treefx.SharingWarning):
        check(model, twin, loss_of(BATCH), packed=False)


# Paths ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=6))
def test_paths_hold_every_token_once_per_leaf(rows: list[list[int]]) -> None:
    end = treefx.Forest.from_sequences(rows).subtree_end.long()
    mask = torch.randint(0, 2, end.shape, dtype=torch.int32)
    found = paths._paths_of(tree_of(end.to(torch.int32), [mask]))
    count = len(end)
    for line in found.token_of.tolist():
        tokens = [token for token in line if token < count]
        assert line[len(tokens) :] == [count] * (len(line) - len(tokens)), "a path, then nothing"
        assert tokens == [t for t in range(tokens[-1] + 1) if end[t] > tokens[-1]], "the ancestors of a leaf"
    x = torch.randn(1, count, 3)
    assert torch.equal(found.tokens(found.rows(x)), x)
    assert torch.equal(found.mask, torch.cat([mask, mask.new_zeros(1)])[found.token_of].long())
    assert paths.count_leaves(end) == len(found.token_of)
