"""Seconds of the nodes of a graph, each run by itself as in eager mode.

A compiler fuses operators, so no compiled step has such times. They say where a forward spends its time, on rows and on
distinct tokens measured in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["time_nodes"]

_RUNS = 3


def time_nodes(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, float]:
    """Run a graph three times without gradients, and take each node's least seconds.

    Args:
        gm: A graph of ATen operators.
        inputs: Of its placeholders; none of them is changed, and no random number is drawn from the caller's state.

    Returns:
        By name of each call.
    """
    written = _written(gm)
    on_device = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in inputs)
    timed = _Timed(gm, on_device)
    with torch.no_grad(), torch._C._DisableAutocast(), torch.random.fork_rng():
        for _ in range(_RUNS):
            given = [x.clone() if i in written or _is_state(x) else x for i, x in enumerate(inputs)]
            timed.run(*given)
    return timed.seconds


def _is_state(x: Any) -> bool:
    """Whether a tensor may be written in place by an operator that does not say so in its schema."""
    return isinstance(x, Tensor) and not isinstance(x, nn.Parameter)


def _written(gm: fx.GraphModule) -> set[int]:
    """Positions of the inputs that an operator writes."""
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found = set()
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(() if schema is None else schema.arguments, node.args):
            if argument.is_write and value in inputs:
                found.add(inputs[value])
    return found


class _Timed(fx.Interpreter):
    """Notes the least seconds of each call."""

    def __init__(self, gm: fx.GraphModule, on_device: bool) -> None:
        super().__init__(gm)
        self.seconds: dict[str, float] = {}
        self._on_device = on_device

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        started = time.perf_counter()
        result = super().run_node(n)
        if self._on_device:
            torch.accelerator.synchronize()
        taken = time.perf_counter() - started
        self.seconds[n.name] = min(taken, self.seconds.get(n.name, taken))
        return result
