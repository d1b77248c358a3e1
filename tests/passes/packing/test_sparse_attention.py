"""The pass that finds attentions to few chosen keys: a labelled graph in, the same graph with other facts out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from tests.backend.models.test_choices import VOCAB, Biased, Indexed, model_of
from tests.backend.models.test_choices import sparse as indexer
from tests.backend.support import Pair
from tests.batches import shared_batch
from treefx.kernels.sparse.choose import dense_pairs
from treefx.passes.labels.facts import fact_of
from treefx.passes.scores import sparse
from treefx.passes.scores.attention_facts import Attention, attentions
from treefx.passes.scores.latents import Expanded, Latents, Shared, find_latents
from treefx.passes.scores.sparse import SparseAttention, find_sparse, pays_off
from treefx.runtime.records import find


def labelled(attention: Callable[[], nn.Module], length: int = 17) -> fx.GraphModule:
    """The graph of one layer before the pass."""
    pair = Pair(model_of(attention), disable_passes=["sparse_attention"])
    pair.check(shared_batch(rows=3, length=length, shared=6, vocab=VOCAB, padding=None))
    return find(pair.model.parameters())[0].graph.rewrites[0].traced


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any list of keys takes less time."""
    monkeypatch.setattr(sparse, "pays_off", lambda *given: True)


class Numbered(Indexed):
    """A mask of numbers: one at the chosen keys, zero elsewhere."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        marks = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).scatter(-1, chosen.indices.int().long(), 1.0)
        bias = torch.zeros_like(marks).masked_fill(~seen | (marks < 0.5), -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(1))


class Others(Indexed):
    """Every key but the chosen ones."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        open_ = torch.ones(seen.shape, dtype=torch.bool, device=q.device).scatter(-1, chosen.indices, False)
        own = torch.eye(seen.shape[-1], dtype=torch.bool, device=q.device)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=(seen & (open_ | own)).unsqueeze(1))


class Moved(Indexed):
    """The keys next to the chosen ones: not what a top-k has returned."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        columns = (chosen.indices - 1).clamp_min(0)  # several may become the first
        hidden = torch.ones(seen.shape, dtype=torch.bool, device=q.device).scatter(-1, columns, False)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=(seen & ~hidden).unsqueeze(1))


@pytest.mark.parametrize("attention", [Indexed, Numbered])
def test_a_mask_at_chosen_columns_is_a_list(attention: Callable[[], nn.Module], always: None) -> None:
    gm = labelled(attention)
    (before,) = attentions(gm)
    nodes = list(gm.graph.nodes)
    assert type(before) is Attention and find_sparse(gm) == 1
    (after,) = attentions(gm)
    assert isinstance(after, SparseAttention) and list(gm.graph.nodes) == nodes
    assert (after.query, after.conditions, after.padding) == (before.query, before.conditions, before.padding)
    assert after.columns.meta["val"].shape == (3, 17, 3) and not after.columns.meta["val"].is_floating_point()
    assert after.choice not in after.others() and after.scale == pytest.approx(8**-0.5)
    scatter = next(node for node in nodes if "scatter" in str(node.target))
    assert scatter in before.reads() and scatter not in after.reads() and after.columns in after.reads()
    assert find_sparse(gm) == 0, "it is one already"


@pytest.mark.parametrize("attention", [Biased, Others, Moved])
def test_other_masks_stay(attention: Callable[[], nn.Module], always: None) -> None:
    """Scores that are added, keys that are not the chosen ones, and columns that may repeat."""
    gm = labelled(attention)
    assert attentions(gm) and find_sparse(gm) == 0


def test_the_rule_counts_work() -> None:
    """K gathered pairs of a query against (T + 1) / 2 masked ones, each at its cost."""
    for device in ("cpu", "cuda"):
        for group in (1, 8):
            cost = dense_pairs(device, group)
            least = int(2 * cost * 4)  # (T + 1) / 2 = 4 * cost
            assert not pays_off(4, least - 1, cost)
            assert pays_off(4, least + 1, cost)


def test_the_dense_form_stays_where_the_mask_takes_less_time() -> None:
    assert find_sparse(labelled(Indexed)) == 0


class One(Indexed):
    """One key of a query."""

    keys = 1


@pytest.mark.parametrize(("length", "found"), [(39, 0), (40, 1)])
def test_the_list_is_read_where_it_takes_less_time(length: int, found: int) -> None:
    """One gathered pair takes as long as 20 masked ones, and 40 columns show 20.5 on average."""
    gm = labelled(One, length)
    assert type(attentions(gm)[0]) is Attention, "the pass was left out"
    assert find_sparse(gm) == found


def test_facts_of_other_nodes_stay(always: None) -> None:
    gm = labelled(Indexed)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    before = {node: fact_of(node) for node in calls}
    find_sparse(gm)
    changed = [node for node in calls if fact_of(node) is not before[node]]
    assert len(changed) == 1 and isinstance(fact_of(changed[0]).law, SparseAttention)


# Keys and values by their latent vector -------------------------------------------------------------------------------


def expanded(name: str) -> Attention:
    """The attention of one layer whose keys are expanded from 8 features, to 12 and 8 that all heads share."""
    changes = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "indexer_types": ["full"]}
    model = indexer(name, index_topk=4, qk_nope_head_dim=12, v_head_dim=6, **changes)
    pair = Pair(model, disable_passes=["sparse_attention"])
    pair.check(shared_batch(rows=3, length=10, shared=6))
    (found,) = attentions(find(pair.model.parameters())[0].graph.rewrites[0].traced)
    return found


@pytest.mark.parametrize("name", ["deepseek_v32", "hy_v4"])
def test_latent_vectors_are_found(name: str) -> None:
    """By scaled_dot_product_attention and by two products, with keys written into an empty tensor."""
    found = find_latents(expanded(name))
    assert found is not None and found.features == (16, 8)
    first, second = found.key
    assert isinstance(first, Expanded) and (first.stride, first.offset, first.width) == (18, 0, 12)
    assert isinstance(second, Shared) and (second.offset, second.width) == (0, 8)
    assert (found.value.stride, found.value.offset, found.value.width) == (18, 12, 6)
    assert found.value.latent is first.latent and found.value.weight is first.weight
    assert set(found.reads()) == {first.latent, first.weight, second.value}


def test_keys_and_values_of_separate_products_are_read_by_head() -> None:
    (law,) = attentions(labelled(Indexed))
    assert find_latents(law) is None
    assert sparse._cheapest(law, "cpu") == (None, dense_pairs("cpu", 1))


def test_the_cheaper_form_of_keys_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A latent vector serves all heads, but is wider than the keys and values of one."""
    law = expanded("deepseek_v32")
    latents, cost = sparse._cheapest(law, "cpu")
    assert latents is not None and cost == pytest.approx(dense_pairs("cpu", 2) * (16 + 8) / (20 + 6))
    monkeypatch.setattr(sparse, "dense_pairs", lambda device, group: 5.0)
    latents, cost = sparse._cheapest(law, "cpu")
    assert latents is not None and cost == pytest.approx(5 * 24 / 26)
    monkeypatch.setattr(Latents, "features", property(lambda latents: (60, 50)))
    assert sparse._cheapest(law, "cpu") == (None, 5.0)
