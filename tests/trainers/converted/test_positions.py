"""``treefx.convert`` of models whose rotary embedding reads on the host how long its table must be."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome
from treefx.runtime.converted import positions


class Cached(nn.Module):
    """Cosines and sines [B, T, D] read from a table, which grows with the largest position asked for."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("inverse", 10.0 ** -torch.linspace(0, 2, features // 2, dtype=torch.float64))
        self.register_buffer("cosines", None, persistent=False)
        self.register_buffer("sines", None, persistent=False)
        self.longest = 0

    def forward(self, x: Tensor, position_ids: Tensor, kind: str = "rows") -> tuple[Tensor, Tensor]:
        needed = max(int(position_ids.max().item()) + 1, position_ids.shape[-1])
        if self.cosines is None or needed > self.longest:
            self.longest = needed
            angles = torch.outer(torch.arange(needed, dtype=torch.float64), self.inverse).repeat(1, 2)
            self.cosines, self.sines = angles.cos(), angles.sin()
        places = self.places(position_ids)
        return self.cosines[places], self.sines[places]

    def places(self, position_ids: Tensor) -> Tensor:
        return position_ids


class Stretched(Cached):
    """Positions of rows longer than the context are nearer to each other, as with dynamic scaling."""

    def places(self, position_ids: Tensor) -> Tensor:
        return position_ids // 2 if int(position_ids.max()) >= 16 else position_ids


class Counted(Cached):
    """Each position is that of the token to its left, plus one."""

    def places(self, position_ids: Tensor) -> Tensor:
        return torch.nn.functional.pad(position_ids[:, :-1] + 1, (1, 0))


class Remembering(Cached):
    """Keeps the cosines of the last call, which a caller may read."""

    def forward(self, x: Tensor, position_ids: Tensor, kind: str = "rows") -> tuple[Tensor, Tensor]:
        found = super().forward(x, position_ids, kind)
        self.last = found[0]
        return found


def model_with(kind: type[Cached]) -> Any:
    model: Any = double("llama", num_hidden_layers=1, max_position_embeddings=16)
    model.model.rotary_emb = kind(model.config.head_dim)
    return model


def step(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch.inputs(), use_cache=False).loss
    return loss


def compared(model: Any, twin: Any, batch: Batch) -> Any:
    assert_close(*(outcome(x, functools.partial(step, x, batch)) for x in (model, twin)), FLOAT64)
    return treefx.inspect(model).stats


def test_a_table_that_grows() -> None:
    """From call to call, on rows and packed; positions restart on a packed row."""
    model = model_with(Cached)
    twin = copy.deepcopy(model)
    treefx.convert(model, on_unsupported="error")
    state = torch.get_rng_state()
    step(model, shared_batch(rows=4, length=9, shared=6))
    assert torch.equal(state, torch.get_rng_state()), "the proof draws random numbers elsewhere"
    around = [(length, "right") for length in (15, 16, 17)]  # of the tables that stand in the trace
    for length, side in ((9, "right"), (22, "left"), (12, None), *around):
        batch = shared_batch(rows=4, length=length, shared=6, padding=side, seed=length)  # type: ignore[arg-type]
        stats = compared(model, twin, batch)
        assert stats["ran"] == "packed" and stats["tokens"] == distinct_tokens(batch)
    rows = batch.rows()
    packed = {"input_ids": torch.tensor(sum(rows, []))[None], "use_cache": False}
    packed["position_ids"] = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed["labels"] = packed["input_ids"]
    assert_close(*(outcome(x, lambda x=x: x(**packed).loss) for x in (model, twin)), FLOAT64)  # type: ignore[misc]
    assert treefx.inspect(model).stats["ran"] == "packed"


def test_positions_beyond_those_tried_run_on_rows() -> None:
    """There, a module might compute something else."""
    model = model_with(Cached)
    twin = copy.deepcopy(model)
    treefx.convert(model)
    for length, ran in ((12, "packed"), (25, "packed"), (26, "ordinary"), (12, "packed")):
        stats = compared(model, twin, shared_batch(rows=4, length=length, shared=6, padding=None))
        assert stats["ran"] == ran and (ran == "packed" or "positions beyond 24" in stats["fallback"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Stretched, "cannot be traced as one graph"),
        (Counted, "gets other values than on rows"),
        (Remembering, "is kept in it"),
    ],
)
def test_values_of_other_positions_are_refused(kind: type[Cached], reason: str) -> None:
    model = treefx.convert(model_with(kind), on_unsupported="error")
    with pytest.raises(treefx.UnsupportedError, match=reason):
        step(model, shared_batch(rows=4, length=12, shared=6))


def test_values_of_other_positions_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows filled up beyond the context: the packed row has no filler."""
    monkeypatch.setattr(positions, "_agree", lambda *given: True)
    model = model_with(Stretched)
    twin = copy.deepcopy(model)
    treefx.convert(model, padding="drop", on_unsupported="error")
    ids = torch.nn.functional.pad(shared_batch(rows=4, length=14, shared=6, padding=None).input_ids, (0, 6))
    batch = Batch(ids, (ids != 0).long(), torch.where(ids == 0, -100, ids))
    with pytest.raises(AssertionError, match="differ"):
        compared(model, twin, batch)
