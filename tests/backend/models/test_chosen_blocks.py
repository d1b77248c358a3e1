"""Block-sparse attention: each query chooses blocks of keys, so that only a run can tell whether it sees any key."""

from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.backend.support import Pair, assert_packed
from tests.batches import distinct_tokens, shared_batch
from tests.models import double_from, lifted
from treefx.passes.packing import emit_attention
from treefx.passes.packing.emitters import SIGHT

CONFIG = {
    "vocab_size": 128, "hidden_size": 16, "dense_intermediate_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 1,
    "layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["dense"], "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def minimax(**changes: Any) -> nn.Module:
    """A tiny MiniMax-M3 in float64, whose layer chooses blocks of three keys."""
    if "minimax_m3_vl_text" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no MiniMax-M3")
    config = AutoConfig.for_model("minimax_m3_vl_text", **{**CONFIG, **changes})
    original: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return double_from(getattr(lifted(original.__module__), original.__name__), config)


@pytest.mark.parametrize(("blocks", "inner"), [(1, "aot_eager"), (3, "inductor"), (16, "aot_eager")])
def test_blocks_of_keys(blocks: int, inner: str) -> None:
    """Fewer blocks than a row has, and more; each query is in a block that it has chosen."""
    pair = Pair(minimax(index_topk_blocks=blocks), inner=inner)
    batch = shared_batch(rows=4, length=14, shared=6, padding="right")
    assert_packed(pair.check(batch), distinct_tokens(batch), 1)


def test_queries_that_do_not_choose_themselves_run_on_rows() -> None:
    """Blocks by score alone: a query may see no key, and eager then takes the mean of its row."""
    pair = Pair(minimax(index_topk_blocks=1, index_local_blocks=0))
    checked = pair.check(shared_batch(rows=4, length=14, shared=6, padding="left"))
    assert checked.stats["fallback"] == SIGHT
    assert checked.stats["fallback_code"] == "TFX014"


def test_a_mean_over_no_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_attention, "asks_for_sight", lambda attention: False)
    pair = Pair(minimax(index_topk_blocks=1, index_local_blocks=0))
    with pytest.raises(AssertionError):
        pair.check(shared_batch(rows=4, length=14, shared=6, padding="left"))
