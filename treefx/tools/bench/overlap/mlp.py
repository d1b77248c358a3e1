"""An MLP shared by the ranks of a link, and ways to compile it with and without chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from treefx.passes.overlap import Rates, overlap_collectives
from treefx.passes.overlap.producers import find_sites
from treefx.tools.bench.overlap.link import EmulatedLink

__all__ = ["LAYOUTS", "Block", "Way", "compile_block", "shared_block"]

LAYOUTS = {"all_reduce": Replicate(), "gather_scatter": Shard(1)}
"""How tokens stand before and after the MLP: on every rank, or shared out as in sequence parallelism."""


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


class Block(nn.Module):
    """Wrap the MLP in a module with inputs that ``parallelize_module`` prepares."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp = _MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y


def shared_block(width: int, hidden: int, collectives: str, link: EmulatedLink) -> Block:
    """The same weights on all ranks' shares, every time."""
    torch.manual_seed(0)
    layout = LAYOUTS[collectives]
    plan: dict[str, Any] = {
        "mlp": PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=layout),
    }
    mesh = DeviceMesh.from_group(link, "cpu")
    block = parallelize_module(Block(width, hidden), mesh, plan, src_data_rank=None)
    assert isinstance(block, Block)
    return block


@dataclass
class Way:
    """One way to run the block.

    Attributes:
        call: The compiled block.
        chosen: Into how many chunks each place was cut, those of the forward first; filled by the first calls.
    """

    call: Callable[[Tensor], Tensor]
    chosen: list[int] = field(default_factory=list)


def compile_block(block: Block, chunks: int | Rates) -> Way:
    """Compile the block by AOTAutograd with chunked products and collectives."""
    chosen: list[int] = []

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        gm.graph.eliminate_dead_code()
        chosen.extend(chunks.chunks(site) if isinstance(chunks, Rates) else chunks for site in find_sites(gm.graph))
        overlap_collectives(gm.graph, chunks)
        gm.recompile()
        return boxed_nop(gm, inputs)

    return Way(torch.compile(block, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler)), chosen)
