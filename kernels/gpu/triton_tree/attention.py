"""``impl="triton"``: generated kernels for tree attention, forward and backward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, empty_heads_inside, empty_outputs
from treefx.kernels.gpu.replays import Recorder, replayed
from treefx.kernels.gpu.triton_tree.arguments import dense_features, forest_numbers
from treefx.kernels.gpu.triton_tree.buffer_gradients import buffer_gradients
from treefx.kernels.gpu.triton_tree.configs import Config, Problem, usable_shared_memory
from treefx.kernels.gpu.triton_tree.launch import Attention, KeySource, Launch
from treefx.kernels.gpu.triton_tree.own_lists import own_list_errors
from treefx.kernels.gpu.triton_tree.paths import checked, forced_path, on_path
from treefx.kernels.gpu.triton_tree.small_launches import launch_finish
from treefx.kernels.gpu.triton_tree.support import architecture, interpreted
from treefx.kernels.gpu.triton_tree.tuning import BestConfig, tuned, tuning_wanted
from treefx.kernels.score import Score
from treefx.kernels.tiles.tree_blocks import find_node_length

__all__ = ["attention_of", "backward", "backward_from", "forward", "forward_from", "plain_errors", "results_of"]


def forward(inputs: Inputs, score: Score, *, path: str | None = None) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, N, Dv]`` and log-sum-exp ``[B, H, N]``, on a given or best path."""

    def launch(recorder: Recorder | None = None) -> list[Tensor]:
        def run(chosen: Attention, _: Sequence[Tensor]) -> list[Tensor]:
            with recorder.recording() if recorder else nullcontext():  # the last run is the one that counts
                return results_of(chosen, [])

        attention = attention_of(inputs, score)
        return run(on_path(attention, path), []) if path else checked("forward", attention, [], run)

    kind = _kind("forward", inputs, score)
    if path or kind is None:
        out, lse = launch()
    else:
        with _device_of(inputs.q):
            out, lse = replayed(kind, _forest(inputs, kind), _given(inputs), launch)
    return out, lse


def backward(
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    score: Score,
    buffer_grads: Sequence[bool],
    *,
    path: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list of all others.

    On the given path in two passes over the tiles, with the same bits every time; without one as it costs least.
    """
    grad_out, out = dense_features([grad_out, out])

    def launch(recorder: Recorder | None = None) -> list[Tensor]:
        def run(chosen: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
            with recorder.recording() if recorder else nullcontext():  # the last run is the one that counts
                return results_of(chosen, tensors)

        attention, tensors = attention_of(inputs, score), [grad_out, out, lse]
        return run(on_path(attention, path), tensors) if path else checked("backward", attention, tensors, run)

    kind = _kind("backward", inputs, score)
    if path or kind is None:
        found = launch()
    else:
        given = {**_given(inputs), "grad": grad_out, "out": out, "lse": lse}
        with _device_of(inputs.q):
            found = replayed(kind, _forest(inputs, kind), given, launch)
    delta, dq, dk, dv, *rest = found
    if inputs.sinks is not None:
        weight = torch.exp(inputs.sinks.to(lse.dtype)[None, :, None] - lse)
        rest.append((-(weight * delta).sum(dim=(0, 2))).to(inputs.sinks.dtype))
    if any(buffer_grads):
        rest += buffer_gradients(grad_out, inputs, score, buffer_grads)
    return dq, dk, dv, rest


def results_of(attention: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return output and log-sum-exp; or delta, dq, dk, dv, and dk and dv from outside.

    Args:
        attention: on the path that runs.
        tensors: in the backward, the gradient, the output and the log-sum-exp; none in the forward.
    """
    if not tensors:
        return list(forward_from(attention, attention.sources()))
    dq, pairs, delta = backward_from(attention, attention.sources(), *tensors)
    return [delta, dq, *(tensor for pair in reversed(pairs) for tensor in pair)]


def plain_errors(inputs: Inputs, score: Score) -> dict[str, float]:
    """Return the relative errors of the plain form with the lists of the forest at hand, by name."""
    attention = attention_of(inputs, score)
    out, lse = empty_outputs(attention.inputs.q, attention.inputs.v)
    passes = {"forward": [], "backward": [out, out, lse]}
    found = [own_list_errors(name, attention, tensors, results_of) for name, tensors in passes.items()]
    return {f"{name} of all tokens": error for errors in found for name, error in errors.items()}


_Kind = tuple[str, str, bool, str | None, tuple[int, ...]]


def _kind(name: str, inputs: Inputs, score: Score) -> _Kind | None:
    """Return the key of launches, besides forest and layout; the forest's buffers come last.

    ``None``: they differ from call to call, with keys from outside or while configurations are tried out.
    """
    if inputs.boundary is not None or tuning_wanted():
        return None
    deterministic = inputs.deterministic or torch.are_deterministic_algorithms_enabled()
    return name, score.to_json(), deterministic, forced_path(), forest_numbers(inputs, score)


def _forest(inputs: Inputs, kind: _Kind) -> tuple[Tensor, ...]:
    """Return the forest's vectors, from which tiles and values of the score are made."""
    return (inputs.subtree_end, *(inputs.buffers[number] for number in kind[-1]))


def _given(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors of a layer by names."""
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    given |= {f"buffer {number}": buffer for number, buffer in enumerate(inputs.buffers)}
    return given if inputs.sinks is None else {**given, "sinks": inputs.sinks}


def forward_from(attention: Attention, sources: Sequence[KeySource]) -> tuple[Tensor, Tensor]:
    """Attend to several sources of keys, one launch each, continuing the result before.

    Args:
        attention: the queries, the score, the path.
        sources: keys and values; a source may be empty.

    Returns:
        The output ``[B, H, N, Dv]`` and the log-sum-exp ``[B, H, N]`` over all sources and the sinks.
    """
    inputs = attention.inputs
    out, lse = empty_outputs(inputs.q, inputs.v)
    previous: tuple[Tensor, Tensor] | None = None
    used = [source for source in sources if attention.is_seen(source)] or list(sources[-1:])
    used, values = attention.with_values(used)
    with _device_of(inputs.q):
        for launch in values:
            launch.run()
        for source in used[:-1]:
            result = out.new_empty(out.shape, dtype=torch.float32), torch.empty_like(lse)
            attention.forward(source, *result, previous).run()
            previous = result
        tuned(attention, "forward", lambda chosen: chosen.forward(used[-1], out, lse, previous)).run()
    return out, lse


def backward_from(
    attention: Attention, sources: Sequence[KeySource], grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Differentiate :func:`forward_from`.

    Args:
        attention: as in the forward.
        sources: as in the forward.
        grad_out: ``[B, H, N, Dv]``, features side by side.
        out: the output, likewise.
        lse: log-sum-exp over all sources and the sinks, ``[B, H, N]``.

    Returns:
        The gradient of q; those of k and v of every source, one row per key also where the source is a pool; and
        ``sum(grad_out * out)``, ``[B, H, N]``.
    """
    dq = empty_heads_inside(attention.inputs.q, attention.inputs.q.shape[-1])
    sources, values = attention.with_values(sources)
    with _device_of(dq):
        prologue, of_keys, of_queries = attention.prologue(grad_out, out, lse, values)
        prologue.run()
        delta, sums = prologue.arguments["Delta"], of_keys["SumsQ"]
        pairs = [_backward_keys(attention, source, of_keys) for source in sources]
        del prologue, of_keys  # free the inputs of dk and dv alone before dq
        seen = [source for source in sources if attention.is_seen(source)]
        if attention.once:
            launch_finish(sums, dq, attention.code.factor, attention.inputs.k.shape[1]).run()
            del sums  # repairs take no more room
            _repair_queries(attention, seen, of_queries, dq)
        else:
            _backward_queries(attention, seen, of_queries, dq)
    return dq, pairs, delta


def _backward_keys(attention: Attention, source: KeySource, gradients: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the gradients of a source's keys and values."""
    dk, dv = (_gradient_of(tensor, len(source)) for tensor in (source.k, source.v))

    def make(chosen: Attention) -> Launch:
        given = gradients
        if attention.once and chosen is not attention:  # a timed launch adds to unused sums
            given = {**gradients, "SumsQ": torch.empty_like(gradients["SumsQ"])}
        return chosen.backward_keys(source, given, dk, dv)

    if attention.is_seen(source):
        tuned(attention, attention.of_keys, make).run()
    else:
        dk.zero_()
        dv.zero_()
    return dk, dv


def _backward_queries(
    attention: Attention, sources: Sequence[KeySource], gradients: dict[str, Any], dq: Tensor
) -> None:
    """Write the gradient of the queries: one launch per source, each continuing the last."""
    previous = None
    for source in sources:
        target = dq if source is sources[-1] else torch.empty_like(dq, dtype=torch.float32)
        queries = partial(Attention.backward_queries, source=source, gradients=gradients, dq=target, previous=previous)
        tuned(attention, "backward_queries", queries).run()
        previous = target
    if not sources:
        dq.zero_()


def _repair_queries(attention: Attention, sources: Sequence[KeySource], rows: dict[str, Any], dq: Tensor) -> None:
    """Recompute tiles of dq where a key that is not finite reached rows that cannot see it."""
    previous = None
    for source in sources:
        target = dq if source is sources[-1] else torch.empty_like(dq, dtype=torch.float32)
        attention.repair_sums(source, rows, dq, target, previous).run()
        previous = target


def attention_of(inputs: Inputs, score: Score) -> Attention:
    """Return the attention on the plain path, with the configurations of the device."""
    if interpreted():
        return Attention(_dense(inputs), score, choose=_interpreted_config)
    return Attention(
        _dense(inputs),
        score,
        choose=BestConfig(inputs.subtree_end, inputs.q.shape[0] * inputs.k.shape[1]),
        node_length=find_node_length(inputs.subtree_end),
        shared_limit=usable_shared_memory(architecture(inputs.q.device)),
    )


def _interpreted_config(problem: Problem) -> Config:
    return Config(64, 64, 4, 1)  # tiles as on a device; nothing is short


def _dense(inputs: Inputs) -> Inputs:
    """Return the inputs as the kernels read them: features side by side, vectors dense."""
    q, k, v = dense_features([inputs.q, inputs.k, inputs.v])
    boundary = inputs.boundary
    if boundary is not None:
        boundary_k, boundary_v = dense_features([boundary.k, boundary.v])
        ends = {"lo": boundary.lo.to(torch.int32).contiguous(), "hi": boundary.hi.to(torch.int32).contiguous()}
        boundary = replace(boundary, k=boundary_k, v=boundary_v, **ends)
    sinks = None if inputs.sinks is None else inputs.sinks.contiguous()
    return replace(inputs, q=q, k=k, v=v, sinks=sinks, boundary=boundary)


def _gradient_of(tensor: Tensor, rows: int) -> Tensor:
    batch, heads, _, width = tensor.shape
    return tensor.new_empty((batch, rows, heads, width)).transpose(1, 2)


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
