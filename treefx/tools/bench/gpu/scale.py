"""Set the size and place of a stage's cases: bfloat16 on a GPU, tiny on the CPU."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.memory import send
from treefx.tools.bench.attention.cuda import device_ms
from treefx.tools.bench.attention.trees import Tree

__all__ = ["Heads", "Scale", "draw"]


def _unreported(report: str | dict[str, Any]) -> None:
    """Drop a report: nothing listens."""


@dataclass(frozen=True)
class Scale:
    """Where a stage runs.

    Attributes:
        rehearsal: on the CPU, generated kernels in Triton's interpreter: every line runs, no figure means anything.
        turn: a file by which processes side by side agree who has the device.
        together: how many processes compile side by side before the first of them measures.
        compiled_by: by ``time.time``: from then on a process measures although others still compile.
        layers: of the models of whole steps; those of the model by default.
        report: takes a record that is complete before its case ends, or the name of the step that begins.
    """

    rehearsal: bool
    turn: Path | None = None
    together: int = 0
    compiled_by: float = float("inf")
    layers: int | None = None
    report: Callable[[str | dict[str, Any]], None] = _unreported

    @property
    def device(self) -> str:
        """Of all tensors."""
        return "cpu" if self.rehearsal else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v; Triton's interpreter multiplies bfloat16 wrongly."""
        return torch.float32 if self.rehearsal else torch.bfloat16

    @property
    def processors(self) -> int:
        """Programs that run at once, at least."""
        return 1 if self.rehearsal else torch.cuda.get_device_properties(0).multi_processor_count

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Time of a call on the device."""
        if not self.rehearsal:
            return device_ms(call)
        began = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - began)

    def synchronize(self) -> None:
        """Wait for the device, whose errors arrive here."""
        if not self.rehearsal:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Heads:
    """Heads of an attention: how many of queries and of keys, and their widths."""

    queries: int
    keys: int
    width: int
    value_width: int

    def __str__(self) -> str:
        widths = {self.width, self.value_width}
        return f"{self.queries}:{self.keys} heads of {' and '.join(map(str, sorted(widths)))}"


def draw(scale: Scale, tree: Tree, heads: Heads) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return random tensors: ``subtree_end``, q, k and v with grad, and a gradient."""
    ends = send(tree.subtree_end(), scale.device, keep=True)
    generator = torch.Generator(scale.device).manual_seed(0)

    def normal(count: int, width: int) -> Any:
        values = torch.randn(1, len(ends), count, width, generator=generator, device=scale.device)
        return values.to(scale.dtype).transpose(1, 2)

    shapes = (heads.queries, heads.width), (heads.keys, heads.width), (heads.keys, heads.value_width)
    leaves = [normal(*shape).requires_grad_() for shape in shapes]
    return ends, leaves, normal(heads.queries, heads.value_width)
