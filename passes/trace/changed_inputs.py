"""Inputs that a graph changes are read once, before the change.

AOTAutograd leaves one ``copy_`` per changed input at the end of the forward. Its partitioner may then save that input
for the backward, which recomputes values of it from the result of the ``copy_``: in PyTorch's own
backends, a counter that is raised twice in one forward gives wrong gradients.

Before::

    add: "i64[]" = add(steps, 1);  add_1: "i64[]" = add(add, 1);  copy_(steps, add_1)

After::

    as_read: "i64[]" = treefx.as_read(steps);  add: "i64[]" = add(as_read, 1);  ...;  copy_(steps, add_1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["read_changed_inputs_once"]


@torch.library.custom_op("treefx::as_read", mutates_args=())
def as_read(x: Tensor) -> Tensor:
    """Copy ``x`` by an opaque operator, which no partitioner or pass removes or repeats."""
    return x.clone()


@as_read.register_fake
def _(x: Tensor) -> Tensor:
    return x.clone()


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


as_read.register_autograd(_backward)


def read_changed_inputs_once(gm: fx.GraphModule) -> None:
    """Make all readers of a written input of ``gm`` read one copy; ``gm`` is functional."""
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        source = copy.args[0]
        readers = [user for user in source.users if user is not copy]
        if readers:
            with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
                read = gm.graph.call_function(torch.ops.treefx.as_read.default, (source,))
            read.meta = dict(source.meta)
            source.replace_all_uses_with(read, delete_user_cb=lambda user, readers=readers: user in readers)
    gm.recompile()
