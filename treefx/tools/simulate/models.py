"""List the paper's models, and their sub-layers with tensor-parallel collectives."""

from dataclasses import dataclass

from treefx.tools.simulate.hardware.gemm import Gemm

__all__ = ["LARGE", "MODELS", "SMALL", "SUBLAYERS", "Model", "SubLayer", "sublayers"]


@dataclass(frozen=True)
class Model:
    """Describe a transformer of width ``hidden`` on ``tokens``, sliced over ``degrees``."""

    name: str
    hidden: int
    tokens: int
    degrees: tuple[int, ...]


SMALL = (Model("Mega-GPT-2", 3072, 16384, (8, 16)), Model("T-NLG", 4256, 8192, (8, 16)))
LARGE = (
    Model("GPT-3", 12288, 2048, (32,)),
    Model("PALM", 18432, 4096, (32,)),
    Model("MT-NLG", 20480, 4096, (32,)),
)
MODELS = (*SMALL, *LARGE)
"""Degrees from notes on the paper, section 5.2; widths, and the tokens of a batch (16, 8, 2, 4 and 4 rows of 1,024),
from memory. How compute and communication compare does not depend on the tokens, but for cache and last wave."""

SUBLAYERS = {"OP": 1, "FC-2": 4, "FC-1": 4, "IP": 3}
"""Sub-layer to its inner dimension, as a multiple of the width, before slicing: the output projection and the second
linear layer forward, the first linear layer and the input projection backward."""


@dataclass(frozen=True)
class SubLayer:
    """A product whose output is summed over ``ranks`` GPUs."""

    model: str
    name: str
    ranks: int
    gemm: Gemm


def sublayers(models: tuple[Model, ...] = MODELS) -> list[SubLayer]:
    """All sub-layers of some models at all their degrees."""
    return [
        SubLayer(model.name, name, ranks, Gemm(model.tokens, inner * model.hidden // ranks, model.hidden))
        for model in models
        for ranks in model.degrees
        for name, inner in SUBLAYERS.items()
    ]
