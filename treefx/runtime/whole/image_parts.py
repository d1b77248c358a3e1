"""Run a vision tower once per distinct image where its pixels list the images of rows.

Pixels [n, parts, 3, H, W] give each row several images, and padding of zeros among them that the tower drops::

    rows  A B | A - | A C        before:  f on A, B, A, A, C        after:  f on A, B, C, a row each
    vectors of rows              [A B], [A], [A C]

That is exact if the vectors of a row are those of its images in order, each the same function of its pixels wherever
it stands. Code does not show that, so the first call with copies proves it on two images, in one row, in this row
turned round, and in a row each:

- an image's vectors have no derivative by the other's pixels, and stay where these change or become padding;
- they have the same values and the same derivatives by all parameters in all three places. (An embedding of places that
  starts at zero shows in the derivatives alone.)

Tiles of one image that a tower joins fail it; then rows are compared as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from treefx.runtime.token_bits import number_tokens
from treefx.runtime.whole.distinct_images import OF_IMAGES, Unrestored, fields_of, has_hooks, random_states, undo
from treefx.torch_patches.compiling import keeping_no_casts

__all__ = ["DistinctParts", "are_parts_separate", "find_parts"]

_PIXELS = 5
"""Dimensions of images that are listed by row."""


@dataclass
class DistinctParts:
    """Select the first copy of each image of rows, and restore all rows.

    Attributes:
        rows, parts: The first two dimensions of all arguments.
        first: The place of each distinct image, row * parts + part.
        images: For each row, which of ``first`` its images equal; without padding.
        lengths: How many vectors each distinct image has, once these are restored.
    """

    rows: int
    parts: int
    first: tuple[int, ...]
    images: tuple[tuple[int, ...], ...]
    lengths: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of images."""
        return sum(map(len, self.images))

    def select(self, x: Any) -> Any:
        """Return an argument for the distinct images alone, each in a row."""
        return x.flatten(0, 1)[torch.tensor(self.first, device=x.device)][:, None] if isinstance(x, Tensor) else x

    def restore(self, result: Any) -> bool:
        """Give all rows their vectors, in place; return False if the result has another form."""
        found: Any = fields_of(result).get("pooler_output")
        if not _is_list(found) or len(found) != len(self.first):
            return False
        rows = [torch.cat([found[i] for i in row]) if row else found[0][:0] for row in self.images]
        for name, x in fields_of(result).items():
            if x is not None:
                setattr(result, name, type(found)(rows) if x is found else Unrestored(name))
        self.lengths = list(map(len, found))
        return True

    def numbers(self, device: torch.device) -> list[Tensor]:
        """Return for each row int64 [vectors], equal for equal vectors."""
        ends = [*itertools.accumulate(self.lengths, initial=0)]
        each = [torch.arange(start, end, device=device) for start, end in itertools.pairwise(ends)]
        return [torch.cat([each[i] for i in row]) if row else each[0][:0] for row in self.images]


def find_parts(model: nn.Module, values: Sequence[Any]) -> DistinctParts | None:
    """Find the distinct images of rows among the arguments of a tower.

    None where no image has a copy, the arguments have another form, or an earlier call refuted the proof.
    """
    verdict = _verdict(model)
    if verdict is False:
        return None
    given = [x for x in values if isinstance(x, Tensor)]
    pixels = [x for x in given if x.dim() == _PIXELS and x.is_floating_point()]
    if not pixels or any(x.dim() < 2 or x.shape[:2] != pixels[0].shape[:2] or x.requires_grad for x in given):
        return None
    rows, parts = pixels[0].shape[:2]
    if parts < 2:
        return None
    flat = [x.detach().reshape(rows * parts, 1, -1) for x in given]
    numbers = torch.unique(torch.cat([number_tokens(x, OF_IMAGES) for x in flat], 1), dim=0, return_inverse=True)[1]
    real = torch.stack([x.flatten(2).ne(0).any(-1).flatten() for x in pixels]).any(0)
    places: dict[int, int] = {}
    first: list[int] = []
    images: list[list[int]] = [[] for _ in range(rows)]
    for place, (number, is_real) in enumerate(zip(numbers.tolist(), real.tolist(), strict=True)):
        if is_real:
            if number not in places:
                places[number] = len(first)
                first.append(place)
            images[place // parts].append(places[number])
    found = DistinctParts(rows, parts, tuple(first), tuple(map(tuple, images)))
    return found if (verdict is None) < len(first) < found.count else None  # a proof takes two images


def _is_list(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(isinstance(x, Tensor) and x.dim() == 2 for x in found)


# The proof ------------------------------------------------------------------------------------------------------------

_verdicts: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()
"""By model, its modes and whether its tower computes each image of a row by itself."""
_PLACES = (((0, 1), False), ((1, 0), False), ((0, 1), True))
"""The order of two images, and whether each has a row."""


def are_parts_separate(
    model: nn.Module,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    found: DistinctParts,
) -> bool:
    """Return whether a tower computes each image of a row by itself, in the same way at all places."""
    if has_hooks(model):
        return False
    verdict = _verdict(model)
    if verdict is None and not torch.is_inference_mode_enabled():
        verdict = _prove(_Two(model, original, args, kwargs, found.first[:2]))
        if verdict is not None:
            _verdicts[model] = _modes(model), verdict
    return verdict is True


def _modes(model: nn.Module) -> tuple[bool, ...]:
    trained = (x.requires_grad for x in model.parameters())
    return *(module.training for module in model.modules()), *trained


def _verdict(model: nn.Module) -> bool | None:
    """Return what was proved of a tower in the same modes; None for nothing."""
    modes, verdict = _verdicts.get(model, (None, False))
    return verdict if modes == _modes(model) else None


class _Two:
    """Runs of a tower on two images."""

    def __init__(
        self,
        model: nn.Module,
        original: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        places: Sequence[int],
    ) -> None:
        self._original, self._names, self.model = original, list(kwargs), model
        self.values = [
            x.detach().flatten(0, 1)[torch.tensor(places, device=x.device)] if isinstance(x, Tensor) else x
            for x in (*args, *kwargs.values())
        ]
        """All arguments, tensors as [2, ...]."""

    @property
    def pixels(self) -> list[Tensor]:
        """The pixels among the arguments."""
        return [x for x in self.values if _is_pixels(x)]

    def run(self, change: Callable[[Tensor], Tensor], order: Sequence[int], *, in_rows: bool = False) -> Tensor:
        """Return the vectors of images in some order, in one row or a row each, one after another."""
        where, dim = list(order), 1 if in_rows else 0
        given = [change(x) if _is_pixels(x) else x for x in self.values]
        given = [x[where].unsqueeze(dim) if isinstance(x, Tensor) else x for x in given]
        count = len(given) - len(self._names)
        named = dict(zip(self._names, given[count:], strict=True))
        found: Any = self._original(self.model, *given[:count], **named).pooler_output
        if not _is_list(found) or len(found) != (len(where) if in_rows else 1):
            raise ValueError("the result does not list the vectors of rows")
        return torch.cat(list(found))


def _is_pixels(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _prove(two: _Two) -> bool | None:
    """Return whether two images are separate; None if their values show nothing."""
    buffers = [(x, x.detach().clone()) for x in two.model.buffers()]
    devices = sorted({x.device.index or 0 for x in two.pixels if x.is_cuda})
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices), keeping_no_casts():
            before = random_states(devices)
            verdict = _is_separate(two)
            drawn = any(not torch.equal(x, y) for x, y in zip(before, random_states(devices), strict=True))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    finally:
        changed = undo(buffers)
    return False if drawn or changed else verdict


def _is_separate(two: _Two) -> bool | None:
    with torch.no_grad():
        alone = [two.run(lambda x: x, [i]) for i in (0, 1)]
        if not all(_stays(two, alone, i, *place) for i in (0, 1) for place in _PLACES):
            return False
    found = [_derivatives(two, alone, *place) for place in _PLACES]
    first = found[0]
    for each in found:
        for i in (0, 1):
            of_other, of_itself, of_parameters = each[i]
            if any(bool(x.ne(0).any()) for x in of_other) or not _are_close(of_parameters, first[i][2]):
                return False
            if not any(bool(x.ne(0).any()) for x in of_itself):
                return None
    return True


def _stays(two: _Two, alone: Sequence[Tensor], i: int, order: Sequence[int], in_rows: bool) -> bool:
    """Whether an image has the vectors that it has alone, with another image or none."""
    lengths = [len(alone[j]) for j in order]
    same = two.run(lambda x: x, order, in_rows=in_rows), two.run(partial(_changed, 1 - i), order, in_rows=in_rows)
    images = [torch.split(x, lengths)[order.index(i)] for x in same]
    images += [] if in_rows else [two.run(partial(_blank, 1 - i), order)]
    return all(_are_close([alone[i]], [x]) for x in images)


def _derivatives(
    two: _Two, alone: Sequence[Tensor], order: Sequence[int], in_rows: bool
) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Return for each image its derivatives by the other's pixels, by its own, and by parameters."""
    leaves: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        leaves.append(x.clone().requires_grad_())
        return leaves[-1]

    images = torch.split(two.run(leaf, order, in_rows=in_rows), [len(alone[j]) for j in order])
    parameters = [x for x in two.model.parameters() if x.requires_grad]
    found = []
    for i in (0, 1):
        image = images[order.index(i)]
        weights = torch.arange(1, image.numel() + 1, device=image.device).cos().reshape(image.shape)
        total = (image * weights).sum()
        grads = torch.autograd.grad(total, [*leaves, *parameters], retain_graph=True, materialize_grads=True)
        of_pixels, of_parameters = grads[: len(leaves)], [*grads[len(leaves) :]]
        found.append(([x[1 - i] for x in of_pixels], [x[i] for x in of_pixels], of_parameters))
    return found


def _changed(i: int, x: Tensor) -> Tensor:
    """Pixels with other numbers in place of one image."""
    other = x.flip(-1) * 0.5 + 0.25
    return torch.stack([other[j] if i == j else x[j] for j in (0, 1)])


def _blank(i: int, x: Tensor) -> Tensor:
    """Pixels with padding in place of one image."""
    return torch.stack([x[j] * 0 if i == j else x[j] for j in (0, 1)])


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether numbers are equal but for the order of sums, and but for sums that are zero next to others."""
    if [x.shape for x in first] != [x.shape for x in second]:
        return False
    sizes = [max(_largest(x), _largest(y)) for x, y in zip(first, second, strict=True)]
    for x, y, size in zip(first, second, sizes, strict=True):
        eps = torch.finfo(x.dtype).eps
        if size > min(64 * eps, 0.05) * max(sizes) and not _largest(x - y) <= min(1024 * eps, 0.1) * size:
            return False
    return True


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
