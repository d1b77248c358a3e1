"""Note the keys of a graph's outputs for later graphs of a model that Dynamo cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from treefx.passes.analysis import Analysis
from treefx.passes.labels.facts import Axis, Dims
from treefx.passes.labels.token_inputs import Tokens
from treefx.runtime.origins import are_own, note_tokens, note_vectors, numbers_of_vectors
from treefx.runtime.padding import Grid, Padding

__all__ = ["is_per_token", "note_of_outputs"]


def is_per_token(dims: Dims) -> bool:
    """Whether a value is [B, T, ...]."""
    axes = [[factor.axis for factor in dim if factor.axis is not Axis.PLAIN] for dim in dims]
    return axes[:2] == [[Axis.ROW], [Axis.TOKEN]] and not any(axes[2:]) and all(len(dim) == 1 for dim in dims[:2])


def note_of_outputs(analysis: Analysis) -> Callable[[Sequence[Any], Sequence[Any]], None] | None:
    """Return a function that notes the keys of a graph's outputs in a call.

    For graphs that embed tokens, or put vectors of images between them.

    None where a key would have to be made of the bits of vectors, or of pixels: the graph behind may not want it.
    """
    tokens = analysis.tokens
    assert tokens is not None
    outputs = [i for i, dims in analysis.packed_outputs.items() if is_per_token(dims)]
    inputs = analysis.gm.graph.find_nodes(op="placeholder")
    given = [inputs[i] for i in analysis.identity_without(frozenset()) if inputs[i] not in tokens.made]
    cheap = all(node.meta["val"].dim() == 2 for node in given)
    by_number = any(images is not None and not images.made for _, images in analysis.placed)
    if analysis.blocks or by_number or not outputs or not cheap:
        return None
    padding, joined = Padding(analysis), _joined_vectors(analysis.gm, tokens)

    def note(tensors: Sequence[Any], results: Sequence[Any]) -> None:
        grid = Grid(analysis, analysis.known.with_parts(tensors), resolved=padding.resolved)
        keys, places = padding.identity(grid, frozenset()), None
        if are_own(tensors):
            places = padding.own_positions(grid, frozenset())
        for i in outputs:
            note_tokens(results[i], [*keys, *(places or ())], own=places is not None)
        for i, positions in joined.items():
            numbers = numbers_of_vectors([tensors[position] for position in positions])
            if numbers is not None:
                note_vectors(results[i], lambda found=numbers: found)  # type: ignore[misc]

    return note


def _joined_vectors(gm: fx.GraphModule, tokens: Tokens) -> dict[int, list[int]]:
    """Map outputs that join vectors of a tower from several inputs to these inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    items: Any = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    joins = torch.ops.aten.cat.default
    found: dict[int, Any] = {i: x.args for i, x in enumerate(items) if isinstance(x, fx.Node) and x.target is joins}
    return {
        i: [inputs.index(node) for node in parts]
        for i, (parts, *dim) in found.items()
        if dim in ([], [0]) and all(node in tokens.vectors for node in parts)
    }
