"""Kernels compiled up to a text that a test reads: the assembler takes a third of the time, machine code the rest."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from treefx.kernels.gpu.triton_tree.configs import GFX942
from treefx.kernels.gpu.triton_tree.launch import Launch
from treefx.tools.kernels.ahead_of_time import compile_kernel

__all__ = ["Stages", "compile_to"]


@dataclass
class Stages(BaseException):
    """End a compilation, and hold what it made.

    Attributes:
        asm: the text of each stage, by its name.
        metadata: what the stages have found out.
    """

    asm: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def compile_to(last: str, launch: Launch, arch: int) -> Stages:
    """Compile the kernel of a launch up to a stage, ``"ttgir"`` or ``"ptx"``, by Triton's own stages."""
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend

    backend_of_arch = HIPBackend if arch == GFX942 else CUDABackend
    found, add_stages = Stages(), backend_of_arch.add_stages

    def add(backend: Any, stages: dict[str, Any], *given: Any) -> None:
        add_stages(backend, stages, *given)
        for name, make in stages.items():
            stages[name] = lambda module, metadata, name=name, make=make: kept(name, make(module, metadata), metadata)

    def kept(name: str, module: Any, metadata: dict[str, Any]) -> Any:
        found.asm[name] = str(module)
        if name == last:
            found.metadata = dict(metadata)
            raise found
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_of_arch, "add_stages", add)
        try:
            compile_kernel(launch, arch)
        except Stages:
            return found
    raise AssertionError(f"{last} must be a stage of Triton's, got {[*found.asm]}")
