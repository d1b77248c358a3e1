"""torchtitan's decoders on distinct tokens: exact against rows; what its masks must mean; its trainer's hooks."""

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import treefx
from tests.oracle import FLOAT32, FLOAT64, assert_close, compile_with, outcome, stats_of
from tests.trainers.torchtitan import titan
from treefx.data import packed_batches
from treefx.errors import ConfigError, InputError, UnsupportedError
from treefx.integrations.torchtitan.attention import read_trees
from treefx.integrations.torchtitan.conversion import convert
from treefx.integrations.torchtitan.training import compile_blocks, convert_by_name, convert_policies, convert_trainers
from treefx.runtime.converted import frame

START = [3, 4, 5, 6, 7, 8, 9]
DOCUMENTS = [[*START[:n], *(10 + (5 * n + i) % 20 for i in range(2 + n % 3))] for n in (7, 7, 6, 5, 7, 6, 3, 4)]


def batch(rows: int = 2, columns: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    made = packed_batches([(ids, ids) for ids in DOCUMENTS], rows=rows, columns=columns)
    ids, positions, labels = (torch.from_numpy(item) for item in made[0])
    return ids, positions, labels


def decoder(kind: str = "FlexAttention", **options: Any) -> tuple[Any, Any]:
    """Converted, and its twin with attentions as they were."""
    hooked = titan.module()
    read_trees(hooked)
    torch.manual_seed(0)
    model = titan.Decoder(getattr(hooked, kind)).double()
    torch.manual_seed(0)
    return convert(model, **options), titan.Decoder(getattr(titan, kind)).double()


def loss(model: Any, given: tuple[Tensor, Tensor, Tensor], *, masked: bool = True) -> Tensor:
    """As the trainer calls: masks made of the positions, the LM head outside."""
    ids, positions, labels = given
    masks = {"attention_masks": model.get_attention_masks(positions=positions)} if masked else {}
    hidden = model(ids, positions=positions, **masks)
    return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")


def check(model: Any, twin: Any, step: Callable[[Any], Tensor], limit: float = FLOAT64) -> dict[str, Any]:
    assert_close(outcome(model, lambda: step(model)), outcome(twin, lambda: step(twin)), limit)
    return dict(treefx.inspect(model).stats)


def trie(given: tuple[Tensor, Tensor, Tensor]) -> int:
    """Distinct prefixes of the documents in a batch, padding among them."""
    ids, positions, _ = given
    found: set[tuple[int, ...]] = set()
    for tokens, places in zip(ids.tolist(), positions.tolist(), strict=True):
        prefix: tuple[int, ...] = ()
        for token, place in zip(tokens, places, strict=True):
            prefix = (*prefix, token) if place else (token,)
            found.add(prefix)
    return len(found)


@pytest.mark.parametrize(("kind", "shape"), [("FlexAttention", (2, 32)), ("VarlenAttention", (3, 24))])
def test_documents_share(kind: str, shape: tuple[int, int]) -> None:
    given = batch(*shape)
    model, twin = decoder(kind)
    # In bfloat16 attention is rounded, by rows as by the tree.
    stats = check(model, twin, lambda run: loss(run, given), FLOAT64 if kind == "FlexAttention" else 0.02)
    assert stats["ran"] == "packed" and stats["fallback"] is None
    assert stats["tokens"] == trie(given) < given[0].numel() / 1.5


def test_rows_that_leak_share_as_they_are() -> None:
    """Attention without masks sees the documents before: rows share only what they begin with."""
    ids = torch.tensor([[*START, 11, 3, 4, 12], [*START, 13, 3, 4, 12]])
    positions = torch.tensor([[*range(8), 0, 1, 2]]).repeat(2, 1)
    model, twin = decoder("ScaledDotProductAttention")
    stats = check(model, twin, lambda run: loss(run, (ids, positions, ids), masked=False))
    assert stats["ran"] == "packed" and stats["tokens"] == 7 + 4 + 4


@pytest.mark.parametrize("kind", ["FlexAttention", "ScaledDotProductAttention"])
def test_rows_of_one_document_share(kind: str) -> None:
    """Their positions count columns."""
    ids = torch.tensor([[*START, 11, 3, 4, 12], [*START, 13, 3, 4, 12]])
    given = (ids, torch.arange(11).repeat(2, 1), ids)
    model, twin = decoder(kind)
    stats = check(model, twin, lambda run: loss(run, given, masked=kind == "FlexAttention"))
    assert stats["ran"] == "packed" and stats["tokens"] == 7 + 4 + 4


def test_blocks_may_be_compiled_and_checkpointed() -> None:
    model, twin = decoder()
    for run in (model, twin):
        for name, block in list(run.layers.items()):
            run.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    for shape in ((2, 32), (3, 24)):
        given = batch(*shape)
        assert check(model, twin, lambda run, given=given: loss(run, given))["ran"] == "packed"  # type: ignore[misc]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_parallelized_and_sharded_decoders_share() -> None:
    """As its trainer makes them: what proves them must not run what it has put around each module's forward."""
    hooked = titan.module()
    read_trees(hooked)
    model, twin = decoder()[1], decoder()[1]
    for block in model.layers.values():
        block.attention.inner_attention = hooked.FlexAttention()
    titan.parallelize(model, titan.parallel_dims())
    for part in ([model.norm, model.lm_head], *model.layers.values(), model):
        fully_shard(part)
    convert(model)
    given = batch()
    expected = outcome(twin, lambda: loss(twin, given))
    loss(model, given).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.gradients[name], rtol=FLOAT64, atol=FLOAT64)
    stats = treefx.inspect(model).stats
    assert (stats["ran"], stats["fallback"], stats["tokens"]) == ("packed", None, trie(given))


def test_a_decoder_that_is_parallelized_in_another_way_is_refused() -> None:
    hooked = titan.module()
    read_trees(hooked)
    model = titan.Decoder(hooked.FlexAttention)
    titan.parallelize(model, titan.parallel_dims(tp_enabled=True))
    with pytest.raises(UnsupportedError, match="data parallelism alone, got tensor parallelism"):
        convert(model)


def test_several_micro_batches_before_one_backward() -> None:
    model, twin = decoder()
    given = [batch(2, 32), batch(3, 24)]
    check(model, twin, lambda run: torch.stack([loss(run, item) for item in given]).sum())


def test_batches_of_one_row_and_of_more_alternate() -> None:
    """The first call's graph looks positions up without a dimension of rows, the next one with it."""
    model, twin = decoder()
    for rows, columns in ((1, 64), (2, 32), (1, 48), (3, 24)):
        given = batch(rows, columns)
        stats = check(model, twin, lambda run, given=given: loss(run, given))  # type: ignore[misc]
        assert stats["ran"] == "packed" and stats["tokens"] == trie(given)


def test_little_sharing_runs_on_rows() -> None:
    model, twin = decoder(min_sharing=5.0)
    stats = check(model, twin, lambda run: loss(run, batch()))
    assert (stats["ran"], stats["fallback"]) == ("ordinary", None)


# What masks must mean -----------------------------------------------------------------------------------------------


class Leaking(titan.Decoder):
    """Documents see those before."""

    def get_attention_masks(self, positions: Tensor) -> Any:
        return titan.BlockMask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (b == b))


def test_a_mask_that_hides_something_else_is_computed_as_written() -> None:
    hooked = titan.module()
    read_trees(hooked)
    model, twin = Leaking(hooked.FlexAttention).double(), Leaking(titan.FlexAttention).double()
    twin.load_state_dict(model.state_dict())
    stats = check(convert(model), twin, lambda run: loss(run, batch()))
    assert stats["ran"] == "ordinary" and "hides something else" in stats["fallback"]


def of_others(model: Any, given: Any) -> Any:
    return model(given[0], positions=given[1], attention_masks=titan.Decoder.get_attention_masks(model, given[1])).sum()


def of_other_positions(model: Any, given: Any) -> Any:
    masks = model.get_attention_masks(positions=given[1])
    return model(given[0], positions=given[1].clone(), attention_masks=masks).sum()


def inside_of_a_document(model: Any, given: Any) -> Any:
    ids, positions, labels = given
    return loss(model, (ids[:, 2:], positions[:, 2:], labels[:, 2:]))


@pytest.mark.parametrize(
    ("step", "reason"),
    [(of_others, "did not make"), (of_other_positions, "did not make"), (inside_of_a_document, "begins inside")],
)
def test_calls_that_mean_something_else_run_on_rows(step: Callable[..., Any], reason: str) -> None:
    model, twin = decoder()
    stats = check(model, twin, lambda run: step(run, batch()))
    assert stats["ran"] == "ordinary" and reason in stats["fallback"]


def test_a_window_is_computed_as_written() -> None:
    hooked = titan.module()
    read_trees(hooked)
    model = titan.Decoder(lambda: hooked.VarlenAttention((3, 0)))
    twin = titan.Decoder(lambda: titan.VarlenAttention((3, 0)))
    twin.load_state_dict(model.state_dict())
    stats = check(convert(model), twin, lambda run: loss(run, batch()), FLOAT32)
    assert stats["ran"] == "ordinary" and "window (3, 0)" in stats["fallback"]


class WithTransform(nn.Module):
    """gpt_oss: what comes out is changed by what the softmax left out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *heads: Tensor, **more: Any) -> Tensor:
        result: Tensor = self.inner(*heads, **more, out_transform=lambda out: out * 2)
        return result


def test_a_model_that_asks_more_of_an_attention_runs_on_rows() -> None:
    hooked = titan.module()
    read_trees(hooked)
    model = convert(titan.Decoder(lambda: WithTransform(hooked.FlexAttention())))
    with pytest.warns(UserWarning, match="cannot be traced as one graph"):
        loss(model, batch())
    assert treefx.inspect(model).stats["ran"] == "ordinary"


def test_what_is_no_decoder_of_torchtitan_is_refused() -> None:
    with pytest.raises(ConfigError, match="a decoder of torchtitan .*, got Linear"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="not converted yet"):
        convert(decoder()[0])


# The trainer --------------------------------------------------------------------------------------------------------


def trainers() -> Any:
    """``torchtitan.trainer``."""
    return SimpleNamespace(Trainer=type("Trainer", (titan.Trainer,), {"__init__": titan.Trainer.__init__}))


def configuration(backend: str | None, **dims: bool) -> Any:
    hooked = titan.module()
    read_trees(hooked)
    compiling = SimpleNamespace(enable=backend is not None, backend=backend or "inductor")
    return SimpleNamespace(compile=compiling, model=titan.Decoder(hooked.FlexAttention), dims=dims)


def shares(trainer: Any) -> bool:
    model = trainer.model_parts[0]
    loss(model, batch()).backward()
    trainer.metrics_processor.log(1, extra_metrics={"lr": 0.1})
    assert trainer.logged[0]["lr"] == 0.1
    return "treefx/sharing" in trainer.logged[0] and trainer.logged[0]["treefx/sharing"] > 1.5


@pytest.mark.parametrize(("backend", "expected"), [("treefx", True), ("inductor", False), (None, False)])
def test_the_backend_s_name_converts(backend: str | None, expected: bool) -> None:
    module = trainers()
    convert_by_name(module)
    convert_by_name(module)  # once
    assert shares(module.Trainer(configuration(backend))) is expected


@pytest.mark.parametrize(("by_default", "backend", "expected"), [(True, None, True), (False, "inductor", False)])
def test_policies_of_reinforcement_learning_share(by_default: bool, backend: str | None, expected: bool) -> None:
    """Batches of one row, logits in, metrics of this rank out."""
    module = SimpleNamespace(PolicyTrainer=type("PolicyTrainer", (titan.PolicyTrainer,), {}))
    for _ in range(2):
        convert_policies(module, by_default=by_default)
    policy = module.PolicyTrainer(configuration(backend))
    given = batch(1, 64)
    metrics = policy.forward_backward(given)
    twin = titan.Decoder(titan.FlexAttention)
    twin.load_state_dict(policy.model_parts[0].state_dict())
    assert metrics["loss/mean"] == pytest.approx(float(loss(twin, given).detach()), rel=1e-5)
    assert ("treefx/sharing" in metrics) is expected
    assert not expected or metrics["treefx/sharing"] == pytest.approx(64 / trie(given))


def test_a_head_whose_products_round_by_the_number_of_tokens_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head inside of the decoder: logits of the packed row differ from those of rows by rounding."""
    noted, linear = frame._noted, F.linear

    def rounded(*args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(F, "linear", lambda x, *weights: linear(x, *weights) * (1 + 1e-5 * x.shape[1]))
            return noted(*args, **kwargs)

    monkeypatch.setattr(frame, "_noted", rounded)
    hooked = titan.module()
    read_trees(hooked)
    model = titan.Decoder(hooked.FlexAttention)
    model._skip_lm_head = False
    convert(model)
    ids, positions, _ = given = batch(2, 32)
    model(ids, positions=positions, attention_masks=model.get_attention_masks(positions))
    stats = treefx.inspect(model).stats
    assert stats["ran"] == "packed" and stats["tokens"] == trie(given)


def test_policies_under_other_parallelism_are_refused_by_name() -> None:
    module = SimpleNamespace(PolicyTrainer=type("PolicyTrainer", (titan.PolicyTrainer,), {}))
    convert_policies(module, by_default=False)
    with pytest.raises(UnsupportedError, match="got tensor parallelism"):
        module.PolicyTrainer(configuration("treefx", tp_enabled=True))


def test_treefx_run_converts_whatever_compiles_the_blocks() -> None:
    module = trainers()
    convert_trainers(module, by_default=True, options={"inner": "eager", "min_sharing": 1.0})
    assert shares(module.Trainer(configuration("inductor")))


def test_other_parallelism_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    module = trainers()
    convert_trainers(module, by_default=True)
    assert not shares(module.Trainer(configuration(None, tp_enabled=True)))
    assert "got tensor parallelism" in caplog.text
    with pytest.raises(UnsupportedError, match="got context parallelism"):
        module.Trainer(configuration("treefx", cp_enabled=True))


def test_blocks_are_compiled_by_inductor() -> None:
    module = SimpleNamespace(_maybe_regional_inductor_backend=lambda model, backend: backend)
    compile_blocks(module)
    compile_blocks(module)
    chosen = [module._maybe_regional_inductor_backend(None, name) for name in ("treefx", "aot_eager")]
    assert chosen == ["inductor", "aot_eager"]


# The law of its rotary embedding ------------------------------------------------------------------------------------


class Gathering(nn.Module):
    """A model whose positions read a table, one for all rows or one for each."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.embed, self.head, self.own = nn.Embedding(titan.VOCABULARY, 4), nn.Linear(4, titan.VOCABULARY), own
        self.table = nn.Parameter(torch.randn(3, 40, 4))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        rows, columns = ids.shape
        table = self.table[:rows] if self.own else self.table[:1].expand(rows, -1, -1)
        found = torch.gather(table, 1, positions.view(rows, columns, 1).expand(rows, columns, 4))
        q = self.embed(ids) + found
        y = F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None], is_causal=True)[:, 0]
        return F.cross_entropy(self.head(y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("own", [False, True])
def test_entries_of_a_table_are_gathered_once_unless_rows_have_their_own(own: bool) -> None:
    model = Gathering(own).double()
    twin = copy.deepcopy(model)
    compiled = compile_with(model, inner="eager")
    ids = torch.tensor([[*START, 11, 12], [*START, 13, 14], [*START[:5], 15, 16, 17, 18]])
    positions = torch.arange(9).flip(0).expand(3, 9)  # not those of columns
    expected = outcome(twin, lambda: twin(ids, positions))
    assert_close(outcome(model, lambda: compiled(ids, positions)), expected, FLOAT64)
    stats = stats_of(compiled)
    gathers = [item for item in stats["expansions"] if "gather" in str(item["op"])]
    assert bool(gathers) is own or stats["fallback"]
    if not own:
        assert stats["ran"] == "packed" and not stats["expansions"]


# The loader ---------------------------------------------------------------------------------------------------------


def test_packed_batches_hold_every_document_once_those_that_share_together() -> None:
    documents = [([1, 2, 3, n], [-100, 2, 3, n]) for n in range(5, 9)] + [([9, 9, n], [9, 9, n]) for n in range(4)]
    batches = packed_batches(documents, rows=2, columns=7)
    found = []
    for ids, positions, labels in batches:
        assert ids.shape == positions.shape == labels.shape == (2, 7)
        for row in range(2):
            starts = [*(positions[row] == 0).nonzero()[0].tolist(), 7]
            pieces = [(ids[row, a:b].tolist(), labels[row, a:b].tolist()) for a, b in zip(starts, starts[1:])]
            found += [(i, wanted) for i, wanted in pieces if set(wanted) != {-100}]
    assert sorted(found) == sorted((ids[:-1], labels[1:]) for ids, labels in documents)
    assert {tuple(i) for i, _ in found[:4]} == {(1, 2, 3)}


@pytest.mark.parametrize("documents", [[], [([1], [1])], [([1, 2, 3], [1, 2])], [(list(range(9)), list(range(9)))]])
def test_documents_that_fit_no_row_are_refused(documents: Any) -> None:
    with pytest.raises(InputError, match="expected documents"):
        packed_batches(documents, rows=1, columns=7)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``ForestDataLoader``, of a base class that stands for torchtitan's."""
    config = dataclass(kw_only=True, slots=True)(type("Config", (), {}))
    base = SimpleNamespace(BaseDataLoader=type("BaseDataLoader", (), {"Config": config}))
    for name in ("torchtitan", "torchtitan.components"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchtitan.components.dataloader", base)
    monkeypatch.setitem(sys.modules, "tyro", SimpleNamespace(conf=SimpleNamespace(Suppress=None)))
    monkeypatch.delitem(sys.modules, "treefx.integrations.torchtitan.loader", raising=False)
    return import_module("treefx.integrations.torchtitan.loader").ForestDataLoader


def test_ranks_take_batches_in_turn_and_go_on_where_they_were(loader: Any) -> None:
    documents = [([n, n + 1, n + 2], [n, n + 1, n + 2]) for n in range(1, 7)]
    config = loader.Config(documents=lambda tokenizer: documents, seed=3)

    def stream(rank: int, ranks: int) -> Any:
        more = {"tokenizer": None, "seq_len": 2, "local_batch_size": 2, "snapshot_every_n_steps": None}
        return loader(config, dp_world_size=ranks, dp_rank=rank, **more)

    def take(made: Any, count: int) -> list[list[list[int]]]:
        return [item["input"].tolist() for (item, _), _ in zip(made, range(count))]

    alone, two = take(stream(0, 1), 6), [take(stream(rank, 2), 3) for rank in (0, 1)]
    assert [batch for pair in zip(*two) for batch in pair] == alone
    assert sorted(map(str, alone[:3])) == sorted(map(str, alone[3:])) and len(set(map(str, alone))) == 3
    first, again = stream(1, 2), stream(1, 2)
    items = iter(first)
    next(items)
    again.load_state_dict(first.state_dict())
    assert take(again, 2) == two[1][1:]
    with pytest.raises(InputError, match="the state of 1 data-parallel ranks, got 2"):
        stream(0, 1).load_state_dict(first.state_dict())
