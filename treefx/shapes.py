"""What is known and compiled for one shape of inputs, shared by all graphs of Dynamo that compute the same.

Dynamo captures a model anew when it finds that a size changes, and may from then on take the new graph for batches that
the old one was compiled for. The two become equal graphs as soon as their sizes are filled in; so shapes are kept by
what the graph computes, and a batch of a shape seen before compiles nothing, whichever graph it comes through.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.output_use import OutputUse
from treefx.passes.fingerprint import fingerprint, tensor_key
from treefx.passes.padding import Padding
from treefx.passes.pipeline import Analysis, Rewritten, Variant, compile_variant, rewrite
from treefx.passes.runner import Pass

__all__ = ["Executable", "Shape", "compiling", "forget_shapes", "share_shape"]

compiling = threading.RLock()
"""Held while graphs are traced and compiled: tracing changes state of the whole process."""


class Executable:
    """A compiled variant, good for the numbers of tokens that its conditions admit.

    Attributes:
        rewritten: What was compiled.
        graphs: Its stages for the inspector: "rewritten", and "forward" and "backward" as the inner compiler got them.
        run: The compiled function of tensors, metadata of the batch and number of tokens.
        seconds: What rewriting and compiling took.
    """

    def __init__(self, analysis: Analysis, variant: Variant, args: Sequence[Tensor], passes: Sequence[Pass]) -> None:
        started = time.perf_counter()
        self.rewritten: Rewritten = rewrite(analysis, variant, args, passes)
        rewriting = time.perf_counter() - started
        self.graphs: dict[str, fx.GraphModule] = {"rewritten": self.rewritten.gm}
        self.run = compile_variant(analysis, self.rewritten, self.graphs.__setitem__, passes)
        self.seconds = {"rewrite": rewriting, "compile": time.perf_counter() - started - rewriting}


class Shape:
    """An analysis, and what was compiled from it.

    Args:
        analysis: Of a graph whose token axes are known.
        args: The tensors it was made with; the values of some buffers among them may have entered a proof.
        outputs: What callers use of the graph.
        key: Equal for graphs and tensors that compiled code cannot tell apart.
    """

    def __init__(self, analysis: Analysis, args: Sequence[Tensor], outputs: OutputUse, key: tuple[Any, ...]) -> None:
        self.analysis, self.outputs, self.key = analysis, outputs, key
        self.padding = Padding(analysis)
        self._executables: dict[Variant, list[Executable]] = {}
        read = analysis.constants.read if analysis.constants is not None else set()
        self._buffers = {i: _version(args[i]) for i in read}
        self._storages = [args[i].untyped_storage() for i in read]  # held, so that no other tensor gets their addresses

    def holds(self, args: Sequence[Tensor]) -> bool:
        """Whether the buffers whose values entered a proof are still the same."""
        return all(_version(args[i]) == seen for i, seen in self._buffers.items())

    @property
    def rewrites(self) -> list[Rewritten]:
        """What was rewritten so far, in no particular order."""
        return [item.rewritten for found in list(self._executables.values()) for item in found]

    def executable(
        self,
        variant: Variant,
        args: Sequence[Tensor],
        sizes: Sequence[int],
        passes: Sequence[Pass],
        compiled: Callable[[Executable], None],
    ) -> Executable:
        """What runs a variant for a number of tokens (and sizes of a cut); ``compiled`` is told of a new one."""
        with compiling:
            known = self._executables.setdefault(variant, [])
            for executable in known:
                if executable.rewritten.count.admits(*sizes):
                    return executable
            known.append(Executable(self.analysis, variant, args, passes))
            compiled(known[-1])
            return known[-1]


def _version(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x._version


_shapes: weakref.WeakSet[Shape] = weakref.WeakSet()


def share_shape(analysis: Analysis, args: Sequence[Tensor], outputs: OutputUse, *settings: object) -> Shape:
    """The shape that another graph has for this analysis and these tensors, or a new one.

    Args:
        analysis: A new analysis.
        args: The tensors of the call.
        outputs: For a new shape.
        settings: What else decides about the compiled code: options, facts proved from the inputs.
    """
    state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled())
    key = (fingerprint(analysis.gm), tuple(analysis.roles), *map(tensor_key, args), *state, *settings)
    for shape in list(_shapes):
        if shape.key == key and shape.holds(args):
            return shape
    made = Shape(analysis, args, outputs, key)
    _shapes.add(made)
    return made


def forget_shapes() -> None:
    """Share nothing that was compiled so far; ``torch.compiler.reset`` asks for it."""
    _shapes.clear()
