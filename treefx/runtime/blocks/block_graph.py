"""One graph of a block under ``treefx.distribute`` at run time: its tokens come packed, its tree as inputs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import CompileContext

from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.forests.context import current_tree
from treefx.kernels.lasting import lasting
from treefx.passes.analysis import Rewritten
from treefx.passes.packing.compile_inner import Compiled, compile_inner
from treefx.passes.packing.kernel_sources import write_kernel_sources
from treefx.runtime.blocks.on_tree import OnTree, rewrite_on_tree
from treefx.runtime.compiling import compiling
from treefx.runtime.dynamo import why_cut
from treefx.runtime.kept.proof import Proof
from treefx.runtime.report import GraphReport, Reports

__all__ = ["BlockGraph"]

_WHOLE = (
    "under treefx.distribute every block must be one whole graph, because what runs beside it lets the rows see each "
    "other, but Dynamo cut one: {}; run it without treefx.distribute (TORCH_LOGS=graph_breaks shows the line)"
)


class BlockGraph:
    """What the backend returns to Dynamo for a graph whose hidden states are marked by ``treefx::on_tree``.

    Args:
        gm: Dynamo's graph, never changed.
        roles: "parameter", "buffer", "input" or "variable" per placeholder.
        config: The options; ``inner`` and ``mode`` are those that matter here.
    """

    def __init__(self, gm: fx.GraphModule, roles: list[str], config: Config) -> None:
        self.gm, self.roles, self.config = gm, roles, config
        compile_id = CompileContext.current_compile_id()
        self._graphs: dict[str, fx.GraphModule] = {"captured": gm}
        self._reports = Reports(None if compile_id is None else compile_id.frame_id, self._graphs)
        self._compiled: list[tuple[OnTree, Proof, Compiled]] = []

    @property
    def reports(self) -> list[GraphReport]:
        """One report per block that ran the graph."""
        return self._reports.all()

    @property
    def rewrites(self) -> list[Rewritten]:
        """None: the inspector describes attentions of graphs with token ids."""
        return []

    def __call__(self, *args: Any) -> Any:
        cut = why_cut(self.gm)
        if cut is not None:
            raise UnsupportedError(_WHOLE.format(cut))
        parameters = [x for x, role in zip(args, self.roles, strict=True) if role == "parameter"]
        report = self._reports.of(parameters)
        report.count_call()
        with compiling, lasting():
            rewritten, run = self._admitting(args, report)
        report.ran, report.way, report.attention_rewritten = "packed", "block", rewritten.attentions
        report.has_tokens, report.attention_layers = True, rewritten.attentions
        tree = current_tree()
        if tree is not None:  # in the forward; a recomputation in the backward keeps the figures
            report.raw_tokens, report.tokens = tree.raw_tokens, tree.tokens
            report.parameters.update(dict.fromkeys(tree.parameters))
        with torch._C._DisableAutocast():
            return run(*args)

    def _admitting(self, args: tuple[Any, ...], report: GraphReport) -> tuple[OnTree, Compiled]:
        tokens = next(x.shape[0] for x in args if isinstance(x, Tensor) and x.dtype is torch.int32)
        for rewritten, proof, run in self._compiled:
            if (rewritten.count.count is None or rewritten.count.admits(tokens)) and proof.holds(args):
                return rewritten, run
        started = time.perf_counter()
        rewritten = rewrite_on_tree(self.gm, args, self.roles)
        self._graphs["rewritten"] = rewritten.gm
        report.seconds["rewrite"] = time.perf_counter() - started
        write_kernel_sources(rewritten.gm)
        with torch._C._DisableAutocast():
            run = compile_inner(
                rewritten.gm, rewritten.inputs, rewritten.mode, self.config.compiler, self._graphs.__setitem__
            )
        report.seconds["compile"] = time.perf_counter() - started - report.seconds["rewrite"]
        report.compiles += 1
        self._compiled.append((rewritten, Proof(args, rewritten.read), run))
        return rewritten, run
