"""Return the Triton source of a rewritten attention, for the inspector and dumps."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from treefx.errors import UnsupportedError
from treefx.kernels.dumps import dump, dumps_wanted
from treefx.passes.labels.label_tokens import user_line

__all__ = ["kernel_source_of", "write_kernel_sources"]


def kernel_source_of(node: fx.Node) -> str:
    """Return the plain kernels of a tree attention, with the user's line, or why none exist.

    Args:
        node: A call of ``treefx::tree_attention``, with ``meta["val"]`` on its operands; of
            ``treefx::sparse_tree_attention``, whose kernels are not generated, the file that has them.
    """
    if "sparse" in str(node.target):
        return f"# {user_line(node) or ''}\n# The kernels of chosen keys are in treefx/kernels/sparse/device_code.py."
    from treefx.kernels.gpu.triton_tree.codegen import Request, kernel_source
    from treefx.kernels.gpu.triton_tree.configs import chunk_widths
    from treefx.kernels.gpu.triton_tree.expressions import kinds_of

    query, _, value, _, buffers, _, score = node.args[:7]
    assert isinstance(buffers, list | tuple) and isinstance(score, str)
    q, v = _value(query), _value(value)
    if q.dtype == torch.float64:
        return "# No kernel is generated for float64: the dense reference runs it."
    kinds = kinds_of([_value(buffer) for buffer in buffers])
    widths = int(q.shape[-1]), int(v.shape[-1])
    request = Request(score, kinds, *widths, chunk_widths(q.dtype), "plain", user_line(node) or "")
    try:
        return kernel_source(request)
    except UnsupportedError as reason:
        return f"# No kernel is generated: {reason.text}"


def write_kernel_sources(gm: fx.GraphModule) -> None:
    """Write the kernels of a graph's attentions into ``kernels`` of ``TREEFX_DUMP_DIR``."""
    if not dumps_wanted():
        return
    packet = getattr(torch.ops.treefx, "tree_attention", None)
    for node in gm.graph.find_nodes(op="call_function", target=packet.default) if packet is not None else ():
        try:
            source = kernel_source_of(node)
        except Exception as error:  # a dump never changes a run
            source = f"# No kernel is generated: {type(error).__name__}: {error}"
        digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        dump("kernels", f"{node.name}.{digest}.py", source)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
