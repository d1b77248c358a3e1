"""What a call on a forest is like is asked once; what buffers decide is asked in every call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.native import Rows, rollouts
from tests.models import Output
from tests.oracle import FLOAT64, assert_close, compile_with, outcome, separate_rows, stats_of
from treefx.runtime import analyses


class Tables(nn.Module):
    """Attention that sees the keys at places that one buffer lists, of the document that another one starts."""

    keep: Tensor
    starts: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)
        self.register_buffer("keep", torch.ones(64, dtype=torch.bool))
        self.register_buffer("starts", torch.zeros(64, dtype=torch.int64))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Output:
        count = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(count)[None]
        places = position_ids if attention_mask is None else position_ids * attention_mask
        q, k, v = self.qkv(self.embed(input_ids)).chunk(3, -1)
        past = torch.ones(count, count, dtype=torch.bool).tril()
        documents = self.starts[places].cumsum(1)
        seen = past & self.keep[places][:, None] & (documents[:, :, None] == documents[:, None])
        scores = (q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
        hidden = scores.softmax(-1) @ v
        return Output(None, self.head(hidden), hidden)


def check(model: nn.Module, compiled: Any, rows: Rows, **more: Any) -> None:
    forest = treefx.Forest.from_sequences(rows)

    def loss() -> Tensor:
        with treefx.use(forest):
            logits = compiled(
                **{**forest.model_inputs(), **{name: value(forest) for name, value in more.items()}}
            ).logits
        return treefx.losses.sft(treefx.edge_logprobs(logits, forest), forest, reduction="sum")

    assert_close(outcome(model, loss), separate_rows(model, rows, [[1.0] * len(row) for row in rows]), FLOAT64)
    assert stats_of(compiled)["fallback"] is None and stats_of(compiled)["attention_rewritten"] == 1


def ones(forest: treefx.Forest) -> Tensor:
    return torch.ones(1, forest.num_tokens, dtype=torch.int64)


@pytest.mark.parametrize("more", [{}, {"attention_mask": ones}], ids=["by place", "by mask"])
def test_a_buffer_that_decides_is_read_in_every_call(more: Any) -> None:
    """Under the mask it decides whether a condition is left out of the graph."""
    model = Tables().double()
    compiled = compile_with(model, inner="aot_eager")
    check(model, compiled, rollouts(0), **more)
    check(model, compiled, rollouts(1), **more)
    model.keep[3] = False
    check(model, compiled, rollouts(2), **more)
    model.keep = torch.ones(64, dtype=torch.bool)
    model.starts[4] = 1
    check(model, compiled, rollouts(3), **more)
    model.starts = (torch.arange(64) % 6 == 0).long()
    check(model, compiled, rollouts(4), **more)


def test_inputs_are_analysed_once_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    read = analyses.input_values

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return read(*args, **kwargs)

    monkeypatch.setattr(analyses, "input_values", counted)
    model = Tables().double()
    compiled = compile_with(model, inner="eager")
    for seed in range(3):
        check(model, compiled, rollouts(seed))
    once = len(asked)
    check(model, compiled, rollouts(3))
    assert len(asked) == once
    check(model, compiled, [[1, *range(2, 40)], [1, *range(3, 41)]])  # deeper: more columns
    assert len(asked) > once


def test_forms_in_turn() -> None:
    """Positions of two types, with a mask of ones and without: each is told from the others in every call."""
    model = Tables().double()
    compiled = compile_with(model, inner="eager")
    for seed in range(2):
        check(model, compiled, rollouts(seed))
        check(model, compiled, rollouts(seed), position_ids=lambda forest: forest.depth[None].int())
        check(model, compiled, rollouts(seed), attention_mask=ones)
        with pytest.raises(treefx.errors.ForestError, match="got other values"):
            check(model, compiled, rollouts(seed), attention_mask=lambda forest: ones(forest) + 1)


def test_shapes_in_turn_through_inductor() -> None:
    """One row, one token and longer rows, all alike, nothing shared; first without gradients."""
    model = Tables().double()
    compiled = compile_with(model, inner="inductor")
    forest = treefx.Forest.from_sequences(rollouts(0))
    with torch.inference_mode(), treefx.use(forest):
        compiled(**forest.model_inputs())
    model.starts[3] = 1
    alone = [[row, *range(20, 29)] for row in range(3)]
    for rows in ([[5, 6, 7]], [[5, 6, 7], [8], [5, 6]], [[*range(13)]] * 4, alone, rollouts(1), [[5, 6, 7]]):
        check(model, compiled, rows)
