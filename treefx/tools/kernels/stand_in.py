"""Stand in for a device: Triton binds, specialises and looks kernels up as on one.

Only the compiler and the launch are stand-ins, so tensors lie on the CPU and no result is written: it shows the kernels
a host would launch, their arguments, and the cost on the host.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor

from treefx.kernels import checks, memory
from treefx.kernels.gpu.triton_tree import paths, small_launches, support, tuning
from treefx.kernels.gpu.triton_tree.codegen import kernel_module
from treefx.kernels.gpu.triton_tree.small_launches import scratch_bytes
from treefx.kernels.tiles import tree_blocks
from treefx.kernels.tiles.tree_blocks import forget_blocks

__all__ = ["HOPPER", "Device", "on_device", "standing_in"]

_BEFORE_ARGUMENTS = 5
"""What Triton's launcher gets between the stream and a kernel's arguments."""


@dataclass(frozen=True)
class Device:
    """What there is to know of a device.

    Attributes:
        name: what it is called.
        capability: for which it compiles.
        processors: how many it has.
        amd: AMD's name of its architecture, if it is one of theirs.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    amd: str = ""


HOPPER = Device("a Hopper that is not there", (9, 0), 132)


class Driver:
    """Of a device that is not there."""

    def __init__(self, device: Device) -> None:
        self.arch = 10 * device.capability[0] + device.capability[1]
        self.amd = device.amd.partition(":")[0]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", self.amd, 64) if self.amd else GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Kernel:
    """Record a compiled kernel's launches, and take memory for descriptors as Triton does."""

    function = packed_metadata = None

    def __init__(self, source: Any, launched: Callable[[str], object]) -> None:
        self.source, self.launched = source, launched
        self.reads_low = "packed_keys" in source.arg_names and source.arg_names.index("Low")
        self.scratch = [scratch_bytes(source, has_low=has_low) for has_low in (False, True)]

    def launch_metadata(self, *_: Any) -> None:
        return None

    def result(self) -> "Kernel":
        return self

    def _init_handles(self) -> None:
        return None

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        from triton.compiler import CompiledKernel

        run: Callable[..., None] = CompiledKernel.__getitem__(self, grid)
        return run

    def run(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        from triton.runtime import _allocation

        self.launched(self.source.__name__)
        if self.reads_low is not False:
            has_low = given[_BEFORE_ARGUMENTS + self.reads_low] is not None
            _allocation._allocator.get()(x * y * z * self.scratch[has_low], 128, stream)


@contextmanager
def standing_in(
    compiled: Callable[[str], object], launched: Callable[[str], object], stands_for: Device = HOPPER
) -> Iterator[None]:
    """Let Triton and treefx believe in the device.

    Args:
        compiled: is told the name of every kernel that is compiled.
        launched: is told the name of every kernel that is launched.
        stands_for: the device.
    """
    import triton
    from triton.runtime import _allocation, driver

    def compile(src: Any, *_: Any, **__: Any) -> Kernel:
        compiled(src.fn.__name__)
        return Kernel(src.fn, launched)

    replaced: list[tuple[Any, str, Any]] = [
        (triton.compiler, "compile", compile),
        (driver, "_active", Driver(stands_for)),
        (torch.version, "hip", "6.4" if stands_for.amd else None),
        (torch.cuda, "get_device_capability", lambda device=None: stands_for.capability),
        (torch.cuda, "get_device_name", lambda device=None: stands_for.name),
        (torch.cuda, "get_device_properties", lambda device=None: _properties(stands_for)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (fake_tensor, "init_gpu_context", lambda device: None),  # PyTorch 2.11 would start the driver
        (support, "refusal", lambda q: None),
        (small_launches, "scratch", lambda size, *_: torch.empty(size, dtype=torch.int8)),
        (paths, "_verdicts", {}),
        (paths, "largest_error", lambda got, wanted: 0.0),  # nothing was written
        (checks, "relative_error", lambda got, wanted: 0.0),
        (triton.testing, "do_bench", lambda run, **_: (run(), 1.0)[1]),
    ]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(patch.object(module, name, value))
        allocator = _allocation._allocator.set(_allocation.NullAllocator())
        _forget_kernels()
        try:
            yield
        finally:
            _allocation._allocator.reset(allocator)
            _forget_kernels()


def _properties(one: Device) -> SimpleNamespace:
    return SimpleNamespace(multi_processor_count=one.processors, name=one.name, gcnArchName=one.amd)


@contextmanager
def on_device() -> Iterator[None]:
    """Let tensors on the CPU count as the device's, and moved tensors as its copies."""
    with (
        patch.object(tree_blocks, "is_on_device", lambda tensor: True),
        patch.object(memory, "_moved", lambda host, device: host.clone()),
    ):
        try:
            yield
        finally:
            memory._sent.clear()
            forget_blocks()


def _forget_kernels() -> None:
    """What was compiled for the stand-in belongs to it."""
    from treefx.kernels.gpu.triton_tree.row_kernels import finish_queries, prologue, sum_parts

    forget_blocks()
    tuning._findings.cache_clear()
    kernel_module.cache_clear()
    for kernel in (sum_parts, prologue, finish_queries):
        kernel.device_caches.clear()
    for name in [name for name in sys.modules if name.startswith("treefx_kernel_")]:
        del sys.modules[name]
