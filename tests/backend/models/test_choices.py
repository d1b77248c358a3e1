"""Sparse attention: each query chooses keys, or blocks of keys, by scores of their own (an indexer's top-k)."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import treefx
from tests.backend.small import Small
from tests.backend.support import Pair, assert_packed, compare, compile_with
from tests.batches import Side, distinct_tokens, left_padded, shared_batch
from tests.models import TinyLM, double_from, lifted
from tests.oracle import FLOAT32, refused
from treefx.inputs import token_count
from treefx.inspection.report.costs import node_flops
from treefx.inspection.report.sizes import Sizes
from treefx.passes.packing import emit_attention, emit_choices, emit_sparse
from treefx.passes.packing.emitters import SIGHT
from treefx.passes.scores import sparse as sparse_pass
from treefx.runtime.records import find
from treefx.tools.bench.zoo.flop_share import flop_share

VOCAB = 61
COMMON = {
    "vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "index_head_dim": 16, "index_n_heads": 2, "mlp_layer_types": ["dense"],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TWO = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"], "indexer_types": ["full", "shared"]}
"""The second layer attends to the keys that the first has chosen."""
ARCHITECTURES: dict[str, dict[str, Any]] = {"deepseek_v32": {}, "glm_moe_dsa": TWO, "hy_v4": {**TWO, "hc_mult": 2}}


def sparse(name: str, **changes: Any) -> nn.Module:
    """A tiny model of transformers with an indexer, in float64."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {name}")
    config = AutoConfig.for_model(name, **{**COMMON, **ARCHITECTURES[name], **changes})
    original: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return double_from(getattr(lifted(original.__module__), original.__name__), config)


@pytest.mark.parametrize(("name", "keys"), [("glm_moe_dsa", 14), ("hy_v4", 64)])
def test_indexers(name: str, keys: int) -> None:
    """As many keys as the row has, and more; layers that take the choice of the layer before.

    ``test_long_rows_read_the_chosen_keys`` has fewer, and no second layer.
    """
    pair = Pair(sparse(name, index_topk=keys))
    batch = shared_batch(rows=4, length=14, shared=6, padding="right" if keys == 14 else "left")
    checked = pair.check(batch)
    assert_packed(checked, distinct_tokens(batch), len(pair.model.model.layers))
    assert checked.stats["expansions"] == []
    graph = find(pair.model.parameters())[0].graph.rewrites[0].traced
    assert flop_share(graph).of_all == 1.0


# Attention that reads the chosen keys alone ---------------------------------------------------------------------------


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of keys are read also where rows are as short as here and a mask takes less time."""
    monkeypatch.setattr(sparse_pass, "pays_off", lambda *given: True)


def written(pair: Pair) -> tuple[int, int]:
    """How many attentions of the last graph read lists, and how many read all keys."""
    nodes = find(pair.model.parameters())[0].graph.rewrites[-1].gm.graph.nodes
    names = [str(node.target) for node in nodes]
    return names.count("treefx.sparse_tree_attention.default"), names.count("treefx.tree_attention.default")


@pytest.mark.parametrize(
    ("name", "latent", "keys"),
    [("deepseek_v32", True, 14), ("glm_moe_dsa", True, 4), ("hy_v4", True, 64), ("hy_v4", False, 4)],
)
def test_indexers_read_the_chosen_keys(
    name: str, latent: bool, keys: int, lists: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer keys than the row has, as many, and more: then some of the chosen ones lie in the future.

    Keys and values are those of the latent vector, for all heads, or of each head.
    """
    if not latent:
        monkeypatch.setattr(sparse_pass, "find_latents", lambda law: None)
    pair = Pair(sparse(name, index_topk=keys, qk_nope_head_dim=12, v_head_dim=6))
    layers = len(pair.model.model.layers)
    batch = shared_batch(rows=4, length=14, shared=6, padding="left" if keys == 14 else "right")
    checked = pair.check(batch)
    assert_packed(checked, distinct_tokens(batch), layers)
    assert written(pair) == (layers, 0)
    assert heads_of_keys(pair) == {1 if latent else 2}


def heads_of_keys(pair: Pair) -> set[int]:
    nodes = find(pair.model.parameters())[0].graph.rewrites[-1].gm.graph.nodes
    return {node.args[1].meta["val"].shape[0] for node in nodes if "sparse_tree_attention" in str(node.target)}


@pytest.mark.parametrize("latent", [True, False])
def test_bfloat16(latent: bool, lists: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are as close to float64 as those of separate rows, although the latent form rounds other products.

    All keys are chosen: which of them are would depend on rounding.
    """
    if not latent:
        monkeypatch.setattr(sparse_pass, "find_latents", lambda law: None)
    widths = {"hidden_size": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64}
    exact = sparse("deepseek_v32", index_topk=64, head_dim=16, **widths)
    rows, packed = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16()
    batch, compiled = shared_batch(rows=4, length=40, shared=20), compile_with(packed)
    for model, run in ((exact, exact), (rows, rows), (packed, compiled)):
        run(**batch.inputs()).loss.backward()
        assert model.lm_head.weight.grad is not None
    right, far, near = (
        torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
        for model in (exact, rows, packed)
    )
    assert treefx.inspect(compiled).stats["fallback"] is None
    assert (near - right).norm() <= 1.5 * (far - right).norm()


def _without_offset(packer: Any, part: Any, heads: int) -> Tensor:
    """Take the first features of a head's matrix for any others: those of keys for those of values."""
    whole = packer.full(part.weight)
    return whole.reshape(whole.shape[0], heads, part.stride)[..., : part.width].transpose(0, 1)


def test_wrong_matrices_are_found(lists: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_sparse, "_matrices", _without_offset)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(sparse("deepseek_v32", index_topk=4), shared_batch(rows=4, length=14, shared=6), tolerance=1e-3)


@pytest.mark.parametrize(("keys", "expected"), [(4, (1, 0)), (5, (0, 1))])
def test_long_rows_read_the_chosen_keys(keys: int, expected: tuple[int, int]) -> None:
    """By the count of work: a pair costs 12, and 4 * 12 are fewer than 48.5."""
    pair = Pair(sparse("deepseek_v32", index_topk=keys))
    batch = shared_batch(rows=3, length=96, shared=70)
    assert_packed(pair.check(batch), distinct_tokens(batch), 1)
    assert written(pair) == expected


def test_work_and_report_are_those_of_the_chosen_keys(lists: None) -> None:
    """N * K pairs per head, where the mask has N * T."""
    pair = Pair(sparse("deepseek_v32", index_topk=4))
    batch = shared_batch(rows=4, length=14, shared=6, padding=None)
    pair.check(batch)
    nodes = find(pair.model.parameters())[0].graph.rewrites[-1].gm.graph.nodes
    (node,) = (node for node in nodes if "sparse_tree_attention" in str(node.target))
    tokens, symbol = distinct_tokens(batch), node.args[0].meta["val"].shape[1].node.expr
    for length in (14, 28):
        found = node_flops(node, Sizes({symbol: tokens}), length) / tokens
        assert found == 2 * 2 * 4 * (16 + 8), "two heads of 16 and 8 features, four keys, however long the rows"
    report = treefx.inspect(pair.compiled)
    (account,) = report.attention
    assert "among the 4 keys that q has chosen" in account.visible and "chosen keys" in account.kernel
    first = 1 + 2 + 3
    assert account.pairs == 4 * tokens - (3 * 4 - first), "the first three of one tree have fewer ancestors"
    (text,) = report.kernels.values()
    assert "device_code.py" in text


class Indexed(nn.Module):
    """Attention to the keys of largest index scores, spelled as the indexers of transformers are."""

    keys, heads = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.query, self.weights = nn.Linear(8, 16), nn.Linear(8, self.heads)
        self.register_buffer("scale", torch.tensor(0.5))
        self.topk = lambda scores, k: scores.topk(k, dim=-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        x, y = q[:, 0], k[:, 0]  # [B, T, 8]
        rows, columns = x.shape[:2]
        seen = torch.ones(columns, columns, dtype=torch.bool, device=x.device).tril().expand(rows, -1, -1)
        if mask is not None:
            seen = seen & mask[:, None, :].to(torch.bool)
        scores = torch.matmul(self.query(x).unflatten(-1, (2, 8)), y.transpose(-1, -2).unsqueeze(1)).relu()
        index = self.scale * torch.matmul(self.weights(x).unsqueeze(-2), scores).squeeze(-2)
        return self.attend(q, k, v, seen, self.topk(self.masked(index, seen), min(self.keys, columns)))

    def masked(self, index: Tensor, seen: Tensor) -> Tensor:
        return index.masked_fill(~seen, -torch.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        hidden = chosen.indices.new_ones(seen.shape, dtype=torch.bool).scatter(-1, chosen.indices, False)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=(seen & ~hidden).unsqueeze(1))


class Biased(Indexed):
    """The chosen scores are added to the attention's: the indexer learns by them."""

    def masked(self, index: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, index, torch.finfo(index.dtype).min)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        zeros = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        values = chosen.values.clamp(-20, 20)
        bias = zeros.scatter(-1, chosen.indices, values)
        hidden = chosen.indices.new_ones(seen.shape, dtype=torch.bool).scatter(-1, chosen.indices, False)
        bias = bias.masked_fill(~seen | hidden, -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(1))


class Additive(Indexed):
    """The mask is added to the index scores, as eager attention has it."""

    def masked(self, index: Tensor, seen: Tensor) -> Tensor:
        return index + torch.zeros_like(index).masked_fill(~seen, torch.finfo(index.dtype).min)


def model_of(attention: Callable[[], nn.Module] = Indexed, layers: int = 1) -> TinyLM:
    torch.manual_seed(3)
    return TinyLM(attention, layers=layers).double()


class Windowed(Indexed):
    """Of the chosen keys, those of the last seven tokens, and none of an id that is a multiple of five."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        place = torch.arange(seen.shape[-1], device=q.device)
        return super().attend(q, k, v, seen & (place[:, None] - place < 7), chosen)


@pytest.mark.parametrize(
    ("attention", "inner", "lengths"),
    [(Indexed, "aot_eager", (17, 17, 11)), (Additive, "eager", (17, 17)), (Windowed, "eager", (17, 17))],
)
def test_choices_by_lists(
    attention: Callable[[], nn.Module], inner: str, lengths: tuple[int, ...], lists: None
) -> None:
    """Ties, other conditions besides the choice, several batches, and lengths that change."""
    pair = Pair(model_of(attention), inner=inner)
    for seed, length in enumerate(lengths):
        batch = shared_batch(rows=4, length=length, shared=8, vocab=VOCAB, padding="right", seed=seed)
        assert_packed(pair.check(batch), distinct_tokens(batch), 1)
        assert written(pair) == (1, 0)


def test_scores_that_are_added_stay_under_a_mask(lists: None) -> None:
    pair = Pair(model_of(Biased))
    batch = shared_batch(rows=4, length=17, shared=8, vocab=VOCAB, padding=None)
    assert_packed(pair.check(batch), distinct_tokens(batch), 1)
    assert written(pair) == (0, 1)


def _all_chosen(packer: Any, attention: Any) -> Tensor:
    """Keep keys of the future: those of other rows, too."""
    columns = packer.packed(attention.columns)[0].to(torch.int64)
    return packer.metadata.token_of[packer.metadata.row[:, None], columns].to(torch.int32)


def _columns_as_tokens(packer: Any, attention: Any) -> Tensor:
    """Take a column of the row for a token of the packed row."""
    keys = packer.packed(attention.columns)[0].to(torch.int32)
    own = torch.arange(packer.metadata.tokens, device=keys.device)[:, None]
    return torch.where(keys <= own, keys, -1)


@pytest.mark.parametrize("mistake", [_all_chosen, _columns_as_tokens])
def test_a_wrong_list_is_found(mistake: Any, lists: None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = shared_batch(rows=4, length=17, shared=8, vocab=VOCAB, padding=None)
    monkeypatch.setattr(emit_sparse, "listed_keys", mistake)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(model_of(), batch, tolerance=1e-3)


@pytest.mark.parametrize(
    ("attention", "inner", "layers"), [(Indexed, "eager", 2), (Biased, "aot_eager", 1), (Additive, "eager", 1)]
)
def test_choices(attention: Callable[[], nn.Module], inner: str, layers: int) -> None:
    """Relu leaves many scores at zero: which of equal keys are chosen is what eager mode chooses."""
    pair = Pair(model_of(attention, layers), inner=inner)
    for seed in range(3):
        batch = shared_batch(rows=4, length=17, shared=8, vocab=VOCAB, padding="right", seed=seed)
        assert_packed(pair.check(batch), distinct_tokens(batch), layers)


def test_shapes_and_steps() -> None:
    """No gradients first, then rows of several lengths, padded on both sides and not at all, and optimizer steps."""
    pair = Pair(model_of())
    unshared = shared_batch(rows=3, length=9, shared=0, vocab=VOCAB, padding=None)
    with torch.no_grad():
        expected, got = (model(input_ids=unshared.input_ids).logits for model in (pair.eager, pair.compiled))
        assert torch.allclose(got, expected, rtol=0, atol=1e-10)
    sides: list[Side] = ["right", "left"]
    for length, side in zip((14, 11), sides, strict=True):
        batch = shared_batch(rows=4, length=length, shared=6, vocab=VOCAB, padding=side)
        assert_packed(pair.check(batch), distinct_tokens(batch), 1)
        for model in (pair.eager, pair.model):
            torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_equal_scores_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batches above keys of equal scores stand on both sides of the choice."""
    ties = []

    def masked(index: Tensor, seen: Tensor) -> Tensor:
        scores = index.masked_fill(~seen, -torch.inf)
        largest = scores.topk(4, dim=-1).values
        ties.append(((largest[..., 2] == largest[..., 3]) & seen[..., 3:].any(-1)).sum())
        return scores

    model = model_of()
    monkeypatch.setattr(model.blocks[0].attention, "masked", masked)
    model(input_ids=shared_batch(rows=4, length=17, shared=8, vocab=VOCAB, padding=None).input_ids)
    assert int(ties[0]) > 4


def test_a_choice_among_the_packed_tokens_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plausible mistake: the keys of a query are the first tokens of the packed row, not those of its row."""
    batch = shared_batch(rows=4, length=17, shared=8, vocab=VOCAB, padding=None)
    monkeypatch.setattr(emit_choices, "own_keys", lambda metadata: torch.arange(17).expand(metadata.tokens, -1))
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(model_of(), batch, tolerance=1e-3)


class Late(Indexed):
    """Later keys take part in the choice, and only the attention hides them."""

    def masked(self, index: Tensor, seen: Tensor) -> Tensor:
        return index


class Weak(Indexed):
    """A fill that large scores reach: later keys are ordered by their scores."""

    def masked(self, index: Tensor, seen: Tensor) -> Tensor:
        return index + (~seen).to(index.dtype) * -1e9


class Open(Indexed):
    """The choice alone hides later keys: a query with fewer keys than are chosen sees some."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        hidden = chosen.indices.new_ones(seen.shape, dtype=torch.bool).scatter(-1, chosen.indices, False)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden.unsqueeze(1))


@pytest.mark.parametrize(
    ("attention", "reason"),
    [(Late, "not proved to be of the past"), (Weak, "not all the same number"), (Open, "not proved causal")],
)
def test_what_is_not_proved_runs_on_rows(attention: Callable[[], nn.Module], reason: str) -> None:
    batch = shared_batch(rows=3, length=10, shared=4, vocab=VOCAB, padding=None)
    stats = compare(model_of(attention), batch).stats
    assert reason in str(stats["expansions"])


class Padded(Indexed):
    """Padding takes part in the choice, and only the attention hides it."""

    def masked(self, index: Tensor, seen: Tensor) -> Tensor:
        future = torch.ones(index.shape[-2:], dtype=torch.bool, device=index.device).triu(1)
        return index.masked_fill(future, -torch.inf)


def test_padding_that_is_chosen_from_stays() -> None:
    batch = left_padded()
    batch = replace(batch, input_ids=batch.input_ids % VOCAB, labels=None)
    pair = Pair(model_of(Padded))

    def step(model: nn.Module) -> Tensor:
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        assert batch.attention_mask is not None
        return (logits.square().mean(-1) * batch.attention_mask).sum()

    checked = pair.check(step)
    assert checked.stats["fallback"] is not None or checked.stats["tokens"] > distinct_tokens(batch)


@pytest.mark.parametrize("listed", [False, True])
def test_holes_in_the_mask(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of the same ids of which one does not see its third token choose among different keys."""
    if listed:
        monkeypatch.setattr(sparse_pass, "pays_off", lambda *given: True)
    batch = shared_batch(rows=3, length=12, shared=6, vocab=VOCAB, padding=None)
    mask = torch.ones_like(batch.input_ids)
    mask[1, 2] = 0
    compare(model_of(), replace(batch, attention_mask=mask))


def test_forests_are_refused(lists: None) -> None:
    batch = shared_batch(rows=3, length=10, shared=4, vocab=VOCAB, padding=None)
    forest = treefx.Forest.from_padded(batch.input_ids, torch.ones_like(batch.input_ids))
    compiled = compile_with(model_of())
    with refused("under treefx.use(forest)"), treefx.use(forest):
        compiled(**forest.model_inputs())


def test_experts_in_float32(lists: None) -> None:
    model = sparse("deepseek_v32", index_topk=4, mlp_layer_types=["sparse"]).float()
    batch = shared_batch(rows=4, length=14, shared=6)
    assert_packed(compare(model, batch, FLOAT32), distinct_tokens(batch), 1)


# Chosen blocks of keys: only a run can tell whether a query sees a key ------------------------------------------------

OF_BLOCKS = {
    "vocab_size": 128, "hidden_size": 16, "dense_intermediate_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 1,
    "layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["dense"], "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


LEFT = shared_batch(rows=4, length=14, shared=6, padding="left")


def minimax(**changes: Any) -> nn.Module:
    """A tiny MiniMax-M3 in float64, whose layer chooses blocks of three keys."""
    if "minimax_m3_vl_text" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no MiniMax-M3")
    config = AutoConfig.for_model("minimax_m3_vl_text", **{**OF_BLOCKS, **changes})
    original: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return double_from(getattr(lifted(original.__module__), original.__name__), config)


@pytest.mark.parametrize(("blocks", "inner"), [(3, "aot_eager"), (16, "eager")])
def test_blocks_of_keys(blocks: int, inner: str) -> None:
    """Fewer blocks than a row has, and more. ``test_inductor`` compiles a smaller model of the same parts."""
    pair = Pair(minimax(index_topk_blocks=blocks), inner=inner)
    batch = shared_batch(rows=4, length=14, shared=6, padding="right")
    assert_packed(pair.check(batch), distinct_tokens(batch), 1)


def test_queries_that_see_no_key_run_on_rows() -> None:
    """Its blocks count columns, so a row padded on the left may choose padding alone; eager then takes a mean.

    A query need not be in the one block that it has chosen.
    """
    pair = Pair(minimax(index_topk_blocks=1, index_local_blocks=0))
    checked = pair.check(LEFT)
    assert checked.stats["ran"] == "ordinary" and checked.stats["fallback"] == SIGHT
    assert checked.stats["fallback_code"] == "TFX014"
    batch = shared_batch(rows=4, length=14, shared=6, padding="right")
    assert_packed(pair.check(batch), distinct_tokens(batch), 1)


def test_a_mean_over_no_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_attention, "asks_for_sight", lambda attention: False)
    pair = Pair(minimax(index_topk_blocks=1, index_local_blocks=0))
    with pytest.raises(AssertionError):
        pair.check(LEFT)


class Gated(nn.Module):
    """Keys are seen where a learned gate exceeds a level, by a softmax that takes the mean of a row without any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        columns = q.shape[2]
        seen = torch.ones(columns, columns, dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            seen = seen & mask[:, None, None, :].to(torch.bool)
        seen = seen & (self.gate(k[:, :1]).squeeze(-1).unsqueeze(-2) > self.level)
        scores = torch.where(seen, q @ k.transpose(-1, -2), torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v


def test_learned_gates_of_keys() -> None:
    """Every key is seen, or none: each shape through one compilation."""
    pair = Pair(model_of(Gated), min_sharing=1.0)
    for rows, length, shared in ((4, 11, 5), (1, 7, 3), (3, 2, 1), (2, 9, 9)):
        for level, ran, fallback in ((-50.0, "packed", None), (50.0, "ordinary", SIGHT)):
            for model in (pair.eager, pair.model):
                model.get_buffer("blocks.0.attention.level").fill_(level)
            checked = pair.check(shared_batch(rows=rows, length=length, shared=shared, vocab=VOCAB, padding="right"))
            assert (checked.stats["ran"], checked.stats["fallback"]) == (ran, fallback)


class GatedChoice(Indexed):
    """Of the chosen keys, those that a learned gate lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, chosen: Any) -> Tensor:
        hidden = chosen.indices.new_ones(seen.shape, dtype=torch.bool).scatter(-1, chosen.indices, False)
        seen = seen & ~hidden & (self.gate(k[:, 0]).squeeze(-1).unsqueeze(-2) > -50.0)
        scores = torch.where(seen.unsqueeze(1), q @ k.transpose(-1, -2), torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v


def test_inductor() -> None:
    """A choice of keys where only a run shows whether a query sees one."""
    torch.manual_seed(3)
    batch = shared_batch(rows=4, length=14, shared=6, vocab=VOCAB, padding="right")
    checked = compare(Small(GatedChoice).double(), batch, inner="inductor")
    assert_packed(checked, distinct_tokens(batch), 1)


@pytest.mark.parametrize(("listed", "side"), [(False, "left"), (True, "right")])
def test_indexers_under_masks_that_are_added(listed: bool, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention, where a query need not choose itself; rows filled up as on a GPU: filler sees no key."""
    monkeypatch.setattr(sparse_pass, "pays_off", lambda *given: listed)
    monkeypatch.setitem(token_count._MULTIPLES, "cpu", 64)
    model = sparse("deepseek_v32", index_topk=4)
    model.set_attn_implementation("eager")
    pair, batch = Pair(model), shared_batch(rows=4, length=13, shared=6, padding=side)
    assert_packed(pair.check(batch), distinct_tokens(batch), 1)
    assert written(pair) == ((1, 0) if listed else (0, 1))
