"""``treefx.convert`` of model files as they were written before ``get_interface``, and as checkpoints bring them.

The attention function is ``ALL_ATTENTION_FUNCTIONS[name]``, or the file's own eager one by name, and every layer gets
``cache_position``, a count of columns.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

import treefx
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.models import ZOO, double_from, lifted
from tests.oracle import FLOAT64, assert_close, outcome
from treefx.runtime.converted import seam, sizes

INTERFACE = (
    r"(?s)attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface\(.*?\n        \)",
    """attention_interface: Callable = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]""",
)
COUNT = (
    r"use_cache=use_cache,\n                \*\*kwargs",
    "use_cache=use_cache,\n                cache_position=torch.arange(hidden_states.shape[1]),\n"
    "                **kwargs",
)
READ = (r"(self.k_proj\(hidden_states\))", r"(\1 * (1 + kwargs['cache_position'][:, None]))")


def older(*changes: tuple[str, str], **config: Any) -> Any:
    module = lifted(modeling_llama.__name__, "older", (INTERFACE, COUNT, *changes))
    made = LlamaConfig(**{**ZOO["common"], "num_hidden_layers": 1, **config})
    made._attn_implementation = config.get("attn_implementation", "sdpa")
    return double_from(module.LlamaForCausalLM, made)


def step(model: Any, given: list[Batch], **inputs: Any) -> Tensor:
    return torch.stack([model(**batch.inputs(), **inputs).loss for batch in given]).sum()


BATCHES = [shared_batch(rows=4, length=n, shared=6, padding=side, seed=n) for n, side in ((12, "right"), (9, None))]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_older_file(attention: str) -> None:
    model = older(attn_implementation=attention)
    twin, forward = copy.deepcopy(model), model.model.layers[0].self_attn.forward
    treefx.convert(model, on_unsupported="error")
    for batch in BATCHES:
        assert_close(*(outcome(x, functools.partial(step, x, [batch])) for x in (model, twin)), FLOAT64)
        stats = treefx.inspect(model).stats
        assert stats["ran"] == "packed" and stats["tokens"] == distinct_tokens(batch)
    single = {name: x[:1] for name, x in BATCHES[0].inputs().items()}
    assert_close(*(outcome(x, lambda x=x: x(**single).loss) for x in (model, twin)), FLOAT64)  # type: ignore[misc]
    treefx.unconvert(model)
    assert model.model.layers[0].self_attn.forward == forward


def test_blocks_that_are_compiled() -> None:
    model = older()
    twin = copy.deepcopy(model)
    treefx.convert(model, on_unsupported="error")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_close(*(outcome(x, lambda x=x: step(x, BATCHES)) for x in (model, twin)), FLOAT64)  # type: ignore[misc]
    assert treefx.inspect(model).stats["ran"] == "packed"


def test_an_eager_function_that_reads_no_trees_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plausible wrong version: only what comes from ``ALL_ATTENTION_FUNCTIONS`` reads trees."""
    monkeypatch.setattr(seam, "_EAGER", "another name")
    seam._reading.cache_clear()
    model = treefx.convert(older(attn_implementation="eager"), on_unsupported="error")
    with pytest.raises((treefx.UnsupportedError, RuntimeError)):
        step(model, BATCHES[:1])
    seam._reading.cache_clear()


def test_columns_that_a_block_counts_are_refused() -> None:
    model = treefx.convert(older(READ), on_unsupported="error")
    with pytest.raises(treefx.UnsupportedError, match="reads a vector with an entry per column"):
        step(model, BATCHES[:1])


def test_columns_of_the_packed_row_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes._Search, "_numbers_columns", lambda self, node: False)
    model = older(READ)
    twin = copy.deepcopy(model)
    treefx.convert(model, on_unsupported="error")
    with pytest.raises(AssertionError):
        assert_close(*(outcome(x, lambda x=x: step(x, BATCHES[:1])) for x in (model, twin)), FLOAT64)  # type: ignore[misc]
