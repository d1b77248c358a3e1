"""Choose ``impl="auto"`` on a device: generated kernels if right, else FlexAttention.

The first tokens of a forest are a forest. So when a process first meets an attention of some kind, it runs that much
of it on the generated kernels and on the dense reference, forward and backward. If a kernel cannot be made or differs,
FlexAttention takes all attentions of this kind over, with one warning. On AMD's devices, none of which has run these
kernels yet, they run on the whole forest too, and a sample of its queries is compared.

NaN and infinity stay with the tokens that see them. The plain kernels compute tiles that are not finite again by
themselves. After a kernel in Gluon, and after one pass has added up dq, another launch does so, whose programs return
at once where all is finite: one launch more forward, two more backward (one in one pass), and no wait of the host. Of
results with rows of 256 bytes it reads a fortieth forward and an eighth backward. FlexAttention spreads such numbers
over tiles of 128 tokens; its warning says so.
"""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from treefx.errors import InputError, UnsupportedError
from treefx.kernels import reference
from treefx.kernels.checks import exact_products, tolerance_of, usable_inputs
from treefx.kernels.common import Boundary, Inputs, random_gradient, relative_error
from treefx.kernels.gpu import flex
from treefx.kernels.gpu.triton_tree import support
from treefx.kernels.memory import Bounded, host_copies
from treefx.kernels.score import Score
from treefx.reason_codes import with_code
from treefx.refusal_codes import FLEX

__all__ = ["backward", "forward"]

_CHECKED_TOKENS = 512

_problems: Bounded[Hashable, str | None] = Bounded(1024)


def forward(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, H, N, Dv]`` and the log-sum-exp ``[B, H, N]``."""
    result: tuple[Tensor, Tensor] = _chosen(inputs, score).forward(inputs, score)
    return result


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, score: Score, buffer_grads: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list of all others.

    The list: of the boundary and of sinks if given, of marked buffers.
    """
    chosen = _chosen(inputs, score)
    result: tuple[Tensor, Tensor, Tensor, list[Tensor]] = chosen.backward(
        grad_out, inputs, out, lse, score, buffer_grads
    )
    return result


def _chosen(inputs: Inputs, score: Score) -> ModuleType:
    q, k, v = inputs.q, inputs.k, inputs.v
    shape = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    buffers = tuple((buffer.dtype, buffer.ndim) for buffer in inputs.buffers)
    kind = score.to_json(), buffers, q.dtype, q.device, shape, inputs.sinks is None
    # A right result without visible keys from outside proves nothing about visible ones.
    key = *kind, inputs.boundary is not None and ((*kind, True) in _problems or _is_seen(inputs.boundary))
    problem = _problems.get(key)
    if key not in _problems:
        support.refuse_capture()
        _problems[key] = problem = _problem_of(inputs, score)
        if problem is not None:
            warnings.warn(
                with_code(
                    f"treefx: FlexAttention runs this attention instead of a generated kernel: {problem}. It is "
                    "slower, and a NaN or infinity in one row reaches outputs and gradients of other rows",
                    FLEX,
                ),
                RuntimeWarning,
                stacklevel=2,
            )
    if problem is not None:
        return flex
    from treefx.kernels.gpu.triton_tree import attention  # only here: it brings in templates and sympy

    return attention


def _is_seen(boundary: Boundary) -> bool:
    known = host_copies([boundary.lo, boundary.hi])  # as a part of a plan sends them: no synchronization
    return (boundary if known is None else replace(boundary, lo=known[0], hi=known[1])).is_seen()


def _problem_of(inputs: Inputs, score: Score) -> str | None:
    refusal = support.refusal(inputs.q)
    if refusal is not None:
        return f"it {refusal}"
    try:
        with torch.inference_mode(False):
            errors = _errors(usable_inputs(inputs.first_tokens(_CHECKED_TOKENS)), score)
            if torch.version.hip is not None:
                errors |= _errors_of_all(usable_inputs(inputs), score)
    except UnsupportedError as reason:
        return reason.text
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as reason:  # the compiler or the launch may raise anything: FlexAttention takes over
        return f"{type(reason).__name__}: {str(reason)[:200]}"
    tolerance = tolerance_of(inputs.q.dtype)
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= tolerance]  # NaN is wrong too
    return f"relative to the reference it is off in {', '.join(wrong)}" if wrong else None


def _errors_of_all(inputs: Inputs, score: Score) -> dict[str, float]:
    from treefx.kernels.gpu.triton_tree import attention

    return attention.plain_errors(inputs, score)


def _errors(inputs: Inputs, score: Score) -> dict[str, float]:
    from treefx.kernels.gpu.triton_tree import attention

    unmarked = [False] * len(inputs.buffers)
    with exact_products():
        wanted, lse = reference.forward(inputs, score)
        grad = random_gradient(wanted, lse)
        *wanted_grads, others = reference.backward(grad, inputs, wanted, lse, score, unmarked)
    got, got_lse = attention.forward(inputs, score, path="plain")
    *grads, rest = attention.backward(grad, inputs, got, got_lse, score, unmarked, path="plain")
    names = ("the output", "dq", "dk", "dv", *(f"gradient {number}" for number in range(4, 4 + len(rest))))
    pairs = zip(names, (got, *grads, *rest), (wanted, *wanted_grads, *others), strict=True)
    return {name: relative_error(first, second) for name, first, second in pairs}
