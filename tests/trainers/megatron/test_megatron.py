"""Megatron's GPTModel on distinct tokens, on one CPU: exact against separate rows, and what it refuses."""

import copy
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.oracle import FLOAT32, FLOAT64
from tests.trainers.megatron import engine
from treefx.errors import ConfigError, UnsupportedError
from treefx.integrations.megatron import conversion, convert, unconvert

pytest.importorskip("megatron.core", reason="needs megatron-core")

ROWS = engine.rows_of(4, 2, 3)
COUNTED = ("losses of experts", "recomputed")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with engine.one_rank():
        yield


def stats(model: Any) -> dict[str, Any]:
    return dict(treefx.inspect(model).stats)


# Exact ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 4], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", [kind for kind in engine.KINDS if kind not in COUNTED])
def test_packed_rows_are_as_separate_rows(kind: str, multiple: int) -> None:
    model = engine.model(**engine.KINDS[kind])
    want = engine.separately(model, ROWS)
    got = engine.packed(convert(model), ROWS, multiple)
    assert engine.differ(got, want) < FLOAT64
    found = stats(model)
    assert found["ran"] == "packed" and found["tokens"] < found["raw_tokens"] == sum(map(len, ROWS))


@pytest.mark.parametrize("kind", list(engine.KINDS))
def test_a_batch_is_as_it_was(kind: str) -> None:
    """Padding included, which routers count."""
    model = engine.model(**engine.KINDS[kind])
    want = engine.padded(model, ROWS)
    got = engine.padded(convert(model), ROWS)
    assert engine.differ(got, want) < FLOAT64 and stats(model)["ran"] == "packed"


def test_empty_sequences_and_padding_behind_the_last_one() -> None:
    model = engine.model()
    want = engine.separately(model, ROWS)
    convert(model)
    ids, params, begins = engine.sequences(ROWS, 4)
    for name in ("cu_seqlens_q", "cu_seqlens_q_padded"):  # batches may end with empty sequences
        offsets = getattr(params, name)
        setattr(params, name, torch.cat([offsets, offsets[-1:], offsets[-1:]]))
    logits = model(nn.functional.pad(ids, (0, 5), value=3), None, None, packed_seq_params=params)[0]
    loss = torch.stack([engine.nll(logits[at:], row) for at, row in zip(begins, ROWS, strict=False)]).sum()
    assert engine.differ(engine.gradients(model, loss), want) < FLOAT64 and not logits[-5:].any()


def test_unused_coefficients_of_losses_do_not_keep_rows() -> None:
    """As engines import them from a configuration whose losses they turn off."""
    model = convert(engine.model(**{**engine.EXPERTS, "moe_aux_loss_coeff": 0.001}))
    engine.packed(model, ROWS, 4)
    assert stats(model)["ran"] == "packed"


def test_routers_leave_out_the_padding_that_the_caller_names() -> None:
    model = engine.model(**engine.KINDS["losses of experts"])
    hidden = torch.nn.utils.rnn.pad_sequence([torch.zeros(len(row)) for row in ROWS], True, 1.0) > 0

    def call(ids: Tensor, positions: Tensor, mask: Any) -> Any:
        return model(ids, positions, mask, padding_mask=hidden)

    want = engine.padded(model, ROWS, call)
    convert(model)
    assert engine.differ(engine.padded(model, ROWS, call), want) < FLOAT64 and stats(model)["ran"] == "packed"


def test_expert_biases_count_every_row() -> None:
    options = {**engine.EXPERTS, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model = engine.model(**options)
    router = model.decoder.layers[0].mlp.router
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles the sum
        want = engine.padded(model, ROWS)
        counts = router.local_tokens_per_expert.clone()
        router.local_tokens_per_expert.zero_()
        assert engine.differ(engine.padded(convert(model), ROWS), want) < FLOAT32  # sigmoid scores are float32
    assert torch.equal(router.local_tokens_per_expert, counts) and int(counts.sum()) > stats(model)["tokens"] * 2


@pytest.mark.parametrize(("kind", "before"), [("dense", torch.no_grad), ("experts", torch.inference_mode)])
def test_steps_of_other_shapes_follow_each_other(kind: str, before: Any) -> None:
    shapes = [engine.rows_of(4, 2), engine.rows_of(1, 1, 5, 2, seed=3), engine.rows_of(3, seed=4)]
    model, twin = (engine.model(**engine.KINDS[kind]) for _ in range(2))
    convert(model)
    with before():  # old log-probabilities of the batch of a later step
        ids, params, _ = engine.sequences(shapes[2])
        first = model(ids, None, None, packed_seq_params=params)[0, : len(shapes[2][0])]
        plain = twin(shapes[2][0][None], torch.arange(len(shapes[2][0]))[None], None)[0]
    assert torch.allclose(first, plain, rtol=1e-12, atol=1e-12)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin)]
    for rows in shapes:
        got, want = engine.packed(model, rows), engine.separately(twin, rows)
        assert engine.differ(got, want) < 1e-8 if rows is not shapes[0] else engine.differ(got, want) < FLOAT64
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("multiple", [1, 4])
def test_losses_of_labels_run_once_per_pair(multiple: int) -> None:
    model = engine.model()
    ids, params, begins = engine.sequences(ROWS, multiple)
    labels = ids.roll(-1, 1)
    weights = torch.rand(ids.shape, dtype=torch.float64)
    spans = [slice(at, at + len(row)) for at, row in zip(begins, ROWS, strict=False)]

    def rows() -> Tensor:
        losses = [
            (model(row[None], torch.arange(len(row))[None], None, labels=labels[:, at])[0] * weights[0, at]).sum()
            for at, row in zip(spans, ROWS, strict=True)
        ]
        return torch.stack(losses).sum()

    want = engine.gradients(model, rows())
    head: list[int] = []
    model.output_layer.register_forward_pre_hook(lambda module, args: head.append(len(args[0])))
    convert(model)
    losses = model(ids, None, None, labels=labels, packed_seq_params=params)
    assert losses.shape == ids.shape
    got = engine.gradients(model, torch.stack([(losses * weights)[0, at].sum() for at in spans]).sum())
    assert engine.differ(got, want) < FLOAT64
    assert head[0] < sum(map(len, ROWS))


def test_the_head_can_run_once_per_token() -> None:
    model = engine.model()
    want = engine.separately(model, ROWS)
    seen: list[int] = []
    model.output_layer.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    assert engine.differ(engine.packed(convert(model, pack_lm_head=True), ROWS), want) < FLOAT64
    assert engine.differ(engine.packed(convert(model), ROWS), want) < FLOAT64
    assert seen == [stats(model)["tokens"], sum(map(len, ROWS))]


def test_another_forward_gets_rows() -> None:
    """Engines put a fused loss in place of the head and the loss: it reads hidden states and labels of rows."""
    model = engine.model()
    want = engine.separately(model, ROWS)
    own = type(model).forward
    lengths: list[int] = []

    def forward(self: Any, *args: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        logits: Tensor = own(self, *args, **kwargs)
        lengths.append(labels.shape[1])
        return nn.functional.cross_entropy(logits[0], labels[0], reduction="none")

    model.forward = MethodType(forward, model)
    convert(model, pack_lm_head=True)
    ids, params, begins = engine.sequences(ROWS)
    losses = model(ids, None, None, labels=ids.roll(-1, 1), packed_seq_params=params)
    parts = [losses[at : at + len(row) - 1].sum() for at, row in zip(begins, ROWS, strict=False)]
    assert engine.differ(engine.gradients(model, torch.stack(parts).sum()), want) < FLOAT64
    assert lengths == [ids.shape[1]]


def test_main_gradients_of_the_distributed_optimizer() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    found = []
    for number in range(2):
        model = engine.model()
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=False)
        wrapped = DistributedDataParallel(model.config, config, model)
        wrapped.zero_grad_buffer()
        step = engine.packed if number else engine.separately
        step(convert(wrapped) if number else wrapped, ROWS)
        found.append({name: x.main_grad.clone() for name, x in model.named_parameters()})
    worst = max(float((found[1][name] - x).abs().max() / x.abs().max()) for name, x in found[0].items())
    assert worst < FLOAT64 and all(x.abs().sum() > 0 for x in found[0].values())


def test_an_output_processor_gets_what_the_caller_gave() -> None:
    model = engine.model()
    if "output_processor" not in inspect.signature(model.forward).parameters:
        pytest.skip("needs megatron-core 0.19")
    want = engine.separately(model, ROWS)
    ids, params, begins = engine.sequences(ROWS)

    def process(
        hidden_states: Tensor, output_layer: Any, input_ids: Tensor, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        assert torch.equal(input_ids, ids) and packed_seq_params is params
        logits: Tensor = output_layer(hidden_states)[0]
        return logits.transpose(0, 1)

    convert(model, pack_lm_head=True)
    logits = model(ids, None, None, packed_seq_params=params, output_processor=process)[0]
    loss = torch.stack([engine.nll(logits[at:], row) for at, row in zip(begins, ROWS, strict=False)]).sum()
    assert engine.differ(engine.gradients(model, loss), want) < FLOAT64


# Wrong on purpose -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["packed positions", "plain causal mask", "first rows alone"])
def test_a_plausible_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = conversion._Conversion._tree

    def wrong(self: Any, *args: Any) -> Any:
        tree = right(self, *args)
        count = len(tree.depth)
        if mistake == "packed positions":
            return type(tree)(tree.subtree_end, torch.arange(count), tree.token_TB, tree.first_N)
        if mistake == "plain causal mask":
            return type(tree)(torch.full_like(tree.subtree_end, count), tree.depth, tree.token_TB, tree.first_N)
        return tree

    monkeypatch.setattr(conversion._Conversion, "_tree", wrong)
    if mistake == "first rows alone":  # the gradient of a shared token reaches it from one row
        monkeypatch.setattr(conversion, "expand_hidden", _first_alone)
    model = engine.model()
    want = engine.separately(model, ROWS)
    assert engine.differ(engine.packed(convert(model), ROWS), want) > 1e-3


def _first_alone(hidden: Tensor, index: Tensor, is_split: bool) -> Tensor:
    rows = hidden[:, 0][index]
    first = torch.zeros(len(hidden), dtype=torch.int64).scatter_reduce(
        0, index.flatten(), torch.arange(index.numel()), "amin", include_self=False
    )
    is_first = (first[index.flatten()] == torch.arange(index.numel())).view(index.shape)
    return torch.where(is_first[..., None], rows, rows.detach())


def test_losses_of_distinct_tokens_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "counts_tokens", lambda router: False)
    model = engine.model(**engine.KINDS["losses of experts"])
    want = engine.padded(model, ROWS)
    assert engine.differ(engine.padded(convert(model), ROWS), want) > 1e-3


# Calls that run as they came ------------------------------------------------------------------------------------------


def test_other_calls_run_as_they_came() -> None:
    model = engine.model()
    ids = torch.nn.utils.rnn.pad_sequence(ROWS, True)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    window = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    window[..., 5, 0] = True
    want = model(ids, positions, window)
    convert(model)
    with pytest.warns(UserWarning, match="attention_mask"):
        assert torch.equal(model(ids, positions, window), want)
    assert stats(model)["ran"] == "ordinary" and "attention_mask" in stats(model)["fallback"]
    hidden = model.embedding(ids, positions)
    assert torch.allclose(model(ids, positions, None, decoder_input=hidden), model(ids, positions, None))
    window[..., 5, 0] = False
    assert torch.allclose(model(ids, positions, window), model(ids, positions, None))
    assert stats(model)["ran"] == "packed"


def test_rows_that_share_too_little_run_as_they_came() -> None:
    model = convert(engine.model())
    ids = torch.arange(12).view(2, 6)
    assert model(ids, torch.arange(6).expand(2, 6), None).shape == (2, 6, engine.VOCABULARY)
    assert stats(model)["ran"] == "ordinary" and stats(model)["fallback"] is None


def test_padding_that_routers_would_count_runs_as_it_came() -> None:
    model = convert(engine.model(**engine.KINDS["losses of experts"]))
    with pytest.warns(UserWarning, match="padding_mask"), pytest.raises(AssertionError):  # of Megatron
        engine.packed(model, ROWS, 4)


def test_a_model_gets_its_own_functions_back() -> None:
    model = engine.model(**engine.KINDS["losses of experts"])
    core, router = model.decoder.layers[0].self_attention.core_attention, model.decoder.layers[0].mlp.router
    before = [dict(module.__dict__) for module in (core, router)]
    wrapped = [engine.Wrapper(model)]
    assert unconvert(convert(convert(wrapped))) is wrapped
    assert [module.__dict__ for module in (core, router)] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ConfigError, match="GPTModel"):
        convert(nn.Linear(2, 2))
    core.forward = before  # of another tool
    unconvert(convert(model))
    assert core.forward is before
    with pytest.raises(UnsupportedError, match="unconvert"):
        copy.deepcopy(convert(model))
