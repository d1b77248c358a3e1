"""A tower that cuts the model: what it made of which image is known behind it, in the layers too.

Qwen3-VL reads the sizes of its images on the host, computes positions from them there, and adds features of the tower
in its first layers.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.models.vision import CASES, IMAGE, distinct, draw_patches, qwen3_vl, rows_of
from tests.backend.support import Pair, in_case
from tests.batches import IGNORED, Batch, Side, padded
from tests.oracle import Step, loss_of
from treefx.runtime import origins
from treefx.runtime.whole import towers

SAME, SECOND, OTHER = "abab", "abac", "abcd"
"""Names of the images of two rows: the same, the first one shared, none shared. One compilation serves them all."""


def batch_of_images() -> Batch:
    """Rows of 12 and 11 tokens, each with two images; the shorter one starts a column later."""
    first, second = rows_of(CASES["two images, one shared"][0][:2])
    return padded([first, second[:-1]], "left")


def step_of(batch: Batch, names: str) -> Step:
    pixels, grid = draw_patches(names)
    images = batch.input_ids == IMAGE
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "mm_token_type_ids": images.int()}
    assert batch.labels is not None
    inputs |= {"pixel_values": pixels, "image_grid_thw": grid, "labels": batch.labels.masked_fill(images, IGNORED)}
    return lambda model: model(**inputs, use_cache=False).loss


def check(pair: Pair, step: Step) -> dict[str, Any]:
    stats = pair.check(step).stats
    assert stats["attention_rewritten"] == 2 and stats["fallback"] is None
    assert not stats["expansions"] and not stats["warned"]
    return stats


def test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one compilation; a trie of ids alone fails where images differ."""
    pair, batch = Pair(qwen3_vl()), batch_of_images()
    own = padded(batch.rows())  # the model counts positions from each row's first token
    for names in (SAME, SECOND, OTHER):
        with in_case(names):
            stats = check(pair, step_of(batch, names))
            assert stats["tokens"] == distinct(own, names)
            assert (stats["images"], stats["images_run"]) == (4, len({*names}))
    monkeypatch.setattr(towers, "_number_images", lambda given, count: torch.zeros(count, dtype=torch.int64))
    check(pair, step_of(batch, "aaaa"))
    for names in (SECOND, OTHER):
        with pytest.raises(AssertionError, match="differ by more than"):
            pair.check(step_of(batch, names))


def test_text() -> None:
    """Rotary tables of three planes, written into one another, are the same for all rows."""
    rows, pair = CASES["text alone"][0], Pair(qwen3_vl())
    sides: list[Side] = ["right", "left"]
    for side in sides:
        batch = padded([row[b % 2 :] if b else row for b, row in enumerate(rows)], side)
        with in_case(side):
            assert check(pair, loss_of(batch, use_cache=False))["tokens"] == distinct(batch, "")


class Tower(nn.Module):
    """Three images of two vectors each, with dropout where it is trained."""

    def get_image_features(self, pixels: Tensor) -> Any:
        return SimpleNamespace(pooler_output=[*F.dropout(pixels * torch.ones(4), 0.5, self.training)])


@pytest.mark.parametrize("case", ["plain", "dropout", "pixels with a gradient", "pixels changed"])
def test_what_a_tower_may_note(case: str) -> None:
    """Random numbers differ for equal images, and so does the gradient of each one's own pixels."""
    see = towers._noting(Tower.get_image_features)
    pixels = torch.tensor([1.0, 2.0, 1.0])[:, None, None].repeat(1, 2, 1)
    pixels.requires_grad_(case == "pixels with a gradient")
    images = see(Tower().train(case == "dropout"), pixels).pooler_output
    if case == "pixels changed":
        pixels += 1
    numbers = origins.numbers_of_vectors(images)
    assert (numbers is None) == (case != "plain")
    assert numbers is None or numbers[:2].tolist() == numbers[4:].tolist() and len(numbers.unique()) == 4


def test_which_images_are_equal() -> None:
    """By all that is given of an image; sizes of other images do not matter."""

    def numbers(*given: Tensor) -> list[int] | None:
        found = towers._number_images(given, 3)
        return None if found is None else found.tolist()

    pixels = torch.tensor([1.0, 2.0, 1.0])[:, None, None].repeat(1, 2, 2)
    first, second, third = numbers(pixels) or []
    assert first == third != second
    sizes = torch.tensor([[2, 2], [2, 2], [1, 4]])
    assert len({*(numbers(pixels, sizes) or [])}) == 3
    grids = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 2]])
    patches = torch.tensor([1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0])[:, None].repeat(1, 5)
    first, second, third = numbers(patches, grids) or []
    assert first == third != second
    assert len({*(numbers(patches, grids.flip(-1)) or [])}) == 2 and numbers(patches) is None
    assert first != (numbers(patches.index_fill(0, torch.tensor(7), 9.0), grids) or [])[2]
