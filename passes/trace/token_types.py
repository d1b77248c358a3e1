"""Types of tokens that are zero throughout a batch: text without images.

Before, in a graph whose mask is causal but for blocks of equal types::

    mask: "b8[B, T, T]" = causal | (blocks(token_type_ids)[:, :, None] == blocks(token_type_ids)[:, None, :])

After, which constants prove causal::

    zeros: "i64[B, T]" = full([B, T], 0);  mask = causal | (blocks(zeros)[:, :, None] == blocks(zeros)[:, None, :])
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from treefx.passes.trace.trace import NAME

__all__ = ["read_types_as_zeros"]

_TYPES = "token_type_ids"


def read_types_as_zeros(gm: fx.GraphModule, zero: Collection[int]) -> None:
    """Read all-zero token types as zeros, so that masks with them are causal.

    A type of image tokens makes the attention of a block of them bidirectional. Text has no such block, and its zeros
    are no values of a call any more: calls with others have another analysis (``InputValues`` is part of its key).
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in [placeholders[i] for i in sorted(zero)]:
        if _TYPES in node.meta.get(NAME, "") and node.users:
            value = node.meta["val"]
            with gm.graph.inserting_after(placeholders[-1]):
                given = {"dtype": value.dtype, "device": value.device}
                zeros = gm.graph.call_function(torch.ops.aten.full.default, ([], 0), given)
            zeros.args, zeros.meta["val"] = (list(value.shape), 0), value.new_zeros(value.shape)
            node.replace_all_uses_with(zeros)
