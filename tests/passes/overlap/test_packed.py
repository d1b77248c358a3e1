"""Collectives of a packed model in tensor parallelism, on two processes: cut with products, by inductor's own pass.

That a cut product is equal to the whole one to the bit is said by test_two_ranks.py, of graphs without inductor.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

import treefx
from tests.oracle import FLOAT64, Outcome, assert_close, separate_rows
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import SECONDS, Small, parallel, run_rank, whole_gradients
from treefx.passes.overlap import OverlapCollectives

CUT = 5
"""Collectives of one block: behind attention and the MLP, and in the backward in front of both and of the head."""
PREFIX = [7 * i % 29 + 3 for i in range(60)]
ROWS = [PREFIX + [(row + 5 * i) % 29 + 3 for i in range(30)] for row in range(3)]


FORESTS = [ROWS, ROWS[:2], [*ROWS, PREFIX]]


def llama() -> Small:
    """Of two ranks, for rows of 90 tokens."""
    return Small(2, length=96)


def worker(rank: int, port: int, folder: str) -> None:
    run_rank(rank, port, folder, steps)


def steps() -> tuple[list[Any], int]:
    """Loss and gradients of packed forests, and how many collectives were cut."""
    overlap, model = OverlapCollectives(4), parallel(llama(), head=True)
    run: Any = torch.compile(model, backend="treefx")
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, inductor.patch(post_grad_custom_pre_pass=overlap, fx_graph_cache=False):
        return [one_step(model, run, rows) for rows in FORESTS], overlap.count


def one_step(model: nn.Module, run: Any, rows: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    forest = treefx.Forest.from_sequences(rows)
    model.zero_grad()
    with treefx.use(forest):
        out = run(**forest.model_inputs(), use_cache=False)
        loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, forest), forest)
        loss.backward()
    return loss.detach().clone(), whole_gradients(model)


def test_packed_collectives_are_cut(tmp_path: Path) -> None:
    want = [separate_rows(llama(), rows, [[1.0] * len(row) for row in rows]) for rows in FORESTS]
    for chunked, count in run_ranks(__name__, tmp_path, seconds=SECONDS):
        assert count == CUT
        for right, (loss, gradients) in zip(want, chunked, strict=True):
            assert_close(Outcome(loss, gradients), right, FLOAT64)
