"""Number tokens by the image vectors that stand in place of their embeddings.

Before, two rows with an image of two patches each (``#`` is one id, whose places take the vectors in order)::

    ids     7 # # 8 | 7 # # 9        images  A, A        or  A, B

After, the number of each token's vector, -1 elsewhere; equal images are one image, by the bits of their pixels::

    places  -1 0 1 -1 | -1 0 1 -1                        or  -1 0 1 -1 | -1 2 3 -1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.inputs.sizes import concrete
from treefx.kernels.memory import is_on_device, on_host, together
from treefx.passes.labels.facts import Axis, Dims, Factor, shape_of
from treefx.passes.labels.images import Images
from treefx.passes.labels.laws.placed import Placed
from treefx.runtime.origins import OTHER_ORIGIN, numbers_of_vectors
from treefx.runtime.token_bits import OF_TOKENS, number_tokens

__all__ = ["number_places"]

_OF_IMAGES: Dims = (*OF_TOKENS, (Factor(Axis.PLAIN, -1),))


def number_places(
    law: Placed, images: Images | None, value: Callable[[fx.Node], Any], sizes: Mapping[Any, int]
) -> Tensor:
    """Return int64 [B, T]: equal at places with equal vectors, -1 at embedded tokens.

    Args:
        law: The places and sources of vectors.
        images: The images behind them; without, each vector is known by its place alone and is shared with none.
        value: Gives the full value of a function of the inputs.
        sizes: Values of symbols in the call.

    Raises:
        UnsupportedError: The vectors have changed since the call.
        RuntimeError: There are more places than vectors, which eager mode refuses as well.
    """
    mask: Tensor = value(law.mask)[..., 0]
    places = mask.reshape(-1).cumsum(0).reshape(mask.shape) - 1
    features = shape_of(law.target)[2]
    vectors = int(torch.Size(concrete(tuple(shape_of(law.source)), sizes)).numel()) // features
    if mask.device.type == "cpu" and int(mask.sum()) > vectors:
        raise RuntimeError(
            f"masked_scatter: expected a vector for each of the {int(mask.sum())} tokens of images, got {vectors}; "
            "give as many images (or videos) as the token ids name"
        )
    numbers = places
    if images is not None:
        elements = concrete(images.elements, sizes)
        if elements % features == 0:
            each = elements // features
            given = [value(node) for node in images.inputs]
            image = numbers_of_vectors(given) if images.made else _number_images(given)
            if image is None:
                raise UnsupportedError(OTHER_ORIGIN)
            image = image if is_on_device(places) else on_host(image)
            numbers = image[(places // each).clamp(0, len(image) - 1)] * each + places % each
    return torch.where(mask, numbers, -1)


def _number_images(inputs: Sequence[Tensor]) -> Tensor:
    """int64 [n], equal for images that agree on the bits of all inputs [n, ...]."""
    tokens = [x.detach().reshape(len(x), 1, x[:1].numel()) for x in inputs]  # an image is a row of one token
    numbers = torch.cat(together([number_tokens(x, _OF_IMAGES) for x in tokens]), 1)
    image: Tensor = torch.unique(numbers, dim=0, return_inverse=True)[1]
    return image
