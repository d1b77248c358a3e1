"""Count memory of attention on a CUDA device, besides its inputs and results.

This is the memory of its launches, and lists of tiles.

Only the symbols of a part's graph are known: sizes that depend on its tree (lists of tiles, those that are cut into
parts) count with their maximum, in the largest configuration, in either form of the kernels. Attention in float64,
which runs on the reference, is not counted here, nor is the gradient of a learned bias: :func:`uncounted` names them.
"""

from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from treefx.kernels import ops as _ops  # noqa: F401  (registers tree_attention)
from treefx.kernels.common import Boundary, Inputs
from treefx.kernels.gpu.triton_tree import support
from treefx.kernels.gpu.triton_tree.configs import Config, candidates, one_pass_fits, usable_shared_memory
from treefx.kernels.gpu.triton_tree.launch import Attention
from treefx.kernels.gpu.triton_tree.paths import GLUON_ONCE, forced_path, form_refusal
from treefx.kernels.gpu.workspace import (
    Lists,
    backward_bytes,
    forward_bytes,
    list_bytes,
    most_lists,
    most_of,
    value_bytes,
)
from treefx.kernels.score import Score
from treefx.planning.cost.liveness import size_expression

__all__ = ["device_lists", "device_workspace", "uncounted"]

_FORWARD = torch.ops.treefx.tree_attention.default
_BACKWARD = torch.ops.treefx.tree_attention_backward.default
_BOUNDARY = {_FORWARD: 8, _BACKWARD: 12}
"""Arguments before the boundary."""
_NODE_LENGTHS = (32, 256)
"""Mean lengths of nodes for which configurations differ."""


def device_workspace(node: fx.Node) -> sympy.Expr:
    """Bytes of an attention's own memory on a CUDA device, in the symbols of its graph."""
    found = [_bytes(form, _kernels(node, form)) for form in _forms(node)]
    return most_of(found) if found else sympy.Integer(0)


def uncounted(*graphs: fx.GraphModule) -> list[str]:
    """Name attentions on a CUDA device whose memory is not counted."""
    found = set()
    for node in (node for gm in graphs for node in gm.graph.nodes if node.target in _BOUNDARY):
        q = _value(node.args[int(node.target is _BACKWARD)])
        if q.device.type == "cuda":
            named = {f"attention in {str(q.dtype).removeprefix('torch.')}": support.kind_refusal(q) is not None}
            is_wanted = any(isinstance(item, list) and True in item for item in node.args)
            named["the gradient of a learned bias"] = is_wanted
            found |= {name for name, applies in named.items() if applies}
    return sorted(found)


def device_lists(*graphs: fx.GraphModule) -> sympy.Expr:
    """Return bytes that attentions keep on a CUDA device for the next layers.

    These are lists of tiles, and values of scores.
    """
    found: dict[Any, sympy.Expr] = {}
    for node in (node for gm in graphs for node in gm.graph.nodes):
        for form in _forms(node):
            for name in _kernels(node, form):
                key = name, form.score.visible, form.group, form.request, form.inputs.q.dtype
                lists = _most(form, {name: _largest(form, name)})[name]
                found[key] = sympy.Add(*map(list_bytes, lists))
            if form.path != "plain":
                tokens, outside = _sizes(form)
                keys = tokens if outside is None else tokens + outside
                found["values", form.score, form.group, form.request] = value_bytes(form, tokens, keys)
    return sympy.expand(sympy.Add(*found.values()))


def _forms(node: fx.Node) -> list[Attention]:
    """Return the attention of a node on a CUDA device in its largest form.

    Its one-pass backward is included.

    None where no kernel runs it.
    """
    attention = _attention(node)
    if attention is None:
        return []
    if node.target is _FORWARD or node.kwargs.get("deterministic", False):
        return [attention]
    paths = {"plain", attention.path} if forced_path() == GLUON_ONCE else {"plain"}
    once = [replace(attention, path=path, once=True) for path in sorted(paths)]
    return [attention, *(form for form in once if one_pass_fits(form.problem("backward_once")))]


def _kernels(node: fx.Node, form: Attention) -> tuple[str, ...]:
    if node.target is _FORWARD:
        return ("forward",)
    return (form.of_keys,) if form.once else (form.of_keys, "backward_queries")


def _bytes(form: Attention, kernels: tuple[str, ...]) -> sympy.Expr:
    """Bytes of one form of an attention, forward or backward."""
    tokens, outside = _sizes(form)
    configs = {name: _largest(form, name) for name in kernels}
    taken = replace(form, choose=lambda problem: configs[problem.kernel])
    # Lists of both sources in one, as long as both: bytes carried from one to the other count once.
    both = [_sum(lists) for lists in _most(form, configs).values()]
    if kernels == ("forward",):
        return forward_bytes(taken, tokens, both, carries=outside is not None)
    return backward_bytes(taken, tokens, [(both[0], both[-1])], carries=outside is not None)


def _attention(node: fx.Node) -> Attention | None:
    """Return the attention of a node on a CUDA device, in Gluon where that can run.

    None where no kernel runs it.
    """
    if node.target not in _BOUNDARY:
        return None
    place = int(node.target is _BACKWARD)
    q, k, v, ends, buffers, sinks = (_value(item) for item in node.args[place : place + 6])
    if q.device.type != "cuda" or support.kind_refusal(q) is not None:
        return None
    score = Score.from_json(next(item for item in node.args if isinstance(item, str)))
    outside = [_value(item) for item in node.args[_BOUNDARY[node.target] :]]
    inputs = Inputs(q, k, v, ends, buffers, sinks, Boundary(*outside) if outside else None)
    arch = support.architecture(q.device)
    attention = Attention(inputs, score, "plain", shared_limit=usable_shared_memory(arch))
    chosen = replace(attention, path="plain" if forced_path() == "plain" else "gluon")
    return attention if chosen.path == "plain" or form_refusal(chosen, divmod(arch, 10)) else chosen


def _value(item: Any) -> Any:
    if isinstance(item, fx.Node):
        return item.meta["val"]
    return [_value(one) for one in item] if isinstance(item, (list, tuple)) else item


def _sizes(attention: Attention) -> tuple[sympy.Expr, sympy.Expr | None]:
    boundary = attention.inputs.boundary
    outside = None if boundary is None else size_expression(boundary.k.shape[2])
    return size_expression(attention.inputs.q.shape[2]), outside


def _largest(attention: Attention, kernel: str) -> Config:
    """Choose the configuration with the largest held sums.

    Kernels that hold sums of dk and dv: the fewest rows and most keys of a tile; others: the fewest keys.
    """
    found = _configs(attention, kernel)
    widest = max if kernel == attention.of_keys else min
    return Config(min(one.block_m for one in found), widest(one.block_n for one in found), 4, 1)


def _configs(attention: Attention, kernel: str) -> list[Config]:
    paths = ("plain", attention.path)
    kinds = [replace(attention, path=path, node_length=length) for path in paths for length in _NODE_LENGTHS]
    return [config for kind in kinds for config in candidates(kind.problem(kernel))]


def _most(attention: Attention, configs: dict[str, Config]) -> dict[str, list[Lists]]:
    """The longest lists of each source of keys, by kernel."""
    tokens, outside = _sizes(attention)
    sources = [(tokens, False), *([] if outside is None else [(outside, True)])]
    result = {}
    for name, config in configs.items():
        keys_of_tile = min(one.block_n for one in _configs(attention, name))
        rows, group = tokens * attention.group, attention.group
        result[name] = [
            most_lists(rows, keys, config.block_m, keys_of_tile, group=group, is_boundary=is_boundary)
            for keys, is_boundary in sources
        ]
    return result


def _sum(lists: list[Lists]) -> Lists:
    """One source that takes as much as all of them, of which one is launched at a time."""
    first, *others = lists
    for other in others:
        more = {
            name: getattr(first, name) + getattr(other, name) for name in ("keys", "key_blocks", "tiles", "programs")
        }
        first = replace(first, **more, has_low=True)
    return first
