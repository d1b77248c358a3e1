"""Choose the form of a kernel: Gluon or plain, one pass or two.

Gluon has two passes, with bitwise deterministic results. Its one pass has not run on a device yet, so only
``TREEFX_KERNEL_PATH=gluon_once`` selects it. Gluon, and one pass, are checked when a process first uses them for an
attention of its kind, and again for forests of twice as many tokens: against the plain kernels in two passes, on the
first of the tokens at hand and a gradient of random numbers; and against the reference, on a sample of the queries,
with the lists of tiles of the whole forest. A form that fails to compile, or differs anywhere, gives way to the next
form with one warning.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treefx.errors import InputError, UnsupportedError
from treefx.kernels.checks import listed_errors, tolerance_of
from treefx.kernels.common import Inputs, random_gradient
from treefx.kernels.gpu.triton_tree.configs import (
    GLUON_ONE_PASS_KEYS,
    ONE_PASS_KEYS,
    default_config,
    one_pass_fits,
)
from treefx.kernels.gpu.triton_tree.launch import Attention
from treefx.kernels.gpu.triton_tree.own_lists import own_list_errors
from treefx.kernels.gpu.triton_tree.support import architecture, interpreted, refuse_capture
from treefx.kernels.gpu.triton_tree.tuning import configs_of_forest, tuning_wanted
from treefx.kernels.memory import Bounded
from treefx.kernels.score import loads
from treefx.reason_codes import with_code
from treefx.refusal_codes import PLAIN_FORM

__all__ = [
    "GLUON_ONCE",
    "PATHS",
    "checked",
    "forced_path",
    "form_refusal",
    "gluon_refusal",
    "in_one_pass",
    "on_path",
]

PATHS = ("plain", "gluon")
GLUON_ONCE = "gluon_once"
"""Value of ``TREEFX_KERNEL_PATH`` for the path ``"gluon"`` with a backward in one pass, where that fits."""
_WIDEST, _WIDEST_TOGETHER = 192, 320
"""Features of a head, and of a key and a value together, above which the gradients of both spill registers."""
_TOLERANCE = 0.02
"""Relative error between the forms, in 16-bit types, of every block of rows: a wrong row in it is off by far more."""
_BLOCK, _LEAST = 64, 0.1
"""Rows of a block, and of the mean size of all rows, the size that counts at least."""
_CHECKED_TOKENS = 4096
"""They are enough for lists of tiles that expose races."""
_ALIGNMENT = 16
"""Alignment in bytes of a tensor descriptor's start and step."""
_FEATURES = 8
"""Features of a 16-bit type in that many bytes."""

_verdicts: Bounded[Hashable, bool] = Bounded(1024)


def forced_path() -> str | None:
    """Return the path that ``TREEFX_KERNEL_PATH`` demands, or :data:`GLUON_ONCE`, if any.

    Raises:
        InputError: it is set to something else.
    """
    path = os.environ.get("TREEFX_KERNEL_PATH") or None
    known = (*PATHS, GLUON_ONCE)
    if path is not None and path not in known:
        raise InputError(f"TREEFX_KERNEL_PATH must be one of {', '.join(known)}, or unset, got {path!r}")
    return path


def in_one_pass(attention: Attention) -> bool:
    """Return whether a backward visits every tile once, and sums dq in any order.

    It does where that costs less, unless the caller, or ``torch.use_deterministic_algorithms``, wants the same bits
    every time.
    """
    if attention.inputs.deterministic or torch.are_deterministic_algorithms_enabled():
        return False
    if not one_pass_fits(attention.problem("backward_once")):
        return False
    least = ONE_PASS_KEYS if attention.path == "plain" else GLUON_ONE_PASS_KEYS
    return attention.keys_met("backward_once") >= least


def gluon_refusal(attention: Attention, tensors: Sequence[Tensor] = ()) -> str | None:
    """Return why Gluon cannot run this attention, or ``None`` if it can.

    Args:
        attention: the attention.
        tensors: further tensors read by boxes: the gradient, in the backward of a group of one.
    """
    if interpreted():
        return "Triton's interpreter runs no Gluon"
    inputs = attention.inputs
    refusal = form_refusal(attention, divmod(architecture(inputs.q.device), 10))
    if refusal is not None:
        return refusal
    if not all(_aligned(tensor) for tensor in (*_read_by_boxes(inputs), *tensors)):
        return f"a tensor does not step by multiples of {_ALIGNMENT} bytes"
    if inputs.boundary is not None and inputs.boundary.lo.data_ptr() % _ALIGNMENT:
        return f"lo of the keys from outside does not start at a multiple of {_ALIGNMENT} bytes"
    return None


def _read_by_boxes(inputs: Inputs) -> list[Tensor]:
    outside = inputs.boundary
    return [inputs.q, inputs.k, inputs.v, *([] if outside is None else [outside.k, outside.v])]


def form_refusal(attention: Attention, capability: tuple[int, int]) -> str | None:
    """Return why Gluon runs no attention of this kind in any layout, or ``None``.

    Args:
        attention: the attention.
        capability: of the device, which is another than 9.0 for AMD's.
    """
    if capability != (9, 0):
        return "it needs compute capability 9.0"
    if attention.inputs.q.dtype == torch.float32:
        return "it needs a 16-bit type"
    if attention.code.loads_pairs:
        return "the score loads by query and key"
    if attention.code.leaves_32_bits:
        return "the score multiplies whole numbers or has large ones, and it keeps 32 bits of them"
    return _refused_widths(attention.request.head_dim, attention.request.value_dim)


def _refused_widths(head_dim: int, value_dim: int) -> str | None:
    """Return why Gluon runs no heads of these widths, or ``None`` if it does."""
    if max(head_dim, value_dim) > _WIDEST or head_dim + value_dim > _WIDEST_TOGETHER:
        return f"heads have more than {_WIDEST} features, or more than {_WIDEST_TOGETHER} of keys and values together"
    if head_dim % _FEATURES or value_dim % _FEATURES:
        return f"a head has no multiple of {_FEATURES} features"
    return None


def _aligned(tensor: Tensor) -> bool:
    size = tensor.element_size()
    steps = [stride * size for stride, length in zip(tensor.stride()[:2], tensor.shape, strict=False) if length > 1]
    steps.append(tensor.stride(2) * size)  # a descriptor has the step of tokens even where there is one alone
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(step > 0 and step % _ALIGNMENT == 0 for step in steps)


Run = Callable[[Attention, Sequence[Tensor]], list[Tensor]]
"""Runs an attention on the path that is set in it, with the tensors of its tokens, and returns the results."""


def checked(name: str, attention: Attention, tensors: Sequence[Tensor], run: Run) -> list[Tensor]:
    """Run an attention on the best path.

    Args:
        name: name of the pass, for the warning; forward and backward are judged apart.
        attention: the attention.
        tensors: further tensors read per query, ``[B, H, N, ...]``; in the backward its gradient first and the
            log-sum-exp last.
        run: runs it.

    Raises:
        UnsupportedError: ``TREEFX_KERNEL_PATH`` demands an impossible form; but a backward with a gradient in a layout
            that Gluon cannot read takes the plain form.
    """
    forced = forced_path()
    if forced != "plain":
        # A group's gradients are copied before they are read by boxes.
        refusal = gluon_refusal(attention, tensors[:1] if attention.group == 1 else [])
        if forced is not None and name == "forward" and refusal is not None:
            raise UnsupportedError(
                f"TREEFX_KERNEL_PATH={forced} must meet an attention that path can run, but {refusal}"
            )
        for form, fast in _forms_of_gluon(name, attention, forced) if refusal is None else ():
            if _is_right(form, name, fast, tensors, run):
                return run(fast, tensors)
    once = replace(attention, path="plain", once=name == "backward")
    if once.once and in_one_pass(once) and (interpreted() or _is_right("one-pass", name, once, tensors, run)):
        return run(once, tensors)
    return run(replace(attention, path="plain"), tensors)


def _forms_of_gluon(name: str, attention: Attention, forced: str | None) -> Iterator[tuple[str, Attention]]:
    """Yield an attention in the forms that Gluon may run it in, with their names, the best first."""
    two_passes = replace(attention, path="gluon")
    once = replace(two_passes, once=True)
    if forced == GLUON_ONCE and name == "backward" and in_one_pass(once):
        yield "one-pass Gluon", once
    yield "Gluon", two_passes


def _is_right(form: str, name: str, attention: Attention, tensors: Sequence[Tensor], run: Run) -> bool:
    """Return whether a form equals the plain kernels and the reference; checked once per kind and length."""
    q, sinks, outside = attention.inputs.q, attention.inputs.sinks, attention.inputs.boundary
    length = q.shape[2].bit_length()
    # Unseen keys from outside, as in the first part of a plan, are not launched.
    goes_on = outside is not None and attention.is_seen(attention.boundary_keys())
    kind = (attention.request, goes_on, attention.group, sinks is None, attention.node_length)
    backward = ["backward_once"] if attention.once else ["backward_keys", "backward_queries"]
    kernels = ["forward"] if name == "forward" else backward
    key = (form, name, kind, configs_of_forest(attention, kernels), q.dtype, q.device, length)
    if key not in _verdicts:
        refuse_capture()
        try:
            _verdicts[key] = _judge(form, name, attention, tensors, run)
        except torch.OutOfMemoryError:  # it says nothing of the form, which a later step compares
            return False
    return _verdicts[key]


def on_path(attention: Attention, path: str) -> Attention:
    """Return the attention on a path in its first configuration, without tuning."""
    return replace(attention, path=path, choose=attention.choose if interpreted() else default_config)


def _judge(form: str, name: str, attention: Attention, tensors: Sequence[Tensor], run: Run) -> bool:
    """Compare a form with the plain kernels on the first tokens, and with the reference on the whole forest."""
    few = replace(attention, inputs=attention.inputs.first_tokens(_CHECKED_TOKENS))
    parts, problem = [x[:1, :, :_CHECKED_TOKENS] for x in tensors], ""
    if name == "backward":
        grad, *_, lse = parts
        parts[0], parts[-1] = random_gradient(grad, lse), lse.contiguous()  # kernels count its rows themselves
    plain = run(replace(on_path(few, "plain"), once=False), parts)
    try:
        if tuning_wanted():
            run(attention, tensors)  # the fastest configuration has to be the right one
        fast = run(few, parts)
        errors = [largest_error(*pair) for pair in zip(fast, plain, strict=True)]
        if not all(error <= _TOLERANCE for error in errors):  # NaN fails too
            problem = f"its results differ by {', '.join(f'{error:.1e}' for error in errors)}"
        else:
            of_all = own_list_errors(name, attention, tensors, run)
            if not all(error <= tolerance_of(attention.inputs.q.dtype) for error in of_all.values()):
                problem = f"with this forest's lists it differs from the reference: {listed_errors(of_all)}"
        if not _has_32_bits(attention):
            problem = "whole numbers that the score reads need more than the 32 bits it keeps"
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # the compiler may raise anything: the other form takes over
        problem = f"{type(reason).__name__}: {str(reason)[:200]}"
    if problem:
        warnings.warn(
            with_code(
                f"treefx: the {form} {name} kernel is switched off for this attention, the plain one runs "
                f"instead, slower: {problem}",
                PLAIN_FORM,
            ),
            RuntimeWarning,
            stacklevel=2,
        )
    return not problem


def _has_32_bits(attention: Attention) -> bool:
    """Return whether the buffers hold no whole number of more bits than Gluon keeps."""
    values = [*attention.code.row_values, *attention.code.column_values] if attention.path == "gluon" else []
    read = {number for value in values if value.kind == "int" for number in loads(value.expr)}
    wide = [x for x in (attention.inputs.buffers[number] for number in read) if x.dtype == torch.int64]
    return all(bool((x == x.to(torch.int32)).all()) for x in wide)


def largest_error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest relative error of any block of rows; NaN if only one is finite.

    Args:
        got: ``[B, H, N]`` or ``[B, H, N, D]``.
        wanted: the reference, in its shape.
    """
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), finite):
        return float("nan")
    wide = [torch.where(finite, x, 0).float().reshape(*x.shape[:3], -1) for x in (got, wanted)]
    squares = [_block_sums((wide[0] - wide[1]).square()), _block_sums(wide[1].square())]
    least = _LEAST**2 * squares[1].mean()
    return float((squares[0] / squares[1].clamp(min=max(float(least), 1e-12))).max().sqrt())


def _block_sums(squares: Tensor) -> Tensor:
    """Return the sums over blocks of rows, ``[B, H, blocks]``."""
    rows = squares.sum(-1)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % _BLOCK))
    return padded.unflatten(-1, (-1, _BLOCK)).sum(-1)  # type: ignore[no-untyped-call, no-any-return]
