"""Which sizes treefx makes symbols of, and what happens where Dynamo fails on one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from tests.backend.small import Small
from tests.batches import shared_batch
from tests.oracle import compile_with, stats_of
from tests.spellings import SPELLINGS
from treefx.torch_patches import batch_symbols


def tiny() -> Small:
    return Small(SPELLINGS["sdpa_is_causal"]).double()


def in_tiles(pixels: Tensor, scale: float = 0.5) -> Tensor:
    """The check of InternVL in front of its pixel shuffle, and a feature per image."""
    if pixels.shape[2] % scale != 0 or pixels.shape[3] % scale != 0:
        raise ValueError("the height and width of an image should be divisible by the scale")
    return pixels.mean((1, 2, 3))


class WithPictures(nn.Module):
    """A picture per row, of which a number is added to every logit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, pixels: Tensor, **inputs: Tensor) -> Tensor:
        logits = self.inner(input_ids=inputs["input_ids"]).logits * in_tiles(pixels)[:, None, None]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def run(model: Any, sizes: list[tuple[int, int]], side: int = 6) -> None:
    for rows, length in sizes:
        batch = shared_batch(rows=rows, length=length, shared=4, vocab=61, padding=None)
        pixels = torch.randn(rows, 3, side, side, dtype=torch.float64)
        model(pixels, **batch.inputs()).backward()


def test_sizes_of_pictures_stay_numbers() -> None:
    """As many graphs as ids alone cost; a height that is a symbol fails in the modulo."""
    counters.clear()
    compiled = compile_with(WithPictures(), inner="eager")
    run(compiled, [(2, 8), (3, 9), (4, 12), (5, 12)])
    assert counters["stats"]["unique_graphs"] == 2
    assert stats_of(compiled)["compiles"] == 2


def test_an_internal_error_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every size a symbol the modulo is an internal error of Dynamo; it then traces as PyTorch would."""
    monkeypatch.setattr(batch_symbols, "_dimensions_of_batches", lambda x, batch: range(x.dim()))
    counters.clear()
    compiled = compile_with(WithPictures(), inner="eager")
    run(compiled, [(2, 8), (3, 9)])
    assert counters["stats"]["unique_graphs"] == 2


def test_an_error_that_symbols_have_no_part_in_comes_again() -> None:
    class Fails(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids.reshape(7, -1)

    compiled = compile_with(Fails())
    compiled(torch.zeros(7, 4, dtype=torch.int64))
    with pytest.raises(Exception, match="shape '\\[7, -1\\]' is invalid"):
        compiled(torch.zeros(3, 5, dtype=torch.int64))


B, T = 4, 10


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((B, T), torch.int64, [0, 1]),
        ((B, T - 1), torch.float32, [0, 1]),
        ((B, 3), torch.int64, [0, 1]),
        ((B, 64), torch.float32, []),
        ((1, T), torch.int64, [1]),
        ((2, 3), torch.int64, []),
        ((7,), torch.int32, [0]),
        ((3, B, T), torch.int64, [1, 2]),
        ((B, T, 6, 2), torch.int64, [0, 1]),
        ((B, T, 32), torch.float32, [0, 1]),
        ((B, 1, T, T), torch.bool, [0, 2, 3]),
        ((1, 1, T, T), torch.float32, [2, 3]),
        ((B, 1, 1, T), torch.bool, [0, 3]),
        ((B, 3, 448, 448), torch.float32, []),
        ((300, 1176), torch.float32, []),
    ],
)
def test_dimensions(shape: tuple[int, ...], dtype: torch.dtype, expected: list[int]) -> None:
    assert batch_symbols._dimensions_of_batches(torch.zeros(shape, dtype=dtype, device="meta"), (B, T)) == expected
