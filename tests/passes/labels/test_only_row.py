"""A batch of one packed row: its row axis may stand anywhere, alone or with the tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import FLOAT64, assert_close, compile_with, outcome, stats_of
from treefx.passes.labels import dims as algebra
from treefx.passes.labels.facts import Axis, Dims, Factor

IDS = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 7, 3, 4, 8, 9]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]])
PREFIXES = 4 + 1 + 2
WIDTH = 8


class PackedRow(nn.Module):
    """Documents in one row, whose values lose and get the dimension of rows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed, self.head = way, nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.table, self.experts = nn.Parameter(torch.randn(16, WIDTH)), nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.route = nn.Linear(WIDTH, 3)

    def mixed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        if self.way == "squeeze":
            return x * self.table[positions.squeeze(0)].view(1, -1, WIDTH)
        if self.way == "select":
            return x * self.table[positions[0]][None]
        if self.way == "broadcast":
            return x * self.table[positions[0]]
        if self.way == "experts":
            flat = x.view(-1, WIDTH)
            each = torch.bmm(flat.unsqueeze(0).expand(3, len(flat), WIDTH), self.experts)
            return (each * self.route(flat).softmax(-1).t()[..., None]).sum(0)[None]
        weights = self.route(x.squeeze(0)).t() * positions.squeeze(0)[None]  # [3, T]
        return x * weights.sum(0)[None, :, None]

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        document = (positions == 0).cumsum(1)
        seen = (document[:, :, None] == document[:, None, :]) & torch.ones(2 * [ids.shape[1]]).tril().bool()
        x = self.mixed(self.embed(ids), positions)[:, None]
        logits: Tensor = self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=seen[:, None])[:, 0])
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("way", ["squeeze", "select", "broadcast", "experts", "heads"])
def test_values_without_a_dimension_of_rows_stay_packed(way: str) -> None:
    torch.manual_seed(0)
    model, twin = PackedRow(way).double(), PackedRow(way).double()
    twin.load_state_dict(model.state_dict())
    compiled = compile_with(model, inner="eager")
    expected = outcome(twin, lambda: twin(IDS, POSITIONS))
    assert_close(outcome(model, lambda: compiled(IDS, POSITIONS)), expected, FLOAT64)
    stats = stats_of(compiled)
    assert stats["tokens"] == PREFIXES and not stats["expansions"]


def test_the_first_of_two_rows_is_another_row() -> None:
    """Its positions are read for both: exact, and not packed as the only row's would be."""
    torch.manual_seed(0)
    model, twin = PackedRow("broadcast").double(), PackedRow("broadcast").double()
    twin.load_state_dict(model.state_dict())
    compiled = compile_with(model, inner="eager")
    ids, positions = torch.cat([IDS, IDS]), torch.cat([POSITIONS, torch.arange(12)[None]])
    expected = outcome(twin, lambda: twin(ids, positions))
    assert_close(outcome(model, lambda: compiled(ids, positions)), expected, FLOAT64)


ROW, TOKEN = Factor(Axis.ROW, 1), Factor(Axis.TOKEN, 5)
PLACES: dict[str, Dims] = {
    "own": ((ROW,), (TOKEN,)), "joined": ((), (ROW, TOKEN)), "joined alone": ((ROW, TOKEN),),
}  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(sorted(PLACES)), min_size=1, max_size=4), st.booleans())
def test_broadcasts_keep_both_axes(names: list[str], wide: bool) -> None:
    """Wherever operands have the row, the result has it once, and tokens last; a plain dimension pushes it back."""
    operands = [PLACES[name] for name in names]
    if wide:
        operands = [dims for dims in operands if dims != PLACES["own"]] + [((Factor(Axis.PLAIN, 3),), (ROW, TOKEN))]
    dims = algebra.broadcast(operands)
    axes = [factor.axis for dim in dims for factor in dim if factor.axis is not Axis.PLAIN]
    assert axes == [Axis.ROW, Axis.TOKEN] and dims[-1][-1] == TOKEN
    assert algebra.extent(dims[-1]) == 5 and len(dims) == max(map(len, operands))
    assert not wide or dims == ((Factor(Axis.PLAIN, 3),), (ROW, TOKEN))
