"""Note which image each vector of a vision tower comes from, for later graphs.

Most towers read the sizes of images on the host, which cuts the model in two. All have their features from
``get_image_features`` or ``get_video_features`` of a model, one entry per image. Equal pixels give features that are
one function of the parameters, if the order of the images does not matter and no random numbers are drawn.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import skip_code  # type: ignore[attr-defined]

from treefx.passes.labels.facts import Axis, Dims, Factor
from treefx.runtime.origins import note_vectors
from treefx.runtime.token_bits import OF_TOKENS, number_tokens

__all__ = ["note_towers"]

_NAMES = ("get_image_features", "get_video_features")
_LIBRARY = "transformers.models."
_OF_IMAGES: Dims = (*OF_TOKENS, (Factor(Axis.PLAIN, -1),))


def note_towers(function: Any, tx: Any, args: Any, kwargs: Any) -> None:
    """Wrap a model's function to note its results, from Dynamo's first call of it on."""
    name, module = getattr(function, "__name__", None), str(getattr(function, "__module__", ""))
    if name not in _NAMES or not module.startswith(_LIBRARY):
        return
    owner = getattr(sys.modules[module], function.__qualname__.rpartition(".")[0], None)
    if isinstance(owner, type) and not hasattr(vars(owner)[name], "__treefx_notes__"):
        setattr(owner, name, _noting(vars(owner)[name]))


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def features(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # within a graph, where the analysis sees the tower
            return original(self, *args, **kwargs)
        values = [*args, *kwargs.values()]
        given = [x for x in values if isinstance(x, Tensor)]
        before = _random_states(given)
        result = original(self, *args, **kwargs)
        drawn = any(not torch.equal(x, y) for x, y in zip(before, _random_states(given), strict=True))
        images: Any = getattr(result, "pooler_output", None)
        if _is_list(images) and not drawn and not any(_is_per_image(x, len(images)) for x in values):
            _note(given, images, getattr(result, "deepstack_features", None) or ())
        return result

    features.__treefx_notes__ = True  # type: ignore[attr-defined]
    skip_code(features.__code__)  # type: ignore[attr-defined]  # run as it stands, the original is compiled by itself
    return features


def _random_states(given: Sequence[Tensor]) -> list[Tensor]:
    devices = {x.device for x in given if x.device.type == "cuda"}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _is_per_image(x: Any, count: int) -> bool:
    """Return whether an argument may differ by image in a way that bits do not show."""
    if isinstance(x, Tensor):
        return x.requires_grad  # each image then has a separate gradient
    return isinstance(x, Sized) and not isinstance(x, str) and (isinstance(x, Mapping) or len(x) == count)


def _note(given: Sequence[Tensor], images: Sequence[Tensor], deep: Sequence[Any]) -> None:
    """Note equal vectors, of each image and, for later layers, of all images in order."""
    counts = [len(x) for x in images]
    find = _Numbers(given, counts)
    for found in [images, *[[x] if isinstance(x, Tensor) else x for x in deep]]:
        if _is_list(found) and sum(map(len, found)) == sum(counts):
            ends = itertools.accumulate(map(len, found))
            for x, end in zip(found, ends, strict=True):
                note_vectors(x, functools.partial(find, end - len(x), end))


def _is_list(found: Any) -> bool:
    """Whether it is a list of vectors [n, D]."""
    return isinstance(found, list | tuple) and all(isinstance(x, Tensor) and x.dim() == 2 for x in found)


class _Numbers:
    """Numbers of the vectors of images, found when they are asked for and then kept.

    Args:
        given: Arguments of a tower.
        counts: How many vectors each image gave.
    """

    def __init__(self, given: Sequence[Tensor], counts: Sequence[int]) -> None:
        self._given, self._counts = given, counts
        self._versions = [_version(x) for x in given]
        self._numbers: Tensor | None = None

    def __call__(self, start: int, end: int) -> Tensor | None:
        """Return the numbers of vectors from ``start`` to ``end``; None if they are unknown."""
        if self._numbers is None:
            self._numbers = self._find()
            self._given = ()
        return None if self._numbers is None else self._numbers[start:end]

    def _find(self) -> Tensor | None:
        if self._versions != [_version(x) for x in self._given]:
            return None
        images = _number_images(self._given, len(self._counts))
        if images is None:
            return None
        each = torch.tensor(self._counts, device=images.device)
        within = torch.arange(sum(self._counts), device=images.device) - (each.cumsum(0) - each).repeat_interleave(each)
        return images.repeat_interleave(each) * max(self._counts) + within


def _number_images(given: Sequence[Tensor], count: int) -> Tensor | None:
    """Return int64 [count], equal for images with equal bits of all arguments.

    None if that is unknown.
    """
    grids = [x for x in given if x.dim() == 2 and x.shape == (count, 3) and not x.is_floating_point()]
    patches = grids[0].prod(-1) if grids else None
    numbers = []
    for x in given:
        if len(x.shape) and len(x) == count:
            numbers.append(number_tokens(x.detach().reshape(count, 1, x[:1].numel()), _OF_IMAGES))
        elif patches is not None and x.dim() > 1 and len(x) == int(patches.sum()):
            of_patches = number_tokens(x.detach().reshape(len(x), 1, x[:1].numel()), _OF_IMAGES)[:, 0]
            parts = torch.split(of_patches, patches.tolist())
            numbers.append(torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_value=-1))
        else:
            return None
    image: Tensor = torch.unique(torch.cat(numbers, 1), dim=0, return_inverse=True)[1]
    return image


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
