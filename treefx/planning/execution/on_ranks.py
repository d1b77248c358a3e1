"""Compute loss and gradients of one forest on several ranks, each with some tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.forests.context import use
from treefx.planning.execution.boundary import all_edges
from treefx.planning.execution.execute import Backward, Loss, Model, scalar
from treefx.planning.execution.ranks import Ranks, apart
from treefx.runtime.cut import ContextRow

__all__ = ["run_on_ranks"]


def run_on_ranks(model: Model, row: ContextRow, loss: Loss, backward: Backward) -> Tensor:
    """Forward and backward of this rank's tokens, among those of the others.

    Every rank gets the log-probabilities of all edges and computes the whole loss of them, so that it may read whole
    rows, and goes back through its own.

    Raises:
        RankError: the loss failed on another rank.

    Returns:
        This rank's share of the loss, an equal one: the sum over the ranks is the whole's.
    """
    with use(row):
        output = model.compiled(**row.model_inputs(), **model.kwargs)
    own = model.logprobs(output, row)
    others = own.new_zeros(len(row.uncut.edges), *own.shape[1:])
    others[row.edge_index] = own.detach()
    ranks = _Together(row.cut.run.group, own.device)
    dist.all_reduce(others, group=ranks.groups[0])
    with apart(ranks):  # no rank runs the backward while another cannot
        value = scalar(loss(others.index_copy(0, row.edge_index, own), all_edges(row.uncut)))
    if value.requires_grad:
        backward([value], [None], [])
    return value.detach() / row.cut.run.size


class _Together(Ranks):
    """Connect the ranks of a forest for errors alone: there is nothing to gather or reduce."""

    def __init__(self, name: str, device: torch.device) -> None:
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
        self.groups = (group,)
        self.device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
