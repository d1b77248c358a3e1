"""Write artifacts to PyTorch's structured log: ``TORCH_TRACE=folder``, for tlparse.

Calls of a compiled graph may come long after Dynamo has captured it, so these records name no frame of Dynamo.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from torch._logging._internal import trace_log, trace_structured

from treefx.passes.packing.kernel_sources import kernel_source_of
from treefx.passes.runner import log_graph
from treefx.runtime.shapes import Executable

__all__ = ["log_compiled"]


def log_compiled(executable: Executable) -> None:
    """Log decisions on a graph, its compiled graphs, and its attentions' distinct kernels."""
    if not trace_log.handlers:
        return
    analysis = executable.rewritten.analysis
    items = [] if analysis is None else [*analysis.expansions, *analysis.obstacles]
    decisions = [{**asdict(item), "code": item.code} for item in items]
    _log("treefx_decisions", "json", json.dumps({"on_rows": decisions, "seconds": executable.seconds}, indent=1))
    for stage, gm in executable.graphs.items():
        log_graph(f"treefx_{stage}", gm)
    nodes = executable.rewritten.gm.graph.nodes
    attentions = [node for node in nodes if "treefx.tree_attention" in str(node.target)]
    for i, source in enumerate(dict.fromkeys(kernel_source_of(node) for node in attentions)):
        _log(f"treefx_kernel_{i}", "string", source)


def _log(name: str, encoding: str, text: str) -> None:
    trace_structured(
        "artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text, expect_trace_id=False
    )
