"""Plan calls of the module that takes the ids: trace and prove rows, build the tree.

Rows are traced on a skeleton and proved as by the backend.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.inputs.sizes import COLUMNS, ROWS
from treefx.kernels.memory import lasting
from treefx.kernels.recurrence.tree_conv import find_depths
from treefx.passes.analysis import Analysis
from treefx.passes.labels.facts import Kind, fact_of
from treefx.passes.labels.liveness import live_nodes
from treefx.passes.labels.purity import changed_inputs, randomness
from treefx.passes.pipeline import build_passes
from treefx.runtime.analyses import Analyses
from treefx.runtime.call_plan import Batch, CallPlan, Policy, Unshared, plan_call
from treefx.runtime.converted.attentions import Attentions
from treefx.runtime.converted.branches import Branches
from treefx.runtime.converted.frame import blocks_of, cache_matters, check_frame, kinds_of_layers, run_around
from treefx.runtime.converted.kept_values import Kept, kept_values, name_of, outputs_of
from treefx.runtime.converted.paths import count_leaves, find_mixers
from treefx.runtime.converted.positions import Tables, find_tables
from treefx.runtime.converted.readers import find_hook
from treefx.runtime.converted.seam import attention_modules, tree_of
from treefx.runtime.converted.sequence_parallel import split_over
from treefx.runtime.converted.sizes import SIZE, check_blocks, computes_with_size
from treefx.runtime.converted.skeleton import WRAPPERS, Buffers, codes_of, refresh, skeleton, wrapped_in
from treefx.runtime.converted.variants import Variant, Variants
from treefx.runtime.converted.written import plane_of
from treefx.runtime.dynamo import keep_graphs_whole, role_of
from treefx.runtime.padding import Grid
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import Records
from treefx.runtime.shapes import Shape

__all__ = ["Plan", "Planner", "without_compiled_name"]


@dataclass(frozen=True)
class Plan:
    """How to run one call on its distinct tokens.

    ``batch`` holds these, on the CPU; ``tree`` is the input of its attentions, ``variant`` their scores.
    """

    batch: Batch
    tree: Tensor
    variant: Variant
    raw_tokens: int
    tokens: int
    """Tokens under the mask, in rows and distinct."""
    shares: bool
    """Whether running packed pays."""
    captured: fx.GraphModule
    kept: frozenset[str]
    """Attributes and buffers in which a call leaves values that do not depend on its tokens."""
    seconds: Mapping[str, float]
    kind: tuple[str, ...] = ()
    """The names of the arguments of the call, and its switches."""
    mixers: frozenset[str] = frozenset()
    """Names of the modules that run on the paths of the tree."""
    kinds_of_masks: tuple[str, ...] = ()
    """The ``kinds`` that ``packed_inputs`` takes."""


_NO_MIXERS: frozenset[str] = frozenset()


class _Planned(Exception):
    """End a call of the traced skeleton, which never runs, with a plan or a reason."""

    def __init__(self, found: Plan | Reason) -> None:
        super().__init__()
        self.found = found


class _KeptError(UnsupportedError):
    """Something keeps a value made of sizes or tokens; ``where`` is its attribute."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(_KEPT.format(where, what))
        self.where, self.what = where, what


class Planner:
    """Plans the calls of one module.

    Args:
        owner: The module that takes the ids.
        config: ``padding`` and ``min_sharing`` are those that matter.
    """

    def __init__(self, owner: nn.Module, config: Config) -> None:
        self._owner, self._config = owner, config
        self._known: list[nn.Module] = []
        self._codes: list[Any] = []
        self._compiled: Callable[..., Any] = owner
        self._mask: Tensor | None = None
        self._kinds: set[tuple[str, ...]] = set()
        """Kinds of calls for which the code around the blocks was tested before their first trace."""
        self._framed: weakref.WeakKeyDictionary[fx.GraphModule, dict[frozenset[str], tuple[str, ...]]]
        self._framed = weakref.WeakKeyDictionary()
        """Traced graphs, with the form of their masks by mixers: Dynamo traces again where that code does otherwise."""
        self._refused: dict[Any, str] = {}
        self._cached: dict[Any, bool] = {}
        self._variants = Variants()
        self._tables: Tables | None = None
        """Modules that are traced as lookups; None before a trace has failed."""
        self._found_tables: Tables | None = None

    def plan(self, given: Mapping[str, Any]) -> Plan | Reason:
        """A plan for a call with these arguments, or why it runs on rows.

        Raises:
            UnsupportedError: Results on a tree are not proved to equal those on rows.
        """
        on_cpu = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
        on_cpu["use_cache"] = False
        kind = _kind_of(on_cpu)
        with lasting():  # old log-probabilities often come first, under inference mode: later calls change the skeleton
            modules = self._renew()
            hook = find_hook(modules)
            if hook is not None:
                raise UnsupportedError(_HOOKED.format(hook))
            if self._refresh():
                self._refused.clear()
            key = kind, torch.is_grad_enabled(), _settings(self._owner) if self._refused else ()
            if key in self._refused:
                raise UnsupportedError(self._refused[key])
        if kind not in self._kinds:
            self._check_frame(kind, on_cpu, _NO_MIXERS, self._copy.eval())
            self._kinds.add(kind)
        found = self._traced(kind, on_cpu)
        if not isinstance(found, Plan):
            return found
        forms = self._framed.setdefault(found.captured, {})
        if found.mixers not in forms:  # it draws no random numbers, so the model's own mode can be tested
            forms[found.mixers] = self._check_frame(kind, on_cpu, found.mixers, self._copy)
        return replace(found, kinds_of_masks=forms[found.mixers])

    def _check_frame(
        self, kind: tuple[str, ...], given: Mapping[str, Any], mixers: frozenset[str], copied: nn.Module
    ) -> tuple[str, ...]:
        """Find a form of the mask in which the tree reaches attentions and mixers, and nothing else changes."""
        errors = []
        with lasting():
            for form in dict.fromkeys([(), self._kinds_of_layers]):
                try:
                    check_frame(copied, self._blocks, given, readers=self._attention | mixers, kinds=form)
                except UnsupportedError as error:
                    errors.append(error)
                else:
                    self._refresh()
                    return form
        shown = errors[-1] if mixers else errors[0]
        self.refuse(kind, shown.text)
        raise shown

    def _traced(self, kind: tuple[str, ...], on_cpu: Mapping[str, Any]) -> Plan | Reason:
        self._mask = on_cpu.get("attention_mask")
        if self._tables is not None and _largest_position(on_cpu) > self._tables.longest:
            return Reason(Cause.SIZES, _BEYOND.format(self._tables.longest))
        try:  # with gradients on or off as they are, which the code of a model may ask for
            if self._tables is None:
                self._compiled(**on_cpu)
            else:
                with self._tables.traced():
                    self._compiled(**on_cpu)
        except _Planned as planned:
            found = planned.found
            if not isinstance(found, Plan):
                return found
            kept = found.kept if self._tables is None else found.kept | self._tables.kept
            return replace(found, kind=kind, kept=kept)
        except FailOnRecompileLimitHit:
            return Reason(Cause.MANY_SHAPES, "more than torch._dynamo.config.recompile_limit kinds of calls")
        except _KeptError as error:
            if self._tables is None and error.where in self._find_tables(on_cpu).kept:
                self._tables = self._found_tables
                return self._traced(kind, on_cpu)
            raise
        except TorchDynamoException as error:
            if self._tables is None and self._find_tables(on_cpu):
                self._tables = self._found_tables
                return self._traced(kind, on_cpu)
            line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            reason = f"its rows cannot be traced as one graph: {line}"
            self.refuse(kind, reason)
            raise UnsupportedError(reason) from error
        raise AssertionError("a skeleton has run")

    def _find_tables(self, given: Mapping[str, Any]) -> Tables:
        """Return the modules that can be traced as lookups, where no trace goes through them."""
        if self._found_tables is None:
            with lasting():
                copied = self._copy.eval()
                self._found_tables = find_tables(copied, self._blocks, lambda: run_around(copied, self._blocks, given))
                self._refresh()
        return self._found_tables

    def refuse(self, kind: tuple[str, ...], reason: str) -> None:
        """Run calls of a kind on rows until a setting of the model changes."""
        for gradients in (False, True):
            self._refused[kind, gradients, _settings(self._owner)] = reason

    def cache_matters(self, given: Mapping[str, Any]) -> bool:
        """Return whether a cache changes the masks of a packed row.

        It is tested on the made-up row of ``cache_matters``.
        """
        key = _kind_of(given), _settings(self._owner)
        with lasting():
            self._renew()
            if key not in self._cached:
                self._cached[key] = cache_matters(self._copy.eval(), self._blocks, given)
        return self._cached[key]

    def _refresh(self) -> bool:
        return refresh(self._pairs)

    def _renew(self) -> list[nn.Module]:
        """Make the skeleton, again if the modules of the model or their code have changed."""
        modules = list(self._owner.modules())
        codes = codes_of(modules)
        if modules != self._known or codes != self._codes:
            self._copy = skeleton(self._owner)
            self._pairs = list(zip(_without_wrappers(modules), self._copy.modules(), strict=True))
            self._buffers = Buffers(self._pairs)
            modules_of = attention_modules(self._owner)
            self.modules = {without_compiled_name(name): module for name, module in modules_of.items()}
            attention = attention_modules(self._copy)
            self._blocks, self._attention = blocks_of(self._copy, attention), frozenset(attention)
            self._kinds_of_layers = kinds_of_layers(self._owner)
            self.by_name = {without_compiled_name(name): module for name, module in self._owner.named_modules()}
            self._compiled = torch.compile(
                _own_code(self._copy), backend=self._backend(attention), fullgraph=True, dynamic=True
            )
            self._known, self._codes = modules, codes
            self._kinds, self._refused, self._cached = set(), {}, {}
            self._framed.clear()
            self._tables = self._found_tables = None
        self._buffers.refresh()
        return modules

    def _backend(self, attention: Mapping[str, nn.Module]) -> Any:
        keep_graphs_whole()

        def treefx(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
            nodes = gm.graph.find_nodes(op="placeholder")
            roles = [role_of(node, example) for node, example in zip(nodes, examples, strict=True)]
            graph = _Graph(
                gm, roles, self._config, attention, self._blocks, self._owner, kept_values("module"),
                self._variants,
            )  # fmt: skip

            def run(*args: Any) -> Any:
                with torch.no_grad():
                    raise _Planned(graph.plan(args, self._mask))

            return run

        setattr(treefx, "compiler_name", "treefx")  # Dynamo traces here as for the backend
        return treefx


def _without_wrappers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules without those that stand for another one."""
    return [module for module in modules if wrapped_in(module) is None]


def without_compiled_name(name: str) -> str:
    """The name that a module has in the skeleton."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _own_code(module: nn.Module) -> Any:
    """Make a function with separate code that calls a module.

    Dynamo counts compilations by code.
    """

    def call(**inputs: Any) -> Any:
        return module(**inputs)

    return types.FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )


def _kind_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the arguments of a call, with switches and words among them: a refusal holds for one kind."""
    shown = [f"{name}={x}" if isinstance(x, bool | str) else name for name, x in given.items() if x is not None]
    return tuple(sorted(shown))


def _settings(owner: nn.Module) -> tuple[Any, ...]:
    """Numbers and names in the configuration of a model."""
    values = vars(getattr(owner, "config", None) or types.SimpleNamespace()).items()
    return tuple(item for item in values if isinstance(item[1], str | int | float | None))


def _is_of_weights(node: fx.Node) -> bool:
    """Return whether a value is the same on rows and on the packed row.

    It depends on no token and on no size of the batch.
    """
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        item = waiting.pop()
        value = item.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else [value]
        if computes_with_size(item) or any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes):
            return False
        seen.add(item)
        waiting += [x for x in item.all_input_nodes if x not in seen]
    return fact_of(node).kind is Kind.INVARIANT


def _serves(shape: Shape, plan: CallPlan) -> bool:
    """Return whether what the analysis proved of rows and columns holds for the paths of a tree too."""
    batch = shape.analysis.batch
    assert batch is not None
    end = plan.batch.metadata[2]
    sizes = {ROWS: count_leaves(end), COLUMNS: int(find_depths(end).max()) + 1}
    return batch.holds_for(batch.values(plan.tensors), sizes)


def _largest_position(given: Mapping[str, Any]) -> int:
    positions = given.get("position_ids")
    return int(given["input_ids"].shape[1] - 1 if positions is None else positions.max())


_BEYOND = "positions beyond {}, up to which a module that makes values of positions was tried"
_KEPT = "{}: {}. Return the value from the model, or compute it from what the model returns"
_WIDE = Reason(Cause.VALUES, "a number that an attention reads of a token does not fit into 32 bits")
_ONE_ROW = Reason(Cause.VALUES, "a single row, of which a recurrence hides no padding; with more rows it does")
_FRACTIONS = Reason(
    Cause.VALUES, "an attention_mask with other numbers than 0 and 1, which a recurrence multiplies with"
)
_OTHER_ROWS = Reason(
    Cause.SIZES, "code of a recurrence decides by the size of a batch, otherwise on the rows of the tree"
)
_MANY = Reason(Cause.MANY_BUFFERS, "constants of attentions (tables by column, say) change too often from call to call")
_HOOKED = "{}, which would get distinct tokens in place of rows. Remove it, or register it on the model that is called"


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
        kept: Sequence[Kept],
        variants: Variants,
    ) -> None:
        self._kept, self._written_to = kept, set[str]()
        self._gm, self._config, self._blocks, self._owner = gm, config, blocks, owner
        self._records = Records(gm)
        self._analyses = Analyses(gm, roles, build_passes(config.compiler), config, self._records)
        self._attentions, self._variants = Attentions(attention), variants
        self._branches = Branches(gm, roles)
        self._proofs: weakref.WeakKeyDictionary[Shape, UnsupportedError | None] = weakref.WeakKeyDictionary()
        """Obstacles of shapes, which graphs of other models may share; None where a shape is proved."""
        self._mixers: weakref.WeakKeyDictionary[Shape, frozenset[str]] = weakref.WeakKeyDictionary()
        """Of proved shapes, the names of the modules with recurrences or convolutions along tokens."""

    def plan(self, args: Sequence[Any], mask: Tensor | None) -> Plan | Reason:
        """A plan, or why the call runs on rows; ``mask`` [B, T] is the caller's."""
        shape = self._analyses.shape(args)
        if isinstance(shape, Reason):
            if shape.passes:
                return shape
            raise UnsupportedError(shape.text or "no input is looked up in an embedding")
        self._check(shape, args)
        tensors = shape.analysis.known.with_parts(self._analyses.tensors(args))
        policy = Policy(self._config.min_sharing, "positions", self._keep, ranks=split_over(self._owner))
        found = plan_call(shape, tensors, policy)
        assert not isinstance(found, Unshared), "only a policy that counts tokens returns it"
        if isinstance(found, Reason):
            return found
        branch = self._branches.not_taken(found.batch.size)
        if branch is not None:
            text = f"code of the model decides by the size of a batch, otherwise on the distinct tokens: {branch}"
            return Reason(Cause.SIZES, text)
        return self._found(shape, found, mask)

    def _found(self, shape: Shape, plan: CallPlan, mask: Tensor | None) -> Plan | Reason:
        batch, grid, seen = plan.batch, plan.grid, plan.seen
        found = self._attentions.of(shape, plan.redundant)
        row, column, end, token_of = batch.metadata
        planes = [plane_of(plane, batch, grid, shape.padding) for plane in found.layout.planes]
        if any(plane is None for plane in planes):
            return _WIDE
        mixers = self._mixers[shape]
        if mixers:  # they read the caller's mask, where they run on rows
            if mask is not None and grid.rows == 1:
                return _ONE_ROW
            if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
                return _FRACTIONS
            if not _serves(shape, plan):
                return _OTHER_ROWS
            planes.append((torch.ones_like(end) if mask is None else mask[row, column]).to(torch.int32))
        variant = self._variants.find(found.stated(grid), len(planes))
        if variant is None:
            return _MANY
        visible = [shape.padding.met(grid, item) for item in {item.of_keys for item in found.written.values()}]
        met = torch.stack(visible).any(0)[row, column]
        counted = token_of >= 0 if seen is None else seen
        return Plan(
            batch, tree_of(end, [plane for plane in planes if plane is not None], variant.size), variant,
            int(counted.sum()), int(met[: batch.tokens].sum()), plan.shares, self._gm,
            frozenset({*self._written_to, *(item.where for item in self._kept)}), dict(shape.analysis.seconds),
            mixers=mixers,
        )  # fmt: skip

    def _keep(self, shape: Shape, grid: Grid, starts: Tensor | None) -> Any:
        """Return positions that others see, and positions that run; None for all of them.

        A padded position runs if it sees a key: the caller may read its result. One that sees none (before a row, or a
        window behind it) has no defined value, and does not run.
        """
        seen = shape.padding.seen(grid)
        if seen is None:
            return None, None
        if self._config.padding == "drop":
            keep = shape.padding.reached(grid, seen)
        elif starts is not None:
            keep = torch.ones_like(seen)
        else:
            keep = seen | self._attentions.see_keys(shape, grid, seen)
            keep = shape.padding.reached(grid, keep) if self._mixers[shape] else keep
        return seen, keep

    def _check(self, shape: Shape, args: Sequence[Any]) -> None:
        """Raise unless all that is asked of the model itself holds."""
        if shape not in self._proofs:
            try:
                self._check_model(shape, args)
                self._proofs[shape] = None
            except UnsupportedError as error:
                self._proofs[shape] = error
        known = self._proofs[shape]
        if isinstance(known, _KeptError):
            raise _KeptError(known.where, known.what)
        if known is not None:
            raise UnsupportedError(known.text)

    def _check_model(self, shape: Shape, args: Sequence[Any]) -> None:
        analysis = shape.analysis
        if analysis.batch is None:  # as numbers they cannot be told from other numbers
            raise UnsupportedError(SIZE.format("its code"))
        self._mixers[shape] = frozenset(find_mixers(sorted(live_nodes(analysis.gm)), self._blocks))
        drawn = randomness(analysis.gm)
        if drawn is not None:
            raise UnsupportedError(drawn)
        self._check_buffers(analysis, args)
        kept = self._check_kept(analysis)
        tensors = {i for i, item in enumerate(outputs_of(analysis.gm)) if isinstance(item, fx.Node)} - kept
        if tensors != set(analysis.packed_outputs) - kept:
            raise UnsupportedError("the module that takes the ids returns values that are none of tokens")
        check_blocks(analysis, self._blocks, self._mixers[shape])
        self._attentions.check(shape, shape.grid(analysis.known.with_parts(self._analyses.tensors(args))))

    def _check_buffers(self, analysis: Analysis, args: Sequence[Any]) -> None:
        """Raise if a buffer or an input gets values of tokens; note the buffers that get others."""
        placeholders = analysis.gm.graph.find_nodes(op="placeholder")
        tensors, nodes = self._analyses.tensors(args), self._gm.graph.find_nodes(op="placeholder")
        for node, written in changed_inputs(analysis.gm).items():
            position = placeholders.index(node)
            given = next((i for i, x in enumerate(args) if position < len(tensors) and x is tensors[position]), None)
            name = "an input" if given is None else name_of(nodes[given])
            if not isinstance(written, fx.Node) or not _is_of_weights(written):
                raise UnsupportedError(_KEPT.format(name, "changed in place by values of tokens or their number"))
            self._written_to.add(name)

    def _check_kept(self, analysis: Analysis) -> set[int]:
        """Return positions of kept outputs that do not depend on tokens; raise for others."""
        outputs: list[Any] = outputs_of(self._gm)
        found = set()
        for item in self._kept:
            if item.is_input or item.node is None:
                what = "an input of the call" if item.is_input else "a size of the batch"
                raise _KeptError(item.where, f"{what} is kept in it")
            position = next((i for i, x in enumerate(outputs) if getattr(x, "name", None) == item.node.name), None)
            value = None if position is None else outputs_of(analysis.gm)[position]
            if position is None or isinstance(value, fx.Node) and not _is_of_weights(value):
                raise _KeptError(item.where, "a tensor that depends on tokens is kept in it")
            found.add(position)
        return found
