"""Run passes over a graph: time them, check invariants, record changes.

The runner knows no pass and no option of one: options are bound when the tuple of passes is built
(``treefx.passes.pipeline.build_passes``).
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx
from torch._logging._internal import trace_structured

from treefx.kernels.dumps import dump, dumps_wanted

__all__ = ["GraphChange", "NodeLine", "Pass", "log_graph", "run_passes"]

_log = logging.getLogger(__name__)
_runs = itertools.count()


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline.

    A pass may assume a graph that ``lint`` accepts and has to leave one; in between it need not be.
    """

    name: str
    run: Callable[[fx.GraphModule, Any], fx.GraphModule]
    """Takes a graph and its work data, which it may extend; returns the graph, the same one or another."""
    stage: str
    """Passes of one stage run together, on one graph."""


class NodeLine(NamedTuple):
    """Describe a node by kind, target and module, without name and inputs.

    Passes change these freely; the module is as fx writes it.
    """

    kind: str
    target: str
    module: str


@dataclass(frozen=True)
class GraphChange:
    """The nodes of a graph before and after a pass, in order."""

    before: tuple[NodeLine, ...] = ()
    after: tuple[NodeLine, ...] = ()

    @property
    def operators_before(self) -> Counter[str]:
        """By name."""
        return _operators(self.before)

    @property
    def operators_after(self) -> Counter[str]:
        """By name."""
        return _operators(self.after)


def run_passes(
    passes: Iterable[Pass],
    gm: fx.GraphModule,
    work: Any,
    seconds: dict[str, float],
    changes: dict[str, GraphChange] | None = None,
) -> fx.GraphModule:
    """Run passes in order and return the last graph.

    With ``TREEFX_DUMP_DIR`` set, the folder ``passes`` gets the graph before and after every pass and their diff. File
    names begin with the process, the run and the place in it, so that sorting them gives the order.

    Args:
        passes: In order.
        gm: The first one's graph.
        work: Handed to every pass.
        seconds: Gets the seconds of each pass, by name, added to earlier ones.
        changes: Gets the changes of each pass, by name, in place of earlier ones.

    Raises:
        RuntimeError: A pass left a graph that is not well-formed: a bug of the pass that is named.
    """
    run = f"{os.getpid()}.{next(_runs):03}"
    nodes = _lines(gm)
    for place, item in enumerate(passes):
        before, change = _printed(gm), GraphChange(nodes)
        started = time.perf_counter()
        gm = item.run(gm, work)
        took = time.perf_counter() - started
        seconds[item.name] = seconds.get(item.name, 0.0) + took
        _check(item, gm)
        nodes = _lines(gm)
        change = GraphChange(change.before, nodes)
        if changes is not None:
            changes[item.name] = change
        _log.debug("%s: %.3f s, %s", item.name, took, _Changes(change))
        log_graph(f"treefx_pass_{place}_{item.name}", gm)
        _write(f"{run}.{place}.{item.name}", before, _printed(gm))
    return gm


def log_graph(name: str, gm: fx.GraphModule) -> None:
    """Write a graph into PyTorch's structured log (``TORCH_TRACE``); tlparse lists it."""
    trace_structured(
        "artifact",
        lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: _readable(gm),
        expect_trace_id=False,
    )


def _check(item: Pass, gm: fx.GraphModule) -> None:
    try:
        gm.graph.lint()
    except Exception as error:
        raise RuntimeError(f"pass {item.name!r} left a graph that is not well-formed: {error}") from error


def _lines(gm: fx.GraphModule) -> tuple[NodeLine, ...]:
    """Return every node's line; equal texts are one object, since lines live long."""
    return tuple(NodeLine(node.op, sys.intern(str(node.target)), _module(node)) for node in gm.graph.nodes)


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return sys.intern(str(next(reversed(stack.values()))[0])) if stack else ""


def _operators(nodes: Iterable[NodeLine]) -> Counter[str]:
    return Counter(node.target for node in nodes if node.kind == "call_function")


@dataclass(frozen=True)
class _Changes:
    """``aten.mm.default: 12 -> 10, ...``, written only where the log prints it."""

    change: GraphChange

    def __str__(self) -> str:
        before, after = self.change.operators_before, self.change.operators_after
        names = sorted(name for name in before | after if before[name] != after[name])
        return ", ".join(f"{name}: {before[name]} -> {after[name]}" for name in names) or "the same operators"


def _printed(gm: fx.GraphModule) -> str:
    """The graph as text, or why it cannot be printed; nothing where it is not dumped."""
    return _readable(gm) if dumps_wanted() else ""


def _readable(gm: fx.GraphModule) -> str:
    try:
        return gm.print_readable(print_output=False)
    except Exception as error:  # a dump never changes a run
        return f"# not printed: {type(error).__name__}: {error}\n"


def _write(name: str, before: str, after: str) -> None:
    if not dumps_wanted():
        return
    dump("passes", f"{name}.before.py", before)
    dump("passes", f"{name}.after.py", after)
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"before {name}", f"after {name}", lineterm=""
    )
    dump("passes", f"{name}.diff", "\n".join(lines) + "\n")
