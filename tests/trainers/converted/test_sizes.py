"""Blocks that compute with a size of the batch run on rows; blocks that only shape things by it run packed."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.batches import shared_batch
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome, relative_errors
from treefx.config import Config
from treefx.passes.pipeline import build_passes
from treefx.runtime.analyses import Analyses
from treefx.runtime.converted import planner
from treefx.runtime.converted.sizes import check_blocks
from treefx.runtime.dynamo import role_of
from treefx.runtime.reason import Reason
from treefx.runtime.records import Records

BATCH = shared_batch(rows=4, length=10, shared=6, padding=None)
Change = Callable[[Any, Tensor, Any], Tensor]
"""Of a block, features [B, T, 8] and a constant [1, T, 8] of the code around the blocks."""


class Tiny(nn.Module):
    """Ids, blocks and hidden states; the block changes what it is given."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(128, 8), nn.ModuleList([Changed(change)])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        column = torch.arange(x.shape[1], device=x.device)
        turns = (column[:, None] * self.blocks[0].table[: x.shape[2]]).cos()[None]
        for block in self.blocks:
            x = block(x, turns)
        return x


class Changed(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change, self.weight = change, nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = self.change(self, self.weight(x), turns)
        mixed: Tensor = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
        return mixed[:, 0]


def check(change: Change) -> None:
    """What a converted model proves of the blocks of ``Tiny``.

    Raises:
        UnsupportedError: They compute with a size.
    """

    def checking(gm: torch.fx.GraphModule, examples: Any) -> Any:
        nodes = gm.graph.find_nodes(op="placeholder")
        roles = [role_of(node, example) for node, example in zip(nodes, examples, strict=True)]
        config = Config(inner="eager", on_unsupported="fallback")
        analyses = Analyses(gm, roles, build_passes(config.compiler), config, Records(gm))

        def run(*args: Any) -> Any:
            shape = analyses.shape(args)
            if isinstance(shape, Reason) or shape.analysis.batch is None:
                raise treefx.UnsupportedError(f"computes with a size of the batch: {shape}")
            check_blocks(shape.analysis, {"blocks.0"})
            return gm(*args)

        setattr(checking, "compiler_name", "treefx")
        return run

    torch._dynamo.reset()
    torch.compile(Tiny(change), backend=checking, dynamic=True, fullgraph=True)(BATCH.input_ids)


def like(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


COMPUTED: dict[str, Change] = {
    "sum of ones": lambda self, y, turns: y * torch.ones(y.shape[1], **like(y)).sum(),
    "last column": lambda self, y, turns: y * torch.arange(y.shape[1], device=y.device).max(),
    "quotient": lambda self, y, turns: y / y.shape[1],
    "sum of new memory": lambda self, y, turns: y * (1 + y.new_zeros(y.shape[1], 3)).mean(1).sum(),
    "sum of rows": lambda self, y, turns: y * torch.ones(y.shape[0], **like(y)).sum(),
    "entry of a table": lambda self, y, turns: y * self.table[y.shape[1] - 1],
    "last entry": lambda self, y, turns: y * torch.arange(y.shape[1], device=y.device)[-1],
    "product of matrices": lambda self, y, turns: y * (_ones(y) @ self.table[:1].expand(y.shape[1], 1)),
    "longer table": lambda self, y, turns: y * self.table[: y.shape[1] + 1].mean(),
    "filled features": lambda self, y, turns: y + nn.functional.pad(y, (0, y.shape[1]), value=1.0).mean(-1)[..., None],
    "moved features": lambda self, y, turns: y + y.roll(y.shape[1], -1),
}  # fmt: skip

HARMLESS: dict[str, Change] = {
    "view": lambda self, y, turns: y.view(y.shape[0] * y.shape[1], -1).mul(2).view(y.shape[0], y.shape[1], -1),
    "memory of one value": lambda self, y, turns: y + torch.ones(y.shape[1], 1, **like(y)) + y.new_zeros(y.shape),
    "memory filled wholly": lambda self, y, turns: _in_halves(y),
    "mask of all": lambda self, y, turns: y.masked_fill(torch.zeros(y.shape[:2], dtype=torch.bool)[..., None], 0.0),
    "expanded weights": lambda self, y, turns: y * self.table[: y.shape[2]].expand(y.shape[0], y.shape[1], -1),
}


def _ones(y: Tensor) -> Tensor:
    return torch.ones(y.shape[1], y.shape[1], **like(y))


def _heads(y: Tensor) -> Tensor:
    return y.unflatten(-1, (2, 4)).transpose(1, 2)


def _in_halves(y: Tensor) -> Tensor:
    out, half = y.new_empty(y.shape), y.shape[-1] // 2
    out[..., :half], out[..., half:] = y[..., half:], y[..., :half]
    return out


MIXED: dict[str, Change] = {
    "order": lambda self, y, turns: y * turns.flip(1),
    "sum": lambda self, y, turns: y * turns.cumsum(1),
    "neighbour": lambda self, y, turns: y * turns.roll(1, 1),
    "moved": lambda self, y, turns: y * turns.transpose(1, 2).reshape(1, y.shape[1], -1),
    "all": lambda self, y, turns: y * turns.amax(1, keepdim=True),
    "another column": lambda self, y, turns: y * nn.functional.pad(turns, (0, 0, 1, 0))[:, :-1],
}
"""What a block makes of a constant with an entry per column: the packed row has them in another order."""

EACH: dict[str, Change] = {
    "entry": lambda self, y, turns: y * turns,
    "halves": lambda self, y, turns: y * torch.cat([-turns[..., 4:], turns[..., :4]], -1),
    "heads": lambda self, y, turns: (_heads(y) * turns[:, None, :, :4]).transpose(1, 2).flatten(2),
    "viewed": lambda self, y, turns: y * turns.view(1, y.shape[1], 4, 2).sin().flatten(2),
    "expanded": lambda self, y, turns: y * turns.expand(y.shape[0], -1, -1),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_blocks_that_compute_with_a_size_are_refused(name: str) -> None:
    with pytest.raises(treefx.UnsupportedError, match="computes with a size of the batch|counts columns"):
        check(COMPUTED[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_blocks_may_shape_by_a_size(name: str) -> None:
    check(HARMLESS[name])


@pytest.mark.parametrize("name", MIXED)
def test_blocks_that_mix_constants_along_columns_are_refused(name: str) -> None:
    with pytest.raises(treefx.UnsupportedError, match="computes with a size of the batch|counts columns"):
        check(MIXED[name])


@pytest.mark.parametrize("name", EACH)
def test_blocks_may_read_each_entry_at_its_column(name: str) -> None:
    check(EACH[name])


# Whole models ---------------------------------------------------------------------------------------------------------


def loss(model: Any) -> Tensor:
    found: Tensor = model(**BATCH.inputs(), use_cache=False).loss
    return found


def model_with(change: Change) -> tuple[Any, Any]:
    """A converted model with a layer whose result is changed, and its twin."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return change(self, nn.functional.linear(x, self.weight), None)

    model = double("llama", num_hidden_layers=1)
    layer = model.model.layers[0].mlp.down_proj
    layer.__class__ = type("Changed", (nn.Linear,), {"forward": forward})
    twin = copy.deepcopy(model)
    return treefx.convert(model), twin


def test_such_a_model_runs_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = model_with(COMPUTED["sum of ones"])
    with pytest.warns(UserWarning, match="in layers.0.mlp.down_proj computes with a size of the batch"):
        got = outcome(model, functools.partial(loss, model))
    wanted = outcome(twin, functools.partial(loss, twin))
    assert_close(got, wanted, FLOAT64)
    assert treefx.inspect(model).stats["ran"] == "ordinary"
    monkeypatch.setattr(planner, "check_blocks", lambda *_: None)
    wrong = treefx.convert(treefx.unconvert(model))
    errors = relative_errors(outcome(wrong, functools.partial(loss, wrong)), wanted)
    assert treefx.inspect(wrong).stats["ran"] == "packed" and max(errors.values()) > 1e-3


def test_memory_that_is_filled_wholly_counts_nothing() -> None:
    model, twin = model_with(HARMLESS["memory filled wholly"])
    assert_close(*(outcome(run, functools.partial(loss, run)) for run in (model, twin)), FLOAT64)
    assert treefx.inspect(model).stats["ran"] == "packed"


def test_positions_that_a_block_adds_up_along_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are values of each row, which the packed row has in another order."""
    model = double("llama", num_hidden_layers=1)
    layer = type(model.model.layers[0])
    original = layer.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        return original(self, hidden_states + 0.1 * position_ids.cumsum(1)[..., None], *args, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    twin = copy.deepcopy(model)
    treefx.convert(model)
    run = lambda run: run(**BATCH.inputs(), position_ids=torch.arange(10).expand(4, 10), use_cache=False).loss  # noqa: E731
    with pytest.warns(UserWarning, match="every row of"):
        got = outcome(model, lambda: run(model))
    assert_close(got, outcome(twin, lambda: run(twin)), FLOAT64)
