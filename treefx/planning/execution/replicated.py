"""Run plans on a model in ``DistributedDataParallel``, with one gradient reduction.

DDP alone would reduce in the backward of every part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from treefx.errors import UnsupportedError
from treefx.planning.execution.ranks import Ranks, agree

__all__ = ["Replicated"]


class Replicated(Ranks):
    """The ranks of a wrapped model.

    Args:
        wrapper: the model's wrapper.

    Raises:
        UnsupportedError: it reduces gradients with a hook of its owner's.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        if wrapper._comm_hooks:
            raise UnsupportedError(
                "a plan reduces gradients by their mean over all ranks, but a communication hook is registered with "
                "DistributedDataParallel; leave out register_comm_hook"
            )
        self.wrapper, self.groups, self.device = wrapper, (wrapper.process_group,), wrapper.device
        self._flags = wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync

    def begin(self) -> None:
        self._flags = self.wrapper.require_backward_grad_sync, self.wrapper.require_forward_param_sync
        self._set(False, False)

    def end(self) -> None:
        self._set(*self._flags)

    def reduce(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Average `.grad` over all ranks, unless in `no_sync`."""
        if not self._flags[0]:
            return
        learned: list[Any] = [x for x in self.wrapper._module_parameters if x.requires_grad]
        there = agree(self, torch.tensor([x.grad is not None for x in learned]))
        waiting = []
        for parameter in (x for x, is_there in zip(learned, there.tolist(), strict=True) if is_there):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size(self.groups[0])
            waiting.append(dist.all_reduce(parameter.grad, group=self.groups[0], async_op=True))
        for work in waiting:
            work.wait()

    def _set(self, backward: bool, forward: bool) -> None:
        """Whether the next backward reduces gradients and the next forward sends buffers."""
        self.wrapper.require_backward_grad_sync, self.wrapper.require_forward_param_sync = backward, forward
