"""Tiles of a forest: the masks they hold, as counted beforehand and as made."""

import numpy as np
import pytest
import torch

from treefx.kernels.common import Inputs
from treefx.kernels.cpu import rectangles as tiles
from treefx.kernels.cpu.rectangles import mask_elements, plain_tiles
from treefx.kernels.tiles.structure import Structure


def _ends(seed: int, tokens: int, leave: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A tree whose tokens continue the one before, or with probability `leave` branch off anywhere on its path."""
    random = np.random.default_rng(seed)
    path, parents = [0], [-1]
    for token in range(1, tokens):
        if random.random() < leave:
            path = path[: int(random.integers(1, len(path) + 1))]
        parents.append(path[-1])
        path.append(token)
    ends = np.arange(1, tokens + 1)
    for token in reversed(range(1, tokens)):
        ends[parents[token]] = max(ends[parents[token]], ends[token])
    return ends


@pytest.mark.parametrize("tokens", [1, 100, 250, 300, 1500])
@pytest.mark.parametrize("leave", [0.0, 0.003, 0.1, 0.9])
def test_masks_are_counted_beforehand(tokens: int, leave: float) -> None:
    """What the planner counts is what the tiles of the forest hold."""
    for seed in range(4):
        ends = _ends(seed, tokens, leave)
        q = torch.zeros(1, 1, tokens, 8)
        inputs = Inputs(q, q, q, torch.from_numpy(ends.astype(np.int32)))
        masks = [tile.mask for tile in plain_tiles(inputs, Structure.from_ends(ends)) if tile.mask is not None]
        assert mask_elements(ends) == sum(mask.numel() for mask in masks)
        assert masks or leave * tokens < 10
        assert not masks or leave


def test_masks_beyond_what_is_kept_are_there_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _ends(0, 1500, 0.1)
    everything = mask_elements(ends)
    monkeypatch.setattr(tiles, "_KEPT_ELEMENTS", 1000)
    assert 1000 < mask_elements(ends) < everything / 2
