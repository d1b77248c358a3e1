"""Before and after the module that takes the ids: the packed row in, rows out."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import treefx.runtime.converted.row_views  # noqa: F401 - registers functions of packed rows
from treefx.config import Config
from treefx.errors import UnsupportedError
from treefx.forests.context import current_forest, raised_on_forest
from treefx.forests.trie import Prefixes
from treefx.kernels.expand import expand
from treefx.kernels.memory import send
from treefx.passes.analysis import Expansion, Rewritten
from treefx.reason_codes import with_code
from treefx.runtime.call_plan import find_unshared
from treefx.runtime.converted.attentions import COMPILE_INSTEAD
from treefx.runtime.converted.frame import packed_inputs
from treefx.runtime.converted.packed_rows import packed_rows
from treefx.runtime.converted.paths import run_on_paths
from treefx.runtime.converted.planner import Plan, Planner
from treefx.runtime.converted.readers import Attributes
from treefx.runtime.converted.seam import drop_stale_forwards, expect_trees, install, uninstall
from treefx.runtime.lost_sharing.distinct_tokens import CallRows
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import GraphReport, KeptGraph, register, steps_of, version_of
from treefx.runtime.run_record import RECORD
from treefx.runtime.ways.watch import EVERY_ROW, warn_of_rows

__all__ = ["Hooks", "expanded"]

_PER_POSITION = ("input_ids", "attention_mask", "position_ids")
"""The inputs of a batch, each [B, T]; positions may be [1, T]."""
_FOR_OUTPUTS = ("output_hidden_states", "output_router_logits", "return_dict")
_SAYS_NOTHING = {*_FOR_OUTPUTS, "num_items_in_batch"}
"""Arguments that no value of the backbone depends on."""
_IGNORED = -100
_CACHE = Reason(Cause.CACHE, "the call uses a cache")
_ORDER = Reason(
    Cause.HOOKS, "a forward pre-hook was registered behind that of treefx.convert; the next call shares again"
)
_UNREAD = Reason(Cause.VALUES, "a position that sees no key is read by the loss: its label is not -100")


class _Call(threading.local):
    """Pass values of one call from hook to hook, in each thread."""

    labels: Tensor | None = None
    token_of: Tensor | None = None
    plan: Plan
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """The arguments by name, which hooks behind ours get back."""
    attributes: Attributes | None = None
    """The attributes before the first packed call of its kind."""
    has_counted = False


class Hooks:
    """Hooks of a converted model.

    Args:
        model: The user's model.
        owner: The module in it that takes the ids.
        config: Options of the planner.
        is_strict: Whether a model that is not proved raises; else it runs on rows.
    """

    def __init__(self, model: nn.Module, owner: nn.Module, config: Config, is_strict: bool = False) -> None:
        self.model, self.owner, self.config, self.is_strict = model, owner, config, is_strict
        parameters = inspect.signature(type(owner).forward).parameters
        self._names = [name for name, item in parameters.items() if item.kind is item.POSITIONAL_OR_KEYWORD][1:]
        self._planner, self._lock = Planner(owner, config), threading.RLock()
        self._report, self.rewrites = GraphReport(has_tokens=True, way="converted"), list[Rewritten]()
        self._call, self._heads = _Call(), dict[Any, int]()
        self._watched, self._has_warned = set[Any](), False
        register(self, KeptGraph(config, [self._report], self.rewrites))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "owner", "config", "is_strict")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def reports(self) -> list[GraphReport]:
        """The one report of the model."""
        return [self._report]

    def change(self, model: nn.Module, config: Config, is_strict: bool) -> None:
        """Take other options, or a model around the one that was converted."""
        self.remove()
        if config != self.config:
            self._planner = Planner(self.owner, config)
        self.model, self.config, self.is_strict = model, config, is_strict
        self.hang()

    def hang(self) -> None:
        """Register the hooks: the first one before all others of its kind, so that these get rows."""
        self.owner.register_forward_pre_hook(self.before, with_kwargs=True)
        self.owner.register_forward_hook(self.after_call, always_call=True, prepend=True, with_kwargs=True)
        for module in self.model.modules():
            if module is not self.owner and "labels" in inspect.signature(type(module).forward).parameters:
                module.register_forward_pre_hook(self.note_labels, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hooks, and give attention modules their own forward back."""
        for module in {*self.model.modules(), *self.owner.modules()}:
            uninstall(module)
            for name in _OF_MODULES:
                found = module.__dict__[name]
                for key in [key for key, hook in found.items() if getattr(hook, "__self__", None) is self]:
                    del found[key]
                    for flags in _FLAGS:
                        module.__dict__[flags].pop(key, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note_labels(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the labels of the call's loss."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._call.labels = {**dict(zip(names, args, strict=False)), **kwargs}.get("labels")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a batch [B, T] by the packed row of its distinct tokens."""
        if current_forest() is not None:
            raised_on_forest()
            raise UnsupportedError(_FOREST.format(type(owner).__name__))
        call = self._call
        labels, call.labels, call.token_of, call.attributes = call.labels, None, None, None
        self._heads, call.has_counted, self._report.head_tokens = {}, False, None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        call.kwargs = kwargs
        expect_trees(False)
        drop_stale_forwards(owner.modules())
        self._begin()
        reason = _why_rows(given, getattr(self.owner, "config", None)) or self._put_in_order()
        with self._lock:  # Dynamo and the skeleton serve one call at a time
            found = self._plan(given, labels) if reason is None else reason
        if isinstance(found, Plan):
            self._report.ran, self._report.reason = "packed", None
            return (), self._packed(given, found)
        self._report.ran, self._report.reason = "ordinary", found
        self._report.raw_tokens = self._report.tokens = _count_rows(given)
        self._note_loss(given, found)
        return None

    def _note_loss(self, given: dict[str, Any], reason: Reason | None) -> None:
        """Warn of a call on rows; keys and values of earlier tokens are those of a generation."""
        generates = reason is _ORDER or reason is _CACHE and not torch.is_grad_enabled()
        self._report.keep_rows(None if reason is None or generates else CallRows.find(given))
        if reason is None:
            return
        report = self._report
        report.distinct_tokens, report.calls_on_rows = None, report.calls_on_rows + 1
        if not report.calls_on_rows & (report.calls_on_rows - 1) and not report.warned:
            warn_of_rows(report, EVERY_ROW, reason.text, self.config.min_sharing, self.model)

    def _put_in_order(self) -> Reason | None:
        """Return why this call runs on rows: a hook on the owner would get the packed row."""
        hooks: Any = self.owner._forward_pre_hooks
        after: Any = self.owner._forward_hooks
        ours, behind = _key_of(hooks, self), _key_of(after, self)
        if behind is not None and next(iter(after)) != behind:
            after.move_to_end(behind, last=False)
        if ours is None or next(reversed(hooks)) == ours:
            return None
        hooks.move_to_end(ours)
        return _ORDER

    def _begin(self) -> None:
        self._report.keep_rows(None)
        first = next(self.model.parameters(), None)
        if first is not None and first not in self._report.parameters:  # sharding has put others in their place
            parameters = list(self.model.parameters())
            self._report.parameters.clear()
            self._report.parameters.update(dict.fromkeys(parameters))
            self._report.steps = steps_of(parameters)
            self._report.model = RECORD.key_of(parameters, type(self.model).__name__)
        self._report.count_call()

    def _plan(self, given: dict[str, Any], labels: Tensor | None) -> Plan | Reason | None:
        """A plan, or why the call runs on rows; None if it shares too little."""
        ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        if positions is not None and mask is None and _counts_columns(positions, ids.shape[1]):
            positions = None
        if len(ids) == 1 and positions is None and mask is None:
            self._report.distinct_tokens = ids.numel()
            self._count_step(find_unshared([ids], None), ids.numel(), ids.numel(), ids)
            return None
        rows = {name: x for name, x in given.items() if x is not None and name not in _SAYS_NOTHING}
        rows["position_ids"] = None if positions is None else positions.expand_as(ids)
        try:
            if mask is None and positions is not None and self._mixes_sequences(rows, positions):
                if not self._has_warned:
                    warnings.warn(with_code(_MIXED.format(type(self.owner).__name__), _CACHED.code), stacklevel=2)
                self._has_warned = self._report.warned = True
                return _CACHED
            found = self._planner.plan(rows)
        except UnsupportedError as error:
            if self.is_strict:
                raise UnsupportedError(_REFUSED.format(type(self.owner).__name__, error.text), error.code) from error
            return Reason(Cause.UNPROVED, error.text)
        if isinstance(found, Reason):
            return found
        token_of = found.batch.metadata[3]
        unread = labels is not None and labels.shape == ids.shape and _reads(labels.cpu(), token_of < 0)
        self._count(found, found.tokens if found.shares and not unread else found.raw_tokens, ids)
        return _UNREAD if unread else found if found.shares else None

    def _mixes_sequences(self, rows: Mapping[str, Any], positions: Tensor) -> bool:
        """Return whether the original model mixes sequences of a packed row, by making a cache."""
        restart = positions.shape[1] > 1 and bool((positions.diff(dim=1) != 1).any())
        return restart and _makes_cache(self.owner, rows.get("use_cache")) and self._planner.cache_matters(rows)

    def _count(self, found: Plan, tokens: int, ids: Tensor) -> None:
        report = self._report
        report.raw_tokens, report.tokens, report.distinct_tokens = found.raw_tokens, tokens, found.tokens
        report.attention_layers = report.attention_rewritten = len(found.variant.scores)
        report.expansions = []
        for name in sorted(found.mixers):
            item = Expansion(name, _ON_PATHS, None, contracted=True)
            report.expansions.append({**asdict(item), "code": item.code})
        report.seconds = dict(found.seconds)
        report.graphs["captured"] = found.captured
        self._count_step(found.batch.prefixes, found.raw_tokens, tokens, ids)

    def _count_step(self, prefixes: Prefixes | None, raw_tokens: int, tokens: int, ids: Tensor) -> None:
        """Count a call with gradients among those of its optimizer step."""
        if prefixes is not None and torch.is_grad_enabled():
            self._report.steps.count(version_of(self._report.parameters), raw_tokens, tokens, prefixes, ids)

    def _packed(self, given: dict[str, Any], found: Plan) -> dict[str, Any]:
        ids, positions = given["input_ids"], given.get("position_ids")
        row, column, _, token_of = [x.to(ids.device) for x in found.batch.metadata]
        place = column if positions is None else positions.expand_as(ids)[row, column]
        scores = found.variant.on(ids.device)
        for name, module in self._planner.modules.items():
            install(module, scores[name], found.variant.size)
        for name in found.mixers:
            run_on_paths(self._planner.by_name[name])
        call = self._call
        call.token_of, call.plan = token_of, found
        kind = found.kind, self.owner.training
        if kind not in self._watched:
            self._watched.add(kind)
            call.attributes = Attributes(self.owner)
        expect_trees(True)
        # Modules on paths read the tree on the host again.
        tree = send(found.tree, ids.device, keep=True) if found.mixers else found.tree.to(ids.device)
        return packed_inputs(given, ids[row, column], place, tree, found.kinds_of_masks)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_call(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Expand the module's output to rows; other hooks get the arguments of the caller."""
        given, self._call.kwargs = self._call.kwargs, MappingProxyType({})
        if self._call.token_of is not None:
            kwargs.clear()
            kwargs.update(given)
        return self.after(owner, args, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, owner: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Expand the module's output to rows."""
        expect_trees(False)
        call = self._call
        token_of, call.token_of = call.token_of, None
        if token_of is None or output is None:
            return None
        attributes, call.attributes = call.attributes, None
        changed = () if attributes is None else attributes.changed()
        kept = next((name for name in changed if name not in call.plan.kept), None)
        if kept is not None:
            self._watched.discard((call.plan.kind, self.owner.training))
            self._planner.refuse(call.plan.kind, f"{kept}: a tensor of tokens is kept in it")
            raise UnsupportedError(_HIDDEN.format(type(owner).__name__, kept))
        return expanded(output, token_of, self._rows if self.config.lazy_outputs else expand)

    def _rows(self, x: Tensor, token_of: Tensor) -> Tensor:
        """Wrap hidden states [N, H] as packed rows; one token more is dropped padding."""
        count, self._call.has_counted = (None if self._call.has_counted else self._count_head), True
        if bool((token_of < 0).any()):
            x, token_of = torch.cat([x, x.new_zeros(1, *x.shape[1:])]), torch.where(token_of < 0, len(x), token_of)
        return packed_rows(x, token_of, count=count)

    def _count_head(self, weight: Tensor | None, positions: int) -> None:
        """Count the positions that a weight multiplied, which may be a part at a time."""
        key = None if weight is None else tuple(weight.shape)
        self._heads[key] = self._heads.get(key, 0) + positions
        self._report.head_tokens = max(self._heads.values())


_ON_PATHS = "holds a recurrence or a convolution along tokens, which runs on rows: one for each leaf of the tree"
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks")
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_PROOF = (
    "treefx.convert runs a model on its distinct tokens if every attention is proved to be causal attention whose "
    "scores are made of positions, inputs and constants, and all else to be computed token by token, but of {} this "
    "was not proved: {}. "
)
_REFUSED = _PROOF + (
    "Change the named part (set dropout to 0, say), or take on_unsupported='expand', which runs such calls on rows"
)
_CACHED = Reason(
    Cause.SEGMENTS,
    "the model makes a cache (config.use_cache=True), and without a mask its attentions then let the sequences of a "
    "packed row see each other",
)
_MIXED = (
    "{} makes a cache (config.use_cache=True), and transformers then lets the sequences of a packed row see each "
    "other. treefx.convert computes the same, on rows. To train on sequences that do not see each other, set "
    "model.config.use_cache = False, or pass use_cache=False; then prefixes are shared too"
)
_HIDDEN = (
    "under treefx.convert a model may keep no values of tokens, which are there once per distinct token, but {}.{} got "
    "a tensor in this call, by code that a trace does not run (it depends on torch.compiler.is_compiling(), say). "
    "Discard this call; later ones run on rows. Return the value from the model, or compute it from what it returns"
)
_FOREST = (
    "under treefx.use(forest) a compiled model gets the packed row of a forest, but {} was converted by "
    "treefx.convert: it takes rows [B, T] and finds their tree itself. Call it on rows outside of treefx.use, or "
    "compile a model that is not converted (treefx.unconvert(model), then model.compile(backend='treefx'))"
)


def _key_of(registered: Mapping[Any, Any], hooks: Hooks) -> Any:
    """The key of the hook of ``hooks`` among those of a module; None without one."""
    for key, hook in registered.items():
        if getattr(hook, "__self__", None) is hooks:
            return key
    return None


def _makes_cache(owner: Any, asked: Any) -> bool:
    """Return whether a model makes a cache, by argument, configuration and checkpoints."""
    use = getattr(getattr(owner, "config", None), "use_cache", False) if asked is None else asked
    return bool(use) and not (owner.training and getattr(owner, "gradient_checkpointing", False))


def _count_rows(given: Mapping[str, Any]) -> int:
    """Tokens under the mask of a call that runs on rows."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if not isinstance(ids, Tensor):
        return 0
    return int((mask != 0).sum()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()


def _reads(labels: Tensor, dropped: Tensor) -> bool:
    """Return whether a loss reads a dropped position: its next label is not -100."""
    return bool((dropped[:, :-1] & (labels[:, 1:] != _IGNORED)).any())


def _counts_columns(positions: Tensor, columns: int) -> bool:
    return bool((positions == torch.arange(columns, device=positions.device)).all())


def _why_rows(given: Mapping[str, Any], config: Any) -> Reason | None:
    """Return why a call of any model runs on rows; None if there is no reason."""
    ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        return Reason(Cause.INPUT, "the call gives no input_ids [B, T]")
    if given.get("use_cache") or given.get("past_key_values") is not None:
        return _CACHE
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        return Reason(Cause.INPUT, "the call gives an attention_mask that is not [B, T]")
    if positions is not None and not (positions.dim() == 2 and positions.shape[1] == ids.shape[1]):
        return Reason(Cause.INPUT, "the call gives position_ids that are not [B, T]")
    asked = given.get("output_attentions")
    if getattr(config, "output_attentions", False) if asked is None else asked:
        return Reason(Cause.INPUT, "the call requests attention probabilities (output_attentions)")
    for name, value in given.items():
        if name in _PER_POSITION or name in _SAYS_NOTHING or isinstance(value, _PLAIN):
            continue
        for x in tree_leaves(value):
            if isinstance(x, Tensor) and x.dim():
                text = f"the call gives {name}, of which nothing is known on distinct tokens; {COMPILE_INSTEAD}"
                return Reason(Cause.INPUT, text)
    return None


_PLAIN = (int, float, str, type(None))


def expanded(
    output: Any,
    token_of: Tensor,
    on_rows: Callable[[Tensor, Tensor], Tensor] = expand,
    known: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Any:
    """Map an output of the packed row to rows [B, T], hidden states by ``on_rows``.

    Containers keep their type, and one tensor (the last hidden state, also the last of the hidden states) stays one, by
    ``known``.
    """
    known = {} if known is None else known
    if output is None:
        return None
    if isinstance(output, Tensor) and output.dim() > 2 and output.shape[0] == 1:
        if id(output) not in known:
            known[id(output)] = output, on_rows(output[0], token_of)
        return known[id(output)][1]
    if isinstance(output, Tensor) and output.dim() == 2:  # of experts: [B * T, experts]
        rows: Tensor = expand(output, token_of).flatten(0, 1)
        return rows
    if isinstance(output, dict):
        for name in list(output):
            output[name] = expanded(output[name], token_of, on_rows, known)
        return output
    if isinstance(output, tuple | list):
        return type(output)(expanded(item, token_of, on_rows, known) for item in output)
    raise UnsupportedError(
        f"the module that takes the ids must return hidden states, got {type(output).__name__} "
        "among its outputs; ask for no attentions or caches"
    )
