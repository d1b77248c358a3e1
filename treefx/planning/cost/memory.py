"""Measured memory: the most bytes that tensors hold while a block of code runs.

On the CPU three ways lie at hand, and one of them is wrong. An active ``TorchDispatchMode`` makes compiled code fall
back to eager, so it measures another program. The two that are right agree to the byte:

*  an allocator of our own around PyTorch's (``c10::SetCPUAllocator``), built once with the C++ compiler that inductor
   needs anyway: all tensor storage of all threads, cheap, with a curve over time;
*  the ``[memory]`` events of ``torch.profiler``, where there is no compiler: slow where there are many events.

Neither sees scratch memory inside of MKL or oneDNN, nor Python's own heap. On CUDA the caching allocator counts itself.

Example:
    >>> with track_peak() as peak:
    ...     loss.backward()
    >>> peak.bytes
"""

from __future__ import annotations

import ctypes
import gc
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

from treefx.errors import UnsupportedError
from treefx.kernels.code_files import code_folder, digest, is_private, write_whole

__all__ = ["Peak", "Source", "install_allocator", "quick_collections", "track_peak", "without_collections"]

Source = Literal["allocator", "profiler", "cuda"]

_CODE = r"""
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {
// Never destroyed, lock and table: tensors are freed after the statics of this library would be.
std::mutex& lock = *new std::mutex;
int64_t live = 0, peak = 0;
bool recording = false;
std::vector<int64_t> curve;  // pairs: nanoseconds, live bytes

void count(int64_t change) {
  std::lock_guard<std::mutex> guard(lock);
  live += change;
  if (live > peak) peak = live;
  if (recording) {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    curve.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    curve.push_back(live);
  }
}

struct Block { c10::DataPtr data; int64_t size; };
std::unordered_map<void*, Block>& blocks = *new std::unordered_map<void*, Block>;

void release(void* pointer) {
  std::unique_lock<std::mutex> guard(lock);
  auto found = blocks.extract(pointer);
  guard.unlock();  // PyTorch frees the block when `found` goes, after its address is out of the table
  if (found) count(-found.mapped().size);
}

// The context of what it hands out is the pointer itself, which callers of raw_allocate (oneDNN) insist on.
struct Counting final : c10::Allocator {
  c10::Allocator* inner;
  explicit Counting(c10::Allocator* given) : inner(given) {}
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr data = inner->allocate(size);
    void* pointer = data.get();
    if (pointer == nullptr) return data;
    count(static_cast<int64_t>(size));
    std::lock_guard<std::mutex> guard(lock);
    blocks.emplace(pointer, Block{std::move(data), static_cast<int64_t>(size)});
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }
};
}  // namespace

extern "C" {
void treefx_install() {
  static Counting counting(c10::GetCPUAllocator());
  c10::SetCPUAllocator(&counting, 100);
}
int64_t treefx_start(bool with_curve) {
  std::lock_guard<std::mutex> guard(lock);
  peak = live;
  recording = with_curve;
  curve.clear();
  return live;
}
int64_t treefx_peak() { std::lock_guard<std::mutex> guard(lock); return peak; }
int64_t treefx_curve_length() { std::lock_guard<std::mutex> guard(lock); recording = false; return curve.size(); }
void treefx_read_curve(int64_t* target) { std::copy(curve.begin(), curve.end(), target); }
}
"""


@dataclass
class Peak:
    """Hold the peak memory of a block of code; filled when the block ends.

    Attributes:
        bytes: the largest number of bytes held at once, above those held when the block began.
        source: the measuring source.
        curve: (seconds since the beginning, bytes above the beginning) at every allocation and release, if asked for.
    """

    bytes: int = 0
    source: Source = "allocator"
    curve: list[tuple[float, int]] = field(default_factory=list)


@contextmanager
def track_peak(
    device: torch.device | str = "cpu", *, curve: bool = False, source: Source | None = None
) -> Iterator[Peak]:
    """Measure the most bytes that tensors hold inside of the block.

    Blocks do not nest. The first use on the CPU compiles the counting allocator, which takes seconds and is kept on
    disk, and installs it for good; only storage made from then on is counted, so install it early where a release
    inside of the block matters (:func:`install_allocator`). The profiler never counts releases of older storage.

    Args:
        device: device to measure.
        curve: keep the held bytes over time as well; not on CUDA.
        source: "allocator" or "profiler" on the CPU; by default the allocator if it can be built.

    Yields:
        The measurement; read it after the block.

    Raises:
        UnsupportedError: no such measurement on this device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if curve or source not in (None, "cuda"):
            raise UnsupportedError(f"CUDA memory has source 'cuda' and no curve, got source={source!r}, curve={curve}")
        measure = _on_cuda(device)
    elif device.type == "cpu" and source != "cuda":
        wanted: Source = source or ("allocator" if install_allocator() else "profiler")
        measure = _by_profiler(curve) if wanted == "profiler" else _by_allocator(curve)
    else:
        raise UnsupportedError(f"memory can be measured on CPU and CUDA devices, got {device} and source={source!r}")
    gc.collect()  # or garbage of before is released inside of the block, and hides as much of its peak
    with measure as peak:
        yield peak


@contextmanager
def quick_collections() -> Iterator[None]:
    """Speed up the collections of :func:`track_peak` by freezing all earlier objects.

    Freezing them takes long, once for all.

    A process that has frozen objects by itself keeps all of them frozen: to thaw its own would make every collection
    of its long.
    """
    had_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not had_frozen:
            gc.unfreeze()


@contextmanager
def without_collections() -> Iterator[None]:
    """Make no collection of garbage in a block that makes very many objects without cycles: each visits all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def install_allocator() -> bool:
    """Count every CPU allocation from now on; False without a C++ compiler."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled allocator, installed."""
    compiler = shutil.which("c++") or shutil.which("g++")
    try:
        path = None if compiler is None else _built(compiler)
        if path is None:
            return None
        library = ctypes.CDLL(str(path))
    except OSError:  # the folder cannot be written, is full, or may hold no code that runs
        return None
    for name in ("treefx_start", "treefx_peak", "treefx_curve_length"):
        getattr(library, name).restype = ctypes.c_int64
    library.treefx_start.argtypes = [ctypes.c_bool]
    library.treefx_read_curve.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    library.treefx_install()
    return library


def _built(compiler: str) -> Path | None:
    """The shared library, from the cache or made now; None where the compiler does not work.

    Its name holds a digest of its bytes: a file that was cut off or changed would end the process when it is loaded.
    """
    about = f"{torch.__version__} {platform.machine()} {_CODE}"
    stem = f"allocator_{digest(about.encode())[:12]}"
    folder = code_folder()
    if folder is None:
        return None
    for path in sorted(folder.glob(f"{stem}_*.so")):
        if is_private(path) and path.name == f"{stem}_{digest(path.read_bytes())}.so":
            return path
        path.unlink()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        content = _compiled(compiler, Path(scratch))
    if content is None:
        return None
    path = folder / f"{stem}_{digest(content)}.so"
    write_whole(path, content)
    return path


def _compiled(compiler: str, folder: Path) -> bytes | None:
    installed = Path(torch.__file__).parent
    source, library = folder / "allocator.cpp", folder / "allocator.so"
    source.write_text(_CODE)
    flags = ["-O2", "-fPIC", "-shared", "-std=c++20", f"-I{installed / 'include'}"]
    command = [compiler, *flags, str(source), "-o", str(library), f"-L{installed / 'lib'}", "-lc10"]
    done = subprocess.run(command, capture_output=True, check=False)
    return library.read_bytes() if done.returncode == 0 else None


@contextmanager
def _by_allocator(curve: bool) -> Iterator[Peak]:
    library = _library()
    if library is None:
        raise UnsupportedError(
            "source='allocator' needs a C++ compiler, which was not found or failed; use source='profiler'"
        )
    peak, began = Peak(), time.monotonic_ns()
    held = library.treefx_start(curve)
    try:
        yield peak
    finally:
        peak.bytes = library.treefx_peak() - held
        length = library.treefx_curve_length()
        if length:
            events = (ctypes.c_int64 * length)()
            library.treefx_read_curve(events)
            pairs = zip(events[::2], events[1::2], strict=True)
            peak.curve = [((moment - began) / 1e9, live - held) for moment, live in pairs]


@contextmanager
def _by_profiler(curve: bool) -> Iterator[Peak]:
    peak = Peak(source="profiler")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        began = time.time_ns()
        yield peak
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = 0
    for event in sorted(events, key=lambda item: item.start_ns()):
        live += event.nbytes()
        peak.bytes = max(peak.bytes, live)
        if curve:
            peak.curve.append(((event.start_ns() - began) / 1e9, live))


@contextmanager
def _on_cuda(device: torch.device) -> Iterator[Peak]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    peak = Peak(source="cuda")
    try:
        yield peak
    finally:
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - held
