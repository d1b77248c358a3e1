"""Megatron's layers of Transformer Engine on distinct tokens: only on a GPU, in bfloat16."""

from collections.abc import Iterator

import pytest
import torch

import treefx
from tests.trainers.megatron import engine
from treefx.integrations.megatron import convert

pytest.importorskip("megatron.core", reason="needs megatron-core")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")

SIZES = {"hidden_size": 256, "ffn_hidden_size": 256, "params_dtype": torch.bfloat16, "bf16": True}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    yield
    engine.stop()


def test_layers_of_transformer_engine() -> None:
    """About as near to separate rows of the same layers as their own packed rows are, in bfloat16."""
    rows = [row.cuda() for row in engine.rows_of(4, 2, 3)]
    model = engine.model(spec="transformer_engine", dtype=torch.bfloat16, **SIZES).cuda()
    separate = engine.separately(model, rows)
    packed = engine.packed(model, rows)
    got = engine.packed(convert(model, min_sharing=1.0), rows)
    assert treefx.inspect(model).stats["ran"] == "packed"
    assert engine.differ(got, separate) <= 1.5 * engine.differ(packed, separate) + 0.05
