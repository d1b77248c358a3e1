"""Which of the two forms of a kernel runs: warp-specialised (Hopper, 16-bit types) or plain.

The warp-specialised form is checked against the plain one, on the tensors at hand, the first time that a process uses
it for an attention of its kind. If it cannot be compiled or differs, the plain form takes over with one warning.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treefx.errors import InputError, UnsupportedError
from treefx.kernels.common import relative_error
from treefx.kernels.gpu.triton_tree.configs import default_config
from treefx.kernels.gpu.triton_tree.launch import Attention
from treefx.kernels.gpu.triton_tree.support import interpreted

__all__ = [
    "PATHS",
    "checked",
    "forced_path",
    "keys_refusal",
    "on_path",
    "path_of_keys",
    "refused_widths",
    "warp_refusal",
]

PATHS = ("plain", "warp")
_WIDEST, _WIDEST_TOGETHER = 192, 320
"""Features of a head, and of a key and a value together, above which the gradients of both spill registers."""
_TOLERANCE = 0.02
"""Relative error between the forms, in 16-bit types: a wrong tile is off by far more."""
_ALIGNMENT = 16
"""Bytes, of what a tensor descriptor starts at and steps by."""
_FEATURES = 8
"""Features of a 16-bit type in that many bytes."""

_verdicts: dict[Hashable, bool] = {}


def forced_path() -> str | None:
    """Return the path that ``TREEFX_KERNEL_PATH`` demands, if any.

    Raises:
        InputError: it is set to something else.
    """
    path = os.environ.get("TREEFX_KERNEL_PATH") or None
    if path is not None and path not in PATHS:
        raise InputError(f"TREEFX_KERNEL_PATH must be one of {', '.join(PATHS)}, or unset, got {path!r}")
    return path


def warp_refusal(attention: Attention, tensors: Sequence[Tensor] = ()) -> str | None:
    """Return why the warp-specialised form cannot run this attention, or ``None`` if it can.

    Args:
        attention: the attention.
        tensors: what is read beside q, k and v: the gradient, in the backward.
    """
    inputs = attention.inputs
    if not interpreted():
        if torch.cuda.get_device_capability(inputs.q.device) != (9, 0):
            return "it needs compute capability 9.0"
        if inputs.q.dtype == torch.float32:
            return "it needs a 16-bit type"
    if inputs.boundary is not None:
        return "keys from outside take the plain path"
    if attention.code.loads_pairs:
        return "the score loads by query and key"
    refusal = refused_widths(attention.request.head_dim, attention.request.value_dim)
    if refusal is not None:
        return refusal
    if not all(_aligned(tensor) for tensor in (inputs.q, inputs.k, inputs.v, *tensors)):
        return f"a tensor does not step by multiples of {_ALIGNMENT} bytes"
    return None


def refused_widths(head_dim: int, value_dim: int) -> str | None:
    """Return why the warp-specialised form cannot run heads of these widths, or ``None`` if it can."""
    if max(head_dim, value_dim) > _WIDEST or head_dim + value_dim > _WIDEST_TOGETHER:
        return f"heads have more than {_WIDEST} features, or more than {_WIDEST_TOGETHER} of keys and values together"
    if head_dim % _FEATURES or value_dim % _FEATURES:
        return f"a head has no multiple of {_FEATURES} features"
    return None


def keys_refusal(attention: Attention) -> str | None:
    """Return why dk and dv have no warp-specialised form although the other kernels do, or ``None`` if they have.

    Triton 3.6 fails to divide them between warps where several statements read a value of query and key, such as the
    distance that both a window and ALiBi take.
    """
    import triton

    if attention.code.shares_pairs and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        return f"Triton {triton.__version__} cannot specialise dk and dv of a score that shares values of pairs"
    return None


def path_of_keys(attention: Attention) -> Attention:
    """Return the attention on the path of dk and dv: the plain one where only they have no other."""
    specialised = attention.path == "warp" and not interpreted()
    return replace(attention, path="plain") if specialised and keys_refusal(attention) else attention


def _aligned(tensor: Tensor) -> bool:
    size = tensor.element_size()
    steps = [stride * size for stride, length in zip(tensor.stride()[:3], tensor.shape, strict=False) if length > 1]
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(step > 0 and step % _ALIGNMENT == 0 for step in steps)


def checked(
    name: str, attention: Attention, tensors: Sequence[Tensor], run: Callable[[Attention], list[Tensor]]
) -> list[Tensor]:
    """Run an attention on the best path.

    Args:
        name: what is run, for the warning; forward and backward are judged apart.
        attention: the attention.
        tensors: as for :func:`warp_refusal`.
        run: runs the attention on the path that is set in it and returns the results.

    Raises:
        UnsupportedError: ``TREEFX_KERNEL_PATH=warp`` demands what cannot be run.
    """
    forced, refusal = forced_path(), warp_refusal(attention, tensors)
    if forced == "warp" and name == "backward" and not interpreted():
        refusal = refusal or keys_refusal(attention)
    if forced == "warp" and refusal is not None:
        raise UnsupportedError(f"TREEFX_KERNEL_PATH=warp must meet an attention that path can run, but {refusal}")
    if forced is not None:
        return run(replace(attention, path=forced))
    if refusal is not None or interpreted():
        return run(replace(attention, path="plain"))
    q, sinks = attention.inputs.q, attention.inputs.sinks
    key = (name, attention.request, q.dtype, attention.group, q.device, sinks is None, attention.node_length)
    if key not in _verdicts:
        return _judge(key, name, attention, run)
    return run(replace(attention, path="warp" if _verdicts[key] else "plain"))


def on_path(attention: Attention, path: str) -> Attention:
    """Return the attention on a path that nobody waits for: in its first configuration, without tuning."""
    return replace(attention, path=path, choose=attention.choose if interpreted() else default_config)


def _judge(key: Hashable, name: str, attention: Attention, run: Callable[[Attention], list[Tensor]]) -> list[Tensor]:
    """Run both forms, compare them, and remember the verdict."""
    plain, problem = run(on_path(attention, "plain")), ""
    try:
        fast = run(replace(attention, path="warp"))
        errors = [relative_error(*pair) for pair in zip(fast, plain, strict=True)]
        if not all(error <= _TOLERANCE for error in errors):  # NaN fails too
            problem = f"its results differ by {', '.join(f'{error:.1e}' for error in errors)}"
    except Exception as reason:  # whatever the compiler raises: the other form is there
        problem = f"{type(reason).__name__}: {str(reason)[:200]}"
    _verdicts[key] = not problem
    if not problem:
        return fast
    warnings.warn(
        f"treefx: the warp-specialised {name} kernel is switched off for this attention, the plain one runs instead, "
        f"slower: {problem}",
        RuntimeWarning,
        stacklevel=2,
    )
    return plain
