"""Causal mixers: exact, everything around them packed; convolutions and linear recurrences run along the tree, others
on rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.backend.support import assert_packed, compare
from tests.batches import batch_with_forks, distinct_tokens, shared_batch
from tests.mixers import MIXERS
from tests.models import TinyLM, double, zoo
from tests.oracle import stats_of
from tests.spellings import PADDED, SPELLINGS
from treefx.passes.causal import (
    elements as causal_elements,
)
from treefx.passes.causal import (
    movement as causal_movement,
)
from treefx.passes.causal import (
    reductions as causal_reductions,
)
from treefx.passes.causal import (
    state as causal_state,
)
from treefx.passes.trace.inline_scan import associative_scan

SHORT = shared_batch(rows=3, length=10, shared=4)


@pytest.mark.parametrize(
    ("mixer", "side"), [("causal_conv", "right"), ("causal_conv", "left"), ("chunked_sum", "left")]
)
def test_padding_around_a_mixer(mixer: str, side: Any) -> None:
    """On the right it is unused and goes; on the left the mixer reads it and it stays."""
    batch = batch_with_forks(side)
    model = TinyLM(PADDED["sdpa_padding"], layers=1, after=MIXERS[mixer][0]()).double()
    stats = compare(model, batch).stats
    assert stats["fallback"] is None
    assert all(item["contracted"] for item in stats["expansions"])
    kept = stats["tokens"] - distinct_tokens(batch)
    assert kept == 0 if side == "right" else kept > 0


def test_mixer_of_the_padding_mask() -> None:
    """The mask takes part in the mixer, so tokens differ where their masks do."""

    class Masked(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            assert mask is not None
            return v + 0.3 * (v * mask[:, None, :, None]).cumsum(2)

    model = TinyLM(Masked, layers=1).double()
    batch = shared_batch(rows=3, length=12, shared=6, vocab=61, padding=None)
    mask = torch.ones_like(batch.input_ids)
    mask[1, 2] = 0
    with_hole = type(batch)(batch.input_ids, mask, batch.labels)
    stats = compare(model, with_hole).stats
    assert stats["fallback"] is None
    assert (
        stats["tokens"]
        > compare(model, type(batch)(batch.input_ids, torch.ones_like(mask), batch.labels)).stats["tokens"]
    )


def test_tables_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The domain's tables grow as tokens times chunk, never as tokens times rows or features, or tokens squared."""
    length = 512
    for module in (causal_state, causal_elements, causal_movement, causal_reductions):
        monkeypatch.setattr(module, "LARGEST_TABLE", 8 * length)
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, positions=False, after=MIXERS["chunked_sum"][0]())
    compiled = torch.compile(model.eval(), backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    ids = torch.arange(length).remainder(50).repeat(4, 1) + torch.arange(4)[:, None]
    with torch.no_grad():
        compiled(input_ids=ids)
    expansions = stats_of(compiled)["expansions"]
    assert expansions and all(item["contracted"] for item in expansions)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["lfm2", "recurrent_gemma"])
def test_hybrid(name: str) -> None:
    """In float64 throughout. Mamba-2 and Qwen3-Next, whose scans are recognised, are in ``test_tree_scans``."""
    stats = compare(double(name, **({"num_hidden_layers": 1} if name == "recurrent_gemma" else {})), SHORT).stats
    assert stats["fallback"] is None
    # RecurrentGemma writes its recurrence out column by column; LFM2's convolution runs along the tree.
    assert ("recurrent_gemma" == name) == bool(stats["expansions"])
    assert not any("convolution" in item["op"] for item in stats["expansions"])
    leaking = {item["op"] for item in stats["expansions"] if not item["contracted"]}
    # RecurrentGemma keeps the last state of every row on the module, which is computed on rows.
    assert leaking == ({"aten.select.int"} if name == "recurrent_gemma" else set())


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["minimax", "jamba"])
def test_hybrid_with_experts(name: str) -> None:
    """In float32; MiniMax proves its mixer by a buffer, Jamba's is an associative scan."""
    changes = {"num_hidden_layers": 2} if name == "minimax" else {"num_hidden_layers": 1}
    checked = compare(zoo(name, **changes), SHORT)
    assert all(item["contracted"] for item in checked.stats["expansions"])
    if name == "minimax":
        assert_packed(checked, distinct_tokens(SHORT), layers=1)


def test_associative_scan_is_written_out() -> None:
    def combine(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return a * c, c * b + d

    body = fx.symbolic_trace(combine)
    for node in body.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = torch.zeros(3)
    for length in (1, 2, 3, 4, 7, 12):
        decay, x = torch.rand(2, length, 3, dtype=torch.float64)
        state, expected = torch.zeros(3, dtype=torch.float64), []
        for t in range(length):
            state = decay[t] * state + x[t]
            expected.append(state)
        torch.testing.assert_close(associative_scan(body, [decay, x], [])[1], torch.stack(expected))
