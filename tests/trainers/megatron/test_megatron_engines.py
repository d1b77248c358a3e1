"""What Megatron's GPTModel does not run on a tree, attention of Transformer Engine, and verl's engine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.oracle import FLOAT64
from tests.trainers.megatron import engine
from treefx.errors import UnsupportedError
from treefx.integrations import verl
from treefx.integrations.megatron import convert, unconvert

pytest.importorskip("megatron.core", reason="needs megatron-core")

ROWS = engine.rows_of(4, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with engine.one_rank():
        yield


def stats(model: Any) -> dict[str, Any]:
    return dict(treefx.inspect(model).stats)


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mtp_num_layers", 1, "multi-token prediction"),
        ("moe_expert_capacity_factor", 1.0, "use None"),
        ("moe_input_jitter_eps", 0.1, "noise"),
        ("cuda_graph_impl", "local", "'none'"),
        ("fp8", "hybrid", "bf16"),
        ("attention_dropout", 0.1, "use 0"),
        ("hidden_dropout", 0.1, "use 0"),
        ("context_parallel_size", 2, "slices of rows"),
        ("pipeline_model_parallel_size", 2, "variable_seq_lengths"),
        ("qk_clip", True, "largest logit"),
    ],
)
def test_refused_by_name(name: str, value: Any, words: str) -> None:
    model = engine.model()
    setattr(model.config, name, value)
    with pytest.raises(UnsupportedError, match=f"(?s){name}.*{words}|{words}"):
        convert(model)


def test_unknown_modules_are_refused_or_vouched_for() -> None:
    class Adapter(nn.Module):
        def forward(self, *args: Any) -> Any:
            return args[0]

    model = engine.model()
    model.decoder.layers[0].mlp.adapter = Adapter()
    with pytest.raises(UnsupportedError, match="mlp.adapter is a Adapter"):
        convert(model)
    convert(model, tokenwise=["Adapter"])
    model.decoder.layers[0].mlp.noise = nn.Dropout(0.1)
    with pytest.raises(UnsupportedError, match="mlp.noise is dropout"):
        convert(model, tokenwise=["Adapter"])
    model.decoder.layers[0].mlp.noise.p = 0.0
    model.decoder.layers[0].self_attention.core_attention = Adapter()
    with pytest.raises(UnsupportedError, match="core_attention is a Adapter"):
        convert(model, tokenwise=["Adapter"])


def test_biases_of_attention_are_refused() -> None:
    model = convert(engine.model())
    core = model.decoder.layers[0].self_attention.core_attention
    heads = [torch.zeros(2, 1, count, 4, dtype=torch.float64) for count in (4, 2, 2)]
    with pytest.raises(UnsupportedError, match="attention_bias"):
        core(*heads, torch.tensor([2, 2], dtype=torch.int32), attention_bias=torch.zeros(1, 4, 2, 2))


def test_recomputed_experts_that_count_are_refused() -> None:
    counted: dict[str, Any] = engine.KINDS["losses of experts"]
    with pytest.raises(UnsupportedError, match="recompute_granularity='full'"):
        convert(engine.model(**counted, recompute_granularity="selective", recompute_modules=["moe"]))


def test_a_stage_without_ids_is_refused() -> None:
    model = engine.model()
    model.config.pipeline_model_parallel_size, model.config.variable_seq_lengths = 2, True
    with pytest.raises(UnsupportedError, match="every pipeline stage"):
        convert(model)(None, None, None)


# Transformer Engine ---------------------------------------------------------------------------------------------------


def _read_as_te(model: Any) -> None:
    """A core under Transformer Engine's name that reads packed rows, as far as Megatron's call sites show it."""
    core = model.decoder.layers[0].self_attention.core_attention
    own = type(core)

    class TEDotProductAttention(own):  # type: ignore[misc,valid-type]
        window_size = (-1, 0)

        def forward(self, *heads: Any, packed_seq_params: Any = None, **others: Any) -> Tensor:
            if packed_seq_params is None:
                found: Tensor = own.forward(self, *heads[:3], None)
                return found
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            rows = zip(*(x.unsqueeze(1).split(lengths) for x in heads[:3]), strict=True)
            return torch.cat([own.forward(self, *row, None)[:, 0] for row in rows])

    class FlashAttention(nn.Module):
        """One of its backends, which no list of treefx names."""

    core.__class__ = TEDotProductAttention
    core.flash_attention = FlashAttention()


def test_cores_of_transformer_engine() -> None:
    model = engine.model()
    want = engine.separately(model, ROWS)
    _read_as_te(model)
    assert engine.differ(engine.packed(model, ROWS), want) < FLOAT64
    convert(model)
    assert engine.differ(engine.packed(model, ROWS), want) < FLOAT64 and stats(model)["ran"] == "packed"
    apart = [row.roll(i) for i, row in enumerate(engine.rows_of(4))]
    want = engine.separately(unconvert(model), apart)
    assert engine.differ(engine.packed(convert(model), apart), want) < FLOAT64 and stats(model)["ran"] == "ordinary"
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in ROWS], True) > 0
    want = engine.separately(model, ROWS)
    for form in (mask, ~mask[:, None, None]):
        got = engine.padded(model, ROWS, lambda ids, positions, _: model(ids, positions, form))
        assert engine.differ(got, want) < FLOAT64 and stats(model)["raw_tokens"] == sum(map(len, ROWS))
    with pytest.warns(UserWarning, match="attention_mask"):  # no padding at the ends of rows
        engine.padded(model, ROWS, lambda ids, positions, _: model(ids, positions, ~mask))
    assert stats(model)["ran"] == "ordinary"


# verl -----------------------------------------------------------------------------------------------------------------


class MegatronEngine:
    """The parts of verl's engine that see the model: chunks, built once, and packed rows."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def _build_megatron_module(self) -> list[Any]:
        return [engine.Wrapper(engine.model(**self.options))]

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        self.module = self.__dict__.get("module") or self._build_megatron_module()
        self.outcome = engine.packed(self.module[0], data)
        return {"metrics": {}}


def test_engines_of_verl_convert_what_they_build(caplog: pytest.LogCaptureFixture) -> None:
    engines = type("Engines", (MegatronEngine,), {})
    verl.convert_megatron_engines(engines)
    made = engines()
    metrics = made.forward_backward_batch(ROWS, None)["metrics"]
    assert metrics["treefx/sharing"][0] > 1.5
    assert engine.differ(made.outcome, engine.separately(engine.Wrapper(engine.model()), ROWS)) < FLOAT64
    refused = engines(hidden_dropout=0.1)
    assert "treefx_hooks" not in refused._build_megatron_module()[0].module.__dict__
    assert "hidden_dropout=0.1" in caplog.text


def test_every_stage_of_verl_gets_the_packed_ids() -> None:
    def preprocess_packed_seqs(ids: Any, mask: Any, pre_process: bool = True, need_roll: bool = False) -> Any:
        return pre_process, need_roll

    util = SimpleNamespace(preprocess_packed_seqs=preprocess_packed_seqs)
    verl.pack_ids_on_all_stages(util)
    verl.pack_ids_on_all_stages(util)
    assert util.preprocess_packed_seqs(1, 2, pre_process=False, need_roll=True) == (True, True)
    assert util.preprocess_packed_seqs(1, 2, False) == (True, False)
