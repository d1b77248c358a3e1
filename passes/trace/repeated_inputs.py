"""Masks of tokens that come in repeated over features, where Dynamo has cut the model behind the ``expand``.

Before, with ``mask`` a view of one number per token, stride 0 along its features::

    placed: "f32[B, T, D]" = masked_scatter(x, mask, vectors)                     # mask: "b8[B, T, D]"

After, which says so::

    one: "b8[B, T, 1]" = slice(mask, 2, 0, 1);  all = expand(one, [B, T, D]);  placed = masked_scatter(x, all, vectors)
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

__all__ = ["read_repeated_once"]

aten = torch.ops.aten


def read_repeated_once(gm: fx.GraphModule, repeated: Collection[int]) -> None:
    """Let one entry per token stand for inputs [B, T, D] that repeat it in all calls of the analysis."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in [placeholders[i] for i in sorted(repeated) if placeholders[i].users]:
        value = node.meta["val"]
        with gm.graph.inserting_after(placeholders[-1]):
            one = gm.graph.call_function(aten.slice.Tensor, (node, 2, 0, 1))
        with gm.graph.inserting_after(one):
            all_of_it = gm.graph.call_function(aten.expand.default, (one, list(value.shape)))
        node.replace_all_uses_with(all_of_it, delete_user_cb=lambda user, one=one: user is not one)
        one.meta["val"] = value[:, :, :1]
        all_of_it.meta["val"] = one.meta["val"].expand(value.shape)
