"""What ``treefx.convert`` leaves behind: nothing in other models, and nothing after ``treefx.unconvert``."""

import copy
import functools
import threading
import types
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AfmoeConfig, AfmoeForCausalLM, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import treefx
from tests.batches import shared_batch
from tests.models import double
from tests.oracle import FLOAT32, FLOAT64, assert_close, outcome
from treefx.kernels.score import make_score
from treefx.runtime.converted import seam

BATCH = shared_batch(rows=4, length=12, shared=6, padding=None)


def small(name: str = "llama", **changes: Any) -> Any:
    return double(name, num_hidden_layers=1, **changes)


def loss(model: Any, **more: Any) -> Tensor:
    found: Tensor = model(**BATCH.inputs(), use_cache=False, **more).loss
    return found


def state_of(model: nn.Module) -> list[Any]:
    """Everything that a model, its file and its classes hold, by identity."""
    found: list[Any] = []
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            items = tuple(value.items()) if isinstance(value, dict) else ()
            found.append((name, key, [(k, id(v)) for k, v in items] if items else value))
        found.append((name, type(module), tuple(type(module).__dict__.items())))
        found.append(tuple((k, id(v)) for k, v in seam._globals_of(module).items()) if is_attention(module) else ())
    return found


def is_attention(module: nn.Module) -> bool:
    return bool(seam.attention_modules(module).get(""))


def ran(model: Any) -> str:
    return str(treefx.inspect(model).stats["ran"])


def test_undone_as_if_never_converted() -> None:
    model = small()
    before, text = state_of(model), repr(model)
    assert treefx.unconvert(model) is model and not treefx.is_converted(model)
    assert treefx.unconvert(treefx.convert(model)) is model
    assert state_of(model) == before
    treefx.convert(model, pack_lm_head=True)
    wanted = loss(copy.deepcopy(treefx.unconvert(copy.deepcopy(model))))
    torch.testing.assert_close(loss(model), wanted, rtol=1e-10, atol=0)
    assert ran(model) == "packed" and treefx.is_converted(model) and not treefx.is_converted(model.lm_head)
    assert "forward" in model.model.layers[0].self_attn.__dict__
    treefx.unconvert(model)
    assert not treefx.is_converted(model)
    assert state_of(model) == before and repr(model) == text
    assert torch.equal(loss(model), wanted)
    with pytest.raises(treefx.ConfigError, match="unconvert expects a model, got NoneType"):
        treefx.unconvert(None)  # type: ignore[arg-type]


def test_nothing_of_a_call_with_a_hook_stays() -> None:
    model = treefx.convert(small())
    model.model.layers[0].register_forward_hook(lambda *given: None)
    before = state_of(model)
    with pytest.warns(UserWarning, match="forward hook"):
        loss(model)
    assert ran(model) == "ordinary" and state_of(model) == before


def test_a_second_conversion_changes_the_options() -> None:
    """Nothing of a refused call stays, nor of one on rows."""
    model = treefx.convert(small(attention_dropout=0.1), on_unsupported="error")
    before = state_of(model)
    with pytest.raises(treefx.UnsupportedError, match="dropout in attention"):
        loss(model)
    assert state_of(model) == before
    assert treefx.convert(model, on_unsupported="error") is model
    with pytest.raises(treefx.UnsupportedError):
        loss(model)
    treefx.convert(model)
    before = state_of(model)
    with pytest.warns(UserWarning, match="dropout in attention"):
        loss(model)
    assert ran(model) == "ordinary" and state_of(model) == before
    hooks = [*model.model._forward_pre_hooks.values(), *model._forward_pre_hooks.values()]
    assert len(hooks) == 2 and len(model.model._forward_hooks) == 1
    model.model.layers[0].self_attn.attention_dropout = 0.0
    loss(model)
    assert ran(model) == "packed"
    treefx.convert(model, min_sharing=100.0)
    loss(model)
    assert ran(model) == "ordinary"
    with pytest.raises(treefx.ConfigError, match="on_unsupported"):
        treefx.convert(model, on_unsupported="no")  # type: ignore[arg-type]


def test_other_models_of_the_file_are_not_changed() -> None:
    """Nor is the file: in one thread another model runs while the converted one does."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model, other = (AutoModelForCausalLM.from_config(config).double() for _ in range(2))
    file = transformers.models.llama.modeling_llama
    names, attention = dict(vars(file)), type(other.model.layers[0].self_attn)
    own, forward = state_of(other), attention.forward
    wanted = loss(other)
    treefx.convert(model)
    seen: list[Any] = []
    block = model.model.layers[0]
    original = type(block).forward

    def looks(self: Any, *args: Any, **kwargs: Any) -> Any:
        """In the middle of a packed call: another thread runs a model of the same classes."""
        if self is block and not torch.compiler.is_compiling():
            thread = threading.Thread(target=lambda: seen.append((loss(other), vars(file)["ALL_ATTENTION_FUNCTIONS"])))
            thread.start()
            thread.join()
        return original(self, *args, **kwargs)

    type(block).forward = looks
    try:
        loss(model)
    finally:
        type(block).forward = original
    assert ran(model) == "packed"
    assert len(seen) == 1 and torch.equal(seen[0][0], wanted) and seen[0][1] is ALL_ATTENTION_FUNCTIONS
    assert state_of(other) == own and attention.forward is forward and dict(vars(file)) == names


def test_two_threads_call_one_model() -> None:
    model, batches = treefx.convert(small()), [shared_batch(4, n, 6, padding=None, seed=n) for n in (12, 14)]
    wanted = [model(**batch.inputs(), use_cache=False).loss for batch in batches]
    start, got = threading.Barrier(2), dict[int, list[Tensor]]({0: [], 1: []})

    def run(i: int) -> None:
        start.wait()
        got[i] = [model(**batches[i].inputs(), use_cache=False).loss for _ in range(4)]

    threads = [threading.Thread(target=run, args=(i,)) for i in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(wanted):
        assert len(got[i]) == 4
        for found in got[i]:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


# The forward of an attention ----------------------------------------------------------------------------------------


def test_a_mask_passed_by_name() -> None:
    """AFMoE does, and many vision attentions."""
    config = AfmoeConfig(
        vocab_size=128, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_dense_layers=2, num_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"], sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AfmoeForCausalLM(config)
    twin = copy.deepcopy(model)
    treefx.convert(model, on_unsupported="error")
    assert_close(*(outcome(run, functools.partial(loss, run)) for run in (model, twin)), FLOAT32)
    assert ran(model) == "packed"
    on_rows = [run(**BATCH.inputs(), use_cache=True).loss for run in (model, twin)]
    assert torch.equal(*on_rows)


@pytest.mark.parametrize("written", ["file", "decorated", "instance"])
def test_ways_to_write_an_attention(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    attention = model.model.layers[0].self_attn
    forward = type(attention).forward
    names = forward.__globals__

    if written == "decorated":

        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            out, weights = forward(*args, **kwargs)
            return 1.5 * out, weights

        monkeypatch.setattr(type(attention), "forward", wrapper)
    elif written == "instance":
        attention.forward = types.MethodType(forward, attention)
    else:
        interfaces = names["ALL_ATTENTION_FUNCTIONS"]

        class Passing(type(interfaces)):  # type: ignore[misc]
            def get_interface(self, name: str, default: Any) -> Any:
                function = interfaces.get_interface(name, default)

                def call(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> Any:
                    return function(module, query, key, value, attention_mask, **others)

                return call

        monkeypatch.setitem(names, "ALL_ATTENTION_FUNCTIONS", Passing())
    twin = copy.deepcopy(model)
    before = state_of(model)
    treefx.convert(model, on_unsupported="error")
    assert_close(*(outcome(run, functools.partial(loss, run)) for run in (model, twin)), FLOAT64)
    assert ran(model) == "packed"
    treefx.unconvert(model)
    assert [x for x in state_of(model) if x not in before] == []


def test_arguments_by_place_are_those_of_the_function() -> None:
    """sdpa has the dropout in front of the scale; eager attentions have them the other way round."""
    module, tree = nn.Module(), seam.tree_of(torch.tensor([3, 2, 3], dtype=torch.int32), [])
    module.treefx_scores = {2: seam.Stated(make_score(scale=0.5), (), 0.5)}
    q = torch.randn(1, 2, 3, 8, dtype=torch.float64)

    def original(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: Any, scaling: Any) -> Any:
        raise AssertionError("a tree")

    function = seam.reads_trees(original)
    placed, _ = function(module, q, q, q, tree, 0.0, 0.5)
    named, _ = function(module=module, query=q, key=q, value=q, attention_mask=tree, scaling=0.5)
    assert torch.equal(placed, named)
    with pytest.raises(treefx.UnsupportedError, match="were proved"):
        function(module, q, q, q, tree, 0.5, 0.5)


# Together with the rest of treefx -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached", "implementation"), [(True, "sdpa"), (False, "eager")])
def test_packed_rows_and_the_cache_of_the_configuration(cached: bool, implementation: str) -> None:
    """With a cache, transformers lets the sequences of a packed row see each other, and so does the converted model."""
    model = small(use_cache=cached, attn_implementation=implementation)
    twin = copy.deepcopy(model)
    treefx.convert(model)
    rows = BATCH.rows()
    ids = torch.tensor(sum(rows, []))[None]
    given = {"input_ids": ids, "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None]}
    step = lambda run, **more: run(**given, labels=ids, **more).loss  # noqa: E731
    if cached:
        with pytest.warns(UserWarning, match="model.config.use_cache = False") as warned:
            got = [outcome(model, lambda: step(model)) for _ in range(2)][0]
        assert len(warned) == 1
        assert "config.use_cache=True" in treefx.inspect(model).stats["fallback"]
    else:
        got = outcome(model, lambda: step(model))
    assert_close(got, outcome(twin, lambda: step(twin)), FLOAT64)
    assert ran(model) == ("ordinary" if cached else "packed")
    step(model, use_cache=False)
    assert ran(model) == "packed"
    model(**BATCH.inputs())  # a padded batch computes the same with a cache
    assert ran(model) == "packed"
    model.gradient_checkpointing_enable()  # which makes no cache
    twin.gradient_checkpointing_enable()
    assert_close(outcome(model, lambda: step(model)), outcome(twin, lambda: step(twin)), FLOAT64)
    assert ran(model) == "packed"


def test_a_converted_model_that_is_compiled_too() -> None:
    model = small()
    twin = copy.deepcopy(model)
    treefx.convert(model)
    with pytest.raises(treefx.InputError, match="has converted.*call it once"):
        treefx.inspect(model)
    model.compile(backend="treefx", options={"inner": "eager"})
    assert_close(*(outcome(run, functools.partial(loss, run)) for run in (model, twin)), FLOAT64)
    stats = treefx.inspect(model).stats
    assert stats["ran"] == "packed" and stats["tokens"] < stats["raw_tokens"]
    assert "no attention" not in str(stats["fallback"])  # the head is a graph without token ids, and says so


def test_a_forest_is_for_compiled_models() -> None:
    model = treefx.convert(small())
    forest = treefx.Forest.from_sequences(BATCH.rows())
    with pytest.raises(treefx.UnsupportedError, match="unconvert.*compile"), treefx.use(forest):
        model(**forest.model_inputs(), use_cache=False)
    loss(model)
    assert ran(model) == "packed"
