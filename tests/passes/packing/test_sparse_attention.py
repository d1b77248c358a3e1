"""The pass that finds attentions to few chosen keys: a labelled graph in, the same graph with other facts out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from tests.backend.models.test_choices import VOCAB, Biased, Indexed, model_of
from tests.backend.support import Pair
from tests.batches import shared_batch
from treefx.kernels.sparse.choose import dense_pairs
from treefx.passes.labels.facts import fact_of
from treefx.passes.scores import sparse
from treefx.passes.scores.attention_facts import Attention, attentions
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
            assert not pays_off(4, least - 1, group, device)
            assert pays_off(4, least + 1, group, device)
    assert pays_off(64, 4096, 16, "cpu") and not pays_off(64, 4096, 1, "cuda")


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
