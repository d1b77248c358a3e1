"""Compare a form of the kernels with the reference on the lists of tiles of the forest at hand.

The lists depend on the whole forest: how many programs share them, which ones are cut, how long they are. So before a
form is used for the first time, it runs once on the whole forest, and the dense reference computes a sample of its
queries, as ``TREEFX_CHECK`` does: the forward, or the gradients of all keys and values from these queries alone.

The numbers are those at hand where they are finite, zeros elsewhere: others say nothing of a form. The reference takes
time and memory in proportion to the tokens. It computes as many of the first heads as fit a bound, at least those of
one key head: all heads have the same lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treefx.kernels import reference
from treefx.kernels.checks import backward_errors, exact_products, forward_errors, sample_queries, usable_inputs
from treefx.kernels.common import Inputs, random_gradient, sink_gradient
from treefx.kernels.gpu.triton_tree.launch import Attention

__all__ = ["own_list_errors"]

_ENTRIES = 1 << 25
"""Numbers of the largest tensor that the reference makes: of the keys of all its heads."""

Run = Callable[[Attention, Sequence[Tensor]], list[Tensor]]


def own_list_errors(name: str, attention: Attention, tensors: Sequence[Tensor], run: Run) -> dict[str, float]:
    """Return the relative errors of a form's results on the forest at hand, by name.

    Args:
        name: ``"forward"`` or ``"backward"``.
        attention: the attention, in the form.
        tensors: in the backward, the gradient, the output and the log-sum-exp.
        run: runs it, and returns output and log-sum-exp; or delta, dq, dk, dv, and dk and dv from outside.
    """
    finite = attention.inputs.with_finite_numbers()
    whole = attention if finite is attention.inputs else replace(attention, inputs=finite)
    few = finite.first_heads(_heads_at_once(attention))
    rows = sample_queries(few.q, 0)
    if name == "forward":
        out, lse = run(whole, tensors)
        return forward_errors(few, attention.score, _first(out, few), _first(lse, few), rows)
    return _gradient_errors(whole, few, tensors, rows, run)


def _gradient_errors(
    whole: Attention, few: Inputs, tensors: Sequence[Tensor], rows: Tensor, run: Run
) -> dict[str, float]:
    """Compare gradients where the sampled queries see what the reference computes, and all others nothing."""
    score = whole.score
    with torch.inference_mode(False), torch.no_grad(), exact_products():
        chosen_out, chosen_lse = reference.forward(usable_inputs(few), score, rows)
    out, lse, grad = (_first(x, few) for x in _empty_like(tensors))
    out[:, :, rows], lse[:, :, rows] = chosen_out, chosen_lse
    grad[:, :, rows] = random_gradient(chosen_out, chosen_lse)

    def backward(grad: Tensor, of_few: Inputs, out: Tensor, lse: Tensor, *others: Any) -> tuple[Any, ...]:
        wide = _empty_like(tensors)
        for target, source in zip(wide, (out, lse, grad), strict=True):
            _first(target, few).copy_(source)
        _, *found = run(whole, [wide[2], wide[0], wide[1]])
        dq, dk, dv, *rest = [_first(x, few, of_keys=number > 0) for number, x in enumerate(found)]
        if few.sinks is not None:  # the kernels have no part in it
            rest.append(sink_gradient(grad[:, :, rows], out[:, :, rows], lse[:, :, rows], few.sinks))
        return dq, dk, dv, rest

    unmarked = [False] * len(few.buffers)
    return backward_errors(backward, grad, few, out, lse, score, unmarked, rows=rows)


def _empty_like(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return an output, a log-sum-exp and a gradient of queries that see nothing."""
    grad, out, lse = tensors
    return torch.zeros_like(out), torch.full_like(lse, -torch.inf), torch.zeros_like(grad)


def _first(tensor: Tensor, few: Inputs, *, of_keys: bool = False) -> Tensor:
    """Return what belongs to the heads of ``few``."""
    return tensor[:1, : (few.k if of_keys else few.q).shape[1]]


def _heads_at_once(attention: Attention) -> int:
    """Return for how many key heads the reference has room."""
    inputs = attention.inputs
    width = max(inputs.q.shape[-1], inputs.v.shape[-1])
    of_one = attention.group * (inputs.outside + inputs.q.shape[2]) * width
    return min(inputs.k.shape[1], max(1, _ENTRIES // of_one))
