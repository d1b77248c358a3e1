"""Samples that TRL's AsyncGRPO folds in a tree, and its modules hooked for a test."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainers.support import NEEDS_TRAINERS

pytest.importorskip("trl", minversion="1.16", reason=NEEDS_TRAINERS)

from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer  # noqa: E402
from trl.experimental.async_grpo import packing  # noqa: E402

from treefx.integrations import async_grpo  # noqa: E402

__all__ = ["CAP", "MODELS", "PROMPT", "WINDOW", "Row", "installed", "packing", "rows_of", "tree_of", "trl_trainer"]

PROMPT, WINDOW, CAP = 9, 7, 5.0
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": CAP},
    "gpt_oss": {"sliding_window": WINDOW},
}
"""Groups of heads; norms of queries and keys; a window and a cap; a window and sinks. Rows are longer than windows."""

Row = dict[str, Tensor]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooked as a program does; undone after each test."""
    for module, name in (
        (packing, "tree_attention"),
        (trl_trainer, "create_model_from_path"),
        (trl_trainer, "get_peak_flops_per_device"),
        (trl_trainer.AsyncGRPOTrainer, "create_accelerator_and_postprocess"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    async_grpo.install()
    packing.register_tree_attention()
    yield
    monkeypatch.undo()
    packing.register_tree_attention()


def rows_of(vocabulary: int) -> list[dict[str, Any]]:
    """Two prompts; the samples of the first fork in three places, at a sample's end too."""
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> Tensor:
        return torch.randint(3, vocabulary, (count,), generator=draw)

    prompt, turn, other = ids(PROMPT), ids(4), ids(PROMPT)
    rows = [torch.cat([prompt, turn, ids(n)]) for n in (3, 8)] + [torch.cat([prompt, ids(n)]) for n in (5, 9)]
    rows += [torch.cat([prompt, turn]), *(torch.cat([other, ids(n)]) for n in (4, 6))]
    return [
        {
            "input_ids": row,
            "completion_mask": (torch.arange(len(row)) >= PROMPT).long(),
            "old_log_probs": torch.full((len(row),), -3.0),
            "advantage": torch.randn((), generator=draw).item(),
            "group_id": int(number > 4),
        }
        for number, row in enumerate(rows)
    ]


def tree_of(samples: list[dict[str, Any]]) -> Row:
    row = packing.TreeRow()
    for sample in samples:
        row.add(sample)
    packed: Row = row.pack()
    return packed
