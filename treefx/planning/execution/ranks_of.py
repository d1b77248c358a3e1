"""Which processes train a compiled model together, and how they share it."""

from typing import Any

import torch.distributed as dist

from treefx.errors import UnsupportedError
from treefx.inspection.compiled_modules import modules_of
from treefx.planning.execution.ranks import Ranks

__all__ = ["ranks_of"]


def ranks_of(compiled: Any) -> Ranks:
    """The ranks of a model: sharded by FSDP2, wrapped by DDP, or this process by itself.

    Raises:
        UnsupportedError: the model is shared in a way of which parts know nothing.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    modules = list(dict.fromkeys(x for module in modules_of(compiled) for x in module.modules()))
    if any(isinstance(x, FullyShardedDataParallel) for x in modules):
        raise UnsupportedError(
            "plans run on models sharded by fully_shard (FSDP2), got FullyShardedDataParallel (FSDP1)"
        )
    sharded = [x for x in modules if isinstance(x, FSDPModule)]
    if sharded:
        from treefx.planning.execution.sharded import Sharded

        inside = {id(y) for x in sharded for y in x.modules() if y is not x}
        return Sharded([x for x in sharded if id(x) not in inside])
    wrappers = [x for x in modules if isinstance(x, DistributedDataParallel)]
    if wrappers:
        from treefx.planning.execution.replicated import Replicated

        return Replicated(wrappers[0])
    return Ranks()
