"""Configure Dynamo so that unmodified models and trainers trace to one graph.

Unused positions and inputs that distinguish tokens are found in one graph; a break between the embedding and
the blocks leaves graphs without token ids, which run ordinarily.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import fx

from treefx.runtime.whole.checks import check_instead
from treefx.runtime.whole.deepstack import deepstack_instead
from treefx.runtime.whole.direct_flash import direct_call_instead
from treefx.runtime.whole.flash import flash_instead, trace_instead
from treefx.runtime.whole.heads import LEAVES_OUT, head_instead, scores_all
from treefx.runtime.whole.liger import liger_instead
from treefx.runtime.whole.recurrences import recurrence_instead
from treefx.runtime.whole.token_modules import is_provable, token_module_instead
from treefx.runtime.whole.towers import tower_instead
from treefx.torch_patches.dynamo import is_of_module
from treefx.torch_patches.substitution import retry_where_cut, substitute_applied, substitute_called
from treefx.torch_patches.table import apply_patches

__all__ = ["keep_graphs_whole", "reads_cache", "role_of", "why_cut"]

_CACHES = re.compile(r"\b(past_key_values?|cache_params)\b")


@functools.cache
def keep_graphs_whole() -> None:
    """Apply all patches, once per process, and substitute functions that break graphs."""
    trace_instead(LEAVES_OUT, scores_all)
    for called in (
        tower_instead, check_instead, deepstack_instead, direct_call_instead, flash_instead, recurrence_instead,
        token_module_instead,
    ):  # fmt: skip
        substitute_called(called)
    retry_where_cut(is_provable)
    for applied in (liger_instead, head_instead):
        substitute_applied(applied)
    apply_patches()


def why_cut(gm: fx.GraphModule) -> str | None:
    """Return why Dynamo ended a graph before its function ended; None for the last graph."""
    ending = getattr(gm, "compile_subgraph_reason", None)
    if ending is None or not ending.graph_break:
        return None
    return next(iter(str(ending.reason).splitlines()), "for a reason it does not name")


def reads_cache(gm: fx.GraphModule, roles: list[str]) -> bool:
    """Return whether a graph continues from a cache of an earlier call.

    The cache holds keys and values, or states.

    Dynamo names each input after the argument that it comes from; transformers passes caches by few names. Learned
    prefixes come by the same names, but require gradients.
    """
    nodes = zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True)
    return any(role == "input" and _CACHES.search(_source_name(node)) is not None for node, role in nodes)


def _source_name(node: fx.Node) -> str:
    """Return the expression of an input, such as ``L['past_key_values'].layers[0].keys``."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method before PyTorch 2.12


def role_of(node: fx.Node, example: Any) -> str:
    """Classify an input: a parameter, a buffer of the model, or an argument of the call."""
    if isinstance(example, torch.nn.Parameter):
        return "parameter"
    learned = isinstance(example, torch.Tensor) and example.requires_grad
    if isinstance(example, torch.Tensor) and is_of_module(getattr(node, "_dynamo_source", None)):
        return "parameter" if learned else "buffer"
    return "variable" if learned else "input"
