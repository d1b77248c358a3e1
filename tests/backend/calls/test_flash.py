"""Models that call flash attention: one graph, shared like any other; the kernels are stubs (``tests.backend.flash``).

The truth is the caller's own call in eager mode, with the same stubs.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.backend.flash import flash_stubs, with_flash
from tests.backend.packed import AGENTS, Packed, loss_inside, loss_outside, pack, trie_size
from tests.backend.support import assert_packed, compare
from tests.batches import Batch, distinct_tokens, padded
from tests.models import double, zoo
from tests.oracle import Checked, Step

pytestmark = pytest.mark.sample(3)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1}, "mistral": {"num_hidden_layers": 1, "sliding_window": 4},
    "gemma2": {"sliding_window": 4}, "gpt_oss": {"sliding_window": 4},
    "qwen3_moe": {"num_hidden_layers": 1},
}  # fmt: skip
SINGLE = {"gpt_oss", "qwen3_moe"}
"""Those that are compared in float32: their files cast to it in places that ``double`` does not reach."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with flash_stubs():
        yield


def flash_model(name: str, **changes: Any) -> nn.Module:
    make = zoo if name in SINGLE else double
    return with_flash(make(name, **{**MODELS[name], **changes}))


def compare_whole(model: nn.Module, step: Step | Batch, **options: Any) -> Checked:
    """Compares, and asserts that Dynamo made one graph."""
    counters.clear()
    checked = compare(model, step, **options)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    return checked


def ends_of(packed: Packed) -> dict[str, Any]:
    """``cu_seq_lens`` and what goes with them."""
    lengths = torch.tensor([len(item) for item in packed.segments])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def assert_shared(checked: Checked, tokens: int) -> None:
    assert_packed(checked, tokens)
    assert checked.stats["ran"] == "packed" and not checked.stats["expansions"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows(name: str, side: Any) -> None:
    batch = padded(AGENTS, side)
    assert_shared(compare_whole(flash_model(name), batch), distinct_tokens(batch))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [loss_inside, loss_outside])
def test_packed_rows_by_positions(name: str, step: Any) -> None:
    packed = pack(AGENTS)
    assert_shared(compare_whole(flash_model(name), step(packed)), trie_size(packed))


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_by_their_ends(name: str) -> None:
    packed = pack(AGENTS)
    assert_shared(compare_whole(flash_model(name), loss_inside(packed, **ends_of(packed))), trie_size(packed))


@pytest.mark.parametrize("name", MODELS)
def test_several_packed_rows_see_across_segments(name: str) -> None:
    """As transformers computes them: without a mask, rows of a batch are whole."""
    packed = pack(AGENTS, AGENTS)
    assert_shared(compare_whole(flash_model(name), loss_inside(packed)), packed.input_ids.numel() // 2)
