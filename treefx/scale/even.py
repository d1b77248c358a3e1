"""Pad packed rows for models with tokens sharded over ranks (sequence parallelism)."""

from typing import Any

import torch

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset
from treefx.inspection.compiled_modules import modules_of
from treefx.runtime.converted.sequence_parallel import split_over
from treefx.runtime.cut import PartTokens

__all__ = ["pad_row"]


def pad_row(forest: Forest, model: Any) -> EdgeSubset:
    """Return the packed row of a forest, padded to a length that the model's ranks divide.

    PyTorch requires equally many tokens on all ranks: otherwise tracing fails, or ranks crash. The padding stands
    behind the row, is seen by no token and has no edge, so that no loss and no gradient changes.
    `treefx.forward_backward` pads the parts of a plan by itself.

    Args:
        forest: the forest.
        model: the model, compiled or not, in sequence parallelism (`parallelize_module`); any other needs no more than
            the forest.

    Returns:
        The packed row as a forest, [1, N'] with padding behind its N tokens.

    Raises:
        InputError: `forest` is no Forest.

    Example:
        >>> row = treefx.scale.pad_row(forest, model)
        >>> with treefx.use(row):
        ...     out = compiled(**row.model_inputs(), use_cache=False)
        >>> treefx.losses.sft(treefx.edge_logprobs(out.logits, row), row).backward()
    """
    if not isinstance(forest, Forest):
        raise InputError(f"pad_row expected a treefx.Forest, got {type(forest).__name__}; build it with from_sequences")
    host = forest if forest.device.type == "cpu" else forest.to("cpu")
    nothing = torch.zeros(0, dtype=torch.int64)
    own, ranks = torch.arange(host.num_tokens), split_over(*modules_of(model))
    return PartTokens(forest, host, own, nothing, nothing, ranks).row(torch.arange(len(host.edges)), None)
