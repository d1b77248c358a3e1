"""Collectives of a packed model in tensor parallelism, on two processes: cut with products, equal to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor

import treefx
from tests.oracle import FLOAT64, Outcome, assert_close, separate_rows
from tests.scale.shared_out import SECONDS, parallel, run_rank, whole_gradients
from tests.scale.test_tensor_parallel_compiled import llama
from tests.trainers.test_distributed import run_ranks
from treefx.passes.overlap import OverlapCollectives

CUT = 5
"""Collectives of one block: behind attention and the MLP, and in the backward in front of both and of the head."""
PREFIX = [7 * i % 29 + 3 for i in range(60)]
ROWS = [PREFIX + [(row + 5 * i) % 29 + 3 for i in range(30)] for row in range(3)]


def worker(rank: int, port: int, folder: str) -> None:
    run_rank(rank, port, folder, lambda: [one_step(chunks) for chunks in (1, 4)])


def one_step(chunks: int) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss and gradients of a packed forest, and how many collectives were cut."""
    torch.compiler.reset()
    overlap, model = OverlapCollectives(chunks), parallel(llama(), head=True)
    run: Any = torch.compile(model, backend="treefx")
    forest = treefx.Forest.from_sequences(ROWS)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, inductor.patch(post_grad_custom_pre_pass=overlap, fx_graph_cache=False), treefx.use(forest):
        out = run(**forest.model_inputs(), use_cache=False)
        loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, forest), forest)
        loss.backward()
    return loss.detach().clone(), whole_gradients(model), overlap.count


@pytest.mark.sample(8)
def test_packed_collectives_are_cut(tmp_path: Path) -> None:
    want = separate_rows(llama(), ROWS, [[1.0] * len(row) for row in ROWS])
    for (loss, gradients, uncut), (other, found, count) in run_ranks(__name__, tmp_path, seconds=SECONDS):
        assert_close(Outcome(loss, gradients), want, FLOAT64)
        assert (uncut, count) == (0, CUT)
        assert torch.equal(other, loss) and all(torch.equal(found[name], gradients[name]) for name in gradients)
