"""What a call of the module that takes the ids is to run: its rows traced and proved as the backend does it, on a
skeleton, and the tree of the call built by what was proved."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.kernels.lasting import lasting
from treefx.kernels.recurrence.tree_conv import find_depths
from treefx.kernels.score import Expr
from treefx.passes.labels.facts import fact_of
from treefx.passes.pipeline import build_passes
from treefx.passes.scores.attention_facts import Attention
from treefx.runtime.analyses import Analyses
from treefx.runtime.batch import Batch, pad_batch
from treefx.runtime.converted.branches import Branches
from treefx.runtime.converted.frame import blocks_of, check_blocks, check_frame, module_of
from treefx.runtime.converted.seam import Spec, attention_modules, listen, tree_of
from treefx.runtime.converted.sequence_parallel import split_over
from treefx.runtime.converted.skeleton import WRAPPERS, refresh, skeleton, wrapped_in
from treefx.runtime.converted.specs import Lifted, check_function, lifted_as, named
from treefx.runtime.dynamo import role_of
from treefx.runtime.kept.retries import LATER
from treefx.runtime.padding import Grid
from treefx.runtime.records import Records
from treefx.runtime.segments import find_starts, has_gaps
from treefx.runtime.shapes import Shape
from treefx.runtime.ways.rows import Rows

__all__ = ["Plan", "Planner", "without_compiled_name"]

_PASSING = ("more than",)
"""How reasons begin that hold for a call and not for the model."""


@dataclass(frozen=True)
class Plan:
    """How to run one call on its distinct tokens.

    ``batch`` says which these are, on the CPU; ``tree`` is what its attentions get, ``specs`` what each computes.
    """

    batch: Batch
    tree: Tensor
    specs: Mapping[str, Spec]
    raw_tokens: int
    tokens: int
    """Tokens under the mask, in rows and distinct."""
    captured: fx.GraphModule
    seconds: Mapping[str, float]


class _Planned(Exception):
    """Ends a call of the traced skeleton, which never runs: a plan, or why the call runs on rows."""

    def __init__(self, found: Plan | str) -> None:
        super().__init__()
        self.found = found


class Planner:
    """Plans the calls of one module.

    Args:
        owner: The module that takes the ids.
        config: ``padding`` and ``min_sharing`` are those that matter.
    """

    def __init__(self, owner: nn.Module, config: Config) -> None:
        self._owner, self._config = owner, config
        self._known: list[nn.Module] = []
        self._compiled: Callable[..., Any] = owner
        self._checked: set[Any] = set()

    def plan(self, given: Mapping[str, Any]) -> Plan | str:
        """A plan for a call with these arguments, or why it runs on rows.

        Raises:
            UnsupportedError: The model is not proved to compute on a tree what it computes on rows.
        """
        on_cpu = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
        on_cpu["use_cache"] = False
        kind = tuple(sorted(name for name, x in on_cpu.items() if x is not None))
        with lasting():  # old log-probabilities often come first, under inference mode: later calls change the skeleton
            self._renew()
            if kind not in self._checked:
                check_frame(self._copy.eval(), self._blocks, on_cpu)
                self._checked.add(kind)
        for module, copied in self._pairs:
            refresh(copied, module)
        try:
            with torch.no_grad():
                self._compiled(**on_cpu)
        except _Planned as planned:
            return planned.found
        except FailOnRecompileLimitHit:
            return "more than torch._dynamo.config.recompile_limit kinds of calls"
        except TorchDynamoException as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UnsupportedError(f"its rows cannot be traced as one graph: {reason}") from error
        raise AssertionError("a skeleton has run")

    def _renew(self) -> None:
        """Make the skeleton, again if the modules of the model are others than those it was made of."""
        modules = list(self._owner.modules())
        if modules != self._known:
            self._copy = skeleton(self._owner)
            self._pairs = list(zip(_without_wrappers(modules), self._copy.modules(), strict=True))
            self.modules = attention_modules(self._owner)
            for module in self.modules.values():
                listen(module)  # before anything is traced: a trace holds only while the file asks the same object
            attention = attention_modules(self._copy)
            self._blocks = blocks_of(self._copy, attention)
            self._compiled = torch.compile(
                _own_code(self._copy), backend=self._backend(attention), fullgraph=True, dynamic=True
            )
            self._known, self._checked = modules, set()

    def _backend(self, attention: Mapping[str, nn.Module]) -> Any:
        def treefx(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
            nodes = gm.graph.find_nodes(op="placeholder")
            roles = [role_of(node, example) for node, example in zip(nodes, examples, strict=True)]
            graph = _Graph(gm, roles, self._config, attention, self._blocks, self._owner)

            def run(*args: Any) -> Any:
                raise _Planned(graph.plan(args))

            return run

        setattr(treefx, "compiler_name", "treefx")  # what Dynamo traces for the backend, it traces here too
        return treefx


def _without_wrappers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules without those that stand for another one."""
    return [module for module in modules if wrapped_in(module) is None]


def without_compiled_name(name: str) -> str:
    """The name that a module has in the skeleton."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _own_code(module: nn.Module) -> Any:
    """A function that calls a module, with code of its own: Dynamo counts compilations by code."""

    def call(**inputs: Any) -> Any:
        return module(**inputs)

    return types.FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )


class _Graph:
    """One graph of the skeleton: plans the calls that Dynamo has traced to it."""

    def __init__(
        self,
        gm: fx.GraphModule,
        roles: list[str],
        config: Config,
        attention: Mapping[str, nn.Module],
        blocks: set[str],
        owner: nn.Module,
    ) -> None:
        self._gm, self._config, self._modules, self._blocks, self._owner = gm, config, attention, blocks, owner
        self._records = Records(gm)
        self._analyses = Analyses(gm, roles, build_passes(config.compiler), config, self._records)
        self._known: dict[tuple[int, frozenset[Expr]], dict[str, Lifted]] = {}
        self._branches = Branches(gm, roles)

    def plan(self, args: Sequence[Any]) -> Plan | str:
        """A plan, or why the call runs on rows."""
        shape = self._analyses.shape(args)
        if isinstance(shape, str):
            if shape.startswith(_PASSING) or shape.endswith(LATER):
                return shape
            raise UnsupportedError(shape or "no input is looked up in an embedding")
        self._check(shape)
        tensors = shape.analysis.known.with_parts(self._analyses.tensors(args))
        grid = shape.grid(tensors)
        starts = find_starts(shape.analysis, grid) if shape.analysis.segmented else None
        seen, keep = self._keep(shape, grid, starts)
        if not shape.padding.is_defined(grid, keep, starts):
            return "a position that sees no key is read by the caller"
        rows = Rows.of(shape, tensors, grid, keep, starts)
        batch = pad_batch(rows.batch(), split_over(self._owner))
        branch = self._branches.not_taken(batch.size)
        if branch is not None:
            return f"code of the model decides by the size of a batch, otherwise on the distinct tokens: {branch}"
        return self._found(shape, grid, batch, rows.redundant, seen)

    def _found(
        self, shape: Shape, grid: Grid, batch: Batch, redundant: frozenset[Expr], seen: Tensor | None
    ) -> Plan | str:
        found = self._lifted(shape, redundant)
        others = [condition for item in found.values() for condition in item.others]
        if others:
            return f"an attention asks more of a pair of tokens than a window: {named(others[0])}"
        row, column, end, token_of = batch.metadata
        visible = [shape.padding.met(grid, conditions) for conditions in {item.of_keys for item in found.values()}]
        if any(not torch.equal(item, visible[0]) for item in visible[1:]):
            return "attentions of the model hide different keys"
        at_tokens = None if bool(visible[0][token_of >= 0].all()) else visible[0][row, column]
        place = find_depths(end) if batch.own_positions else column
        counted = token_of >= 0 if seen is None else seen
        distinct = batch.tokens if at_tokens is None else int(at_tokens[: batch.tokens].sum())
        specs = {name: item.spec for name, item in found.items()}
        return Plan(
            batch, tree_of(end, place, at_tokens), specs, int(counted.sum()), distinct, self._gm,
            dict(shape.analysis.seconds),
        )  # fmt: skip

    def _keep(self, shape: Shape, grid: Grid, starts: Tensor | None) -> Any:
        """The positions that others see, and those that have to run; None where that is all of them.

        A padded position runs if it sees a key: what the model gives there the caller may read. One that sees none
        (before a row, or a window behind it) has no value of its own, and does not run.
        """
        seen = shape.padding.seen(grid)
        if seen is None:
            return None, None
        if self._config.padding == "drop":
            keep = seen
        elif starts is not None:
            keep = torch.ones_like(seen)
        else:
            windows = [item.spec.window for item in self._lifted(shape, frozenset()).values()]
            before = seen.to(torch.int64).cumsum(1)
            width = min([window for window in windows if window is not None], default=seen.shape[1])
            keep = before > torch.nn.functional.pad(before, (width, 0))[:, : seen.shape[1]]
        if starts is not None and has_gaps(starts, keep):
            return seen, None
        return seen, keep

    def _check(self, shape: Shape) -> None:
        """Raise unless all that is asked of the model itself holds."""
        if getattr(shape, "converted", False):
            return
        analysis = shape.analysis
        if analysis.recurrences or analysis.has_side_effects:
            what = (
                "has a recurrence along the tokens" if analysis.recurrences else "draws random numbers or keeps state"
            )
            raise UnsupportedError(f"the model {what}")
        outputs: Any = next(iter(analysis.gm.graph.find_nodes(op="output"))).args[0]
        tensors = {i for i, item in enumerate(outputs) if isinstance(item, fx.Node)}
        if tensors != set(analysis.packed_outputs):
            raise UnsupportedError("the module that takes the ids returns values that are none of tokens")
        check_blocks(analysis, self._blocks)
        self._lifted(shape, frozenset())
        setattr(shape, "converted", True)

    def _lifted(self, shape: Shape, redundant: frozenset[Expr]) -> dict[str, Lifted]:
        """What each attention module computes."""
        key = (id(shape), redundant)
        if key not in self._known:
            nodes = [node for node in shape.analysis.gm.graph.nodes if node.op == "call_function"]
            laws = [(module_of(node), fact_of(node).law) for node in nodes]
            found = [(name, law) for name, law in laws if isinstance(law, Attention)]
            if sorted(name for name, _ in found) != sorted(self._modules):
                raise UnsupportedError("not every attention of the model takes its function from transformers, once")
            taken = {name: lifted_as(law, redundant) for name, law in found}
            if not redundant:
                for name, item in taken.items():
                    check_function(self._modules[name], item.spec, name)
            self._known[key] = taken
        return self._known[key]
