"""Compile launches for a GPU that need not be there, and read the assembler's report."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.errors import UnsupportedError
from treefx.kernels.gpu.triton_tree.configs import GFX942
from treefx.kernels.gpu.triton_tree.launch import Launch
from treefx.tools.kernels import amdgcn
from treefx.tools.kernels.barriers import races, unmet_releases, unmet_stores
from treefx.tools.kernels.instructions import disassembled, instructions_of_loops
from treefx.tools.kernels.operands import beside_products, overwritten_operands
from treefx.tools.kernels.pipeline import copies_ahead

__all__ = ["CompileReport", "compile_kernel", "compile_launch"]

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
}
_REGISTER = 4
"""Bytes of a lane's register."""


@dataclass(frozen=True)
class CompileReport:
    """What became of one kernel.

    Attributes:
        registers: per thread.
        spill_bytes: stores of registers to local memory, per thread.
        shared_bytes: of a program.
        wgmma: warpgroup matrix instructions (Hopper) in the PTX.
        tcgen05: fifth-generation ones (Blackwell).
        mma: warp-level ones (``mma.sync``).
        setmaxnreg: whether registers move between warps, the mark of warp specialisation.
        warnings: the assembler's C75xx performance warnings.
        races: where warps may overwrite what others, or products under way, still read; ``None`` if all warps do the
            same.
        prefetch: copies that stay under way while a tile is used, for every loop with products; ``None`` if some warps
            only load.
        loop_instructions: what a thread executes per tile, for every loop with products (in each group of warps).
        overlap: exponentials that a thread computes while products run, for every end of all products.
        mfma: AMD's matrix instructions.
        scalar_spills: scalar registers (AMD) that lie in lanes of vector registers.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    tcgen05: int
    mma: int
    setmaxnreg: bool
    warnings: tuple[str, ...]
    races: tuple[str, ...] | None = None
    prefetch: tuple[int, ...] | None = None
    loop_instructions: tuple[int, ...] = ()
    overlap: tuple[int, ...] = ()
    mfma: int = 0
    scalar_spills: int = 0


def compile_launch(launch: Launch, arch: int) -> CompileReport:
    """Compile the kernel of a launch for capability ``arch / 10`` or ``GFX942``, and read the result."""
    log, compiled = compile_kernel(launch, arch)
    return _report_of_amd(compiled) if arch == GFX942 else _report(log, compiled)


def compile_kernel(launch: Launch, arch: int) -> tuple[str, Any]:
    """Compile the kernel of a launch for compute capability ``arch / 10`` or ``GFX942``; needs no device.

    Returns:
        What the assembler said, and Triton's compiled kernel.

    Raises:
        UnsupportedError: Triton interprets kernels in this process.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if triton.knobs.runtime.interpret:
        raise UnsupportedError("compiling ahead of time must run without TRITON_INTERPRET: unset it")
    signature, constants, attributes = _specialised(launch)
    language = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = language(launch.kernel, signature, constants, attributes)
    with _assembler_log() as log:
        target = GPUTarget("hip", "gfx942", 64) if arch == GFX942 else GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options=launch.options)
    return log.getvalue(), compiled


@contextlib.contextmanager
def _assembler_log() -> Iterator[io.StringIO]:
    """Collect what ptxas prints; a kernel from the cache would print nothing."""
    import triton

    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        yield log


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Specialise arguments as Triton does at a launch: absent, constant, multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and special and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, Tensor) or (special and value % 16 == 0):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _report_of_amd(compiled: Any) -> CompileReport:
    text = compiled.asm["amdgcn"]
    noted, loops = amdgcn.metadata_of(text), amdgcn.names_in_loops(amdgcn.kernel_of(text, compiled.metadata.name))
    return CompileReport(
        registers=noted.registers,
        spill_bytes=_REGISTER * noted.spills,
        shared_bytes=max(compiled.metadata.shared, noted.shared_bytes),
        wgmma=0,
        tcgen05=0,
        mma=0,
        setmaxnreg=False,
        warnings=(),
        loop_instructions=tuple(counts.total() for counts in loops),
        mfma=len(re.findall(r"\bv_s?mfmac?_", text)),
        scalar_spills=noted.scalar_spills,
    )


def _report(log: str, compiled: Any) -> CompileReport:
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    products = [len(re.findall(name, ptx)) for name in (r"wgmma\.mma_async", r"tcgen05\.mma", r"\bmma\.sync")]
    sass = disassembled(compiled.asm["cubin"]) if any(products) else ""  # it is read for loops with products only
    specialised = "ttg.warp_specialize(" in ttgir
    unmet = (*unmet_releases(ptx), *unmet_stores(ptx))
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores", log)
    return CompileReport(
        registers=max(int(number) for number in registers),
        spill_bytes=max(int(number) for number in spills),
        shared_bytes=compiled.metadata.shared,
        wgmma=products[0],
        tcgen05=products[1],
        mma=products[2],
        setmaxnreg="setmaxnreg" in ptx,
        warnings=tuple(sorted(set(re.findall(r"C75\d\d", log)))),
        races=(*races(ttgir), *unmet, *overwritten_operands(sass)) if specialised else None,
        prefetch=None if specialised else copies_ahead(ttgir),
        loop_instructions=instructions_of_loops(sass),
        overlap=beside_products(sass),
    )
