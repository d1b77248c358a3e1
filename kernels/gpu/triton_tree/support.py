"""Explain which inputs the generated kernels refuse; count their concurrent programs."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from treefx.errors import UnsupportedError
from treefx.kernels.gpu.triton_tree.configs import GFX942

__all__ = [
    "architecture",
    "architecture_name",
    "device_name",
    "device_refusal",
    "interpreted",
    "kind_refusal",
    "processors",
    "programs_per_head",
    "refusal",
    "refuse_capture",
    "triton_version",
]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OLDEST = (8, 0)
_AMD = "gfx942"
_HOPPER = 132
_BUSY, _WAVES = 0.9, 8
"""The share of the processors that have to have a program, and how many programs of one processor are tried for it."""
_BEGINNING = 4
"""How many tiles take as long as the boxes and first keys of a program: 5 us of 1.6 us each on an H100."""


def refusal(q: Tensor) -> str | None:
    """Return why the kernels cannot run tensors like ``q``, or ``None`` if they can."""
    reason = kind_refusal(q)
    if reason is not None:
        return reason
    return _refusal_on_cpu(q) if q.device.type == "cpu" else device_refusal(q.device)


def device_refusal(device: torch.device) -> str | None:
    """Return why the kernels run on no such device, or ``None`` if they do."""
    if device.type != "cuda":
        return f"must get tensors on a GPU of NVIDIA or AMD, got {device}: use impl='flex'"
    if torch.version.hip is not None:
        name = architecture_name(device)
        return None if name == _AMD else f"must run on {_AMD} where the GPU is AMD's, got {name}: use impl='flex'"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return f"must run on compute capability 8.0 or later, got {capability[0]}.{capability[1]}: use impl='flex'"
    return None


def architecture(device: torch.device) -> int:
    """Return a device's architecture as tables of tiles name it: compute capability times 10, or ``GFX942``."""
    if torch.version.hip is not None:  # AMD's have a compute capability too, of other numbers
        return GFX942
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def architecture_name(device: torch.device) -> str:
    """Return a device's compute capability, such as ``"9.0"``, or AMD's name of it, such as ``"gfx942"``."""
    if torch.version.hip is None:
        return ".".join(map(str, torch.cuda.get_device_capability(device)))
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def kind_refusal(q: Tensor) -> str | None:
    """Return why the kernels refuse this type in this environment, or ``None``."""
    if importlib.util.find_spec("triton") is None:
        return "must find the package triton, which is not installed: use impl='auto', or install triton"
    if q.dtype not in _DTYPES:
        return f"must get bfloat16, float16 or float32, got {q.dtype}: use impl='reference'"
    return None


def _refusal_on_cpu(q: Tensor) -> str | None:
    if not interpreted():
        return (
            "must get tensors on a CUDA device, got the CPU: use impl='auto' (Triton's interpreter runs the kernels on "
            "the CPU where TRITON_INTERPRET=1 was set before Triton was imported)"
        )
    if q.dtype == torch.bfloat16:
        return (
            "must not get bfloat16 under Triton's interpreter, whose products of it are wrong: use float32 or float16"
        )
    return None


def refuse_capture() -> None:
    """Raise where kernels cannot be compared and a failure would be recorded as wrong.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "attention must not be of a new kind while a CUDA graph is captured: its kernels are compared before they "
            "are used; run the step once before the capture"
        )


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def triton_version() -> tuple[int, ...]:
    """Return the first two numbers of Triton's version."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


def processors(device: torch.device) -> int:
    """Return how many processors a device has; those of a Hopper where there is none."""
    return properties.multi_processor_count if (properties := _properties(device)) else _HOPPER


def device_name(device: torch.device) -> str:
    """Return the name of a device, ``"cpu"`` where there is none."""
    return properties.name if (properties := _properties(device)) else "cpu"


def _properties(device: torch.device) -> Any:
    """Return properties of a device, the current one for CPU tensors; ``None`` without any.

    A process may have several, one unlike the other.
    """
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device if device.type == "cuda" else None)


def programs_per_head(lists: int, tiles: int, heads: int, processors: int) -> int:
    """Return the number of programs that share a key head's lists of tiles.

    Either so many that the programs of all heads keep the processors busy once, and each begins once; or one for each
    list, which restarts but leaves no processor without work while there are lists: long ones are worth that.

    Args:
        lists: of one head.
        tiles: in all of them.
        heads: key heads, of all elements of the batch.
        processors: of the device.
    """
    shares = [waves * processors // heads for waves in range(1, _WAVES + 1)]
    busy = [share * heads / (waves * processors) for waves, share in enumerate(shares, 1)]
    share, part = next(((s, b) for s, b in zip(shares, busy, strict=True) if b >= _BUSY), (lists, 1.0))
    if share >= lists or (tiles + _BEGINNING * share) / part > tiles + _BEGINNING * lists:
        return max(1, lists)
    return share
