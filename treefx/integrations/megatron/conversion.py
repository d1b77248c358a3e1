"""Hooks on a built GPTModel: distinct tokens in, rows out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treefx.config import Config
from treefx.errors import ConfigError, UnsupportedError
from treefx.integrations.megatron.attention import TreeCore, attentions, is_te
from treefx.integrations.megatron.facts import (
    arguments_by_name,
    check_recomputation,
    gathering_group,
    has_rotary,
    is_own,
)
from treefx.integrations.megatron.head import Pairs, expand_hidden, find_pairs, on_rows
from treefx.integrations.megatron.refusals import check
from treefx.integrations.megatron.replay import ReplayedRouting, replays, routes_to_replay
from treefx.integrations.megatron.routers import Routing, RowRouting, counts_tokens, has_losses
from treefx.integrations.megatron.rows import Rows, read_rows
from treefx.integrations.megatron.tree import Tree, Trees, first_places
from treefx.kernels.expand import expand
from treefx.kernels.memory import lasting
from treefx.passes.analysis import Rewritten
from treefx.runtime.call_plan import Batch, build_batch, pad_batch, shares_enough
from treefx.runtime.lost_sharing.distinct_tokens import CallRows
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import GraphReport, register, steps_of, version_of
from treefx.runtime.ways.watch import EVERY_ROW, warn_of_rows

__all__ = ["convert", "unconvert"]

_HOOKS = "treefx_hooks"


def convert(
    model: Any, *, min_sharing: float = 1.15, pack_lm_head: bool = False, tokenwise: Collection[str] = ()
) -> Any:
    """Run a Megatron GPTModel once per distinct token of its batches, in place.

    The model may be wrapped (DDP, Float16Module), sharded by tensor, sequence, expert and pipeline parallelism, and
    recompute activations. It is called as before: with rows ``[B, T]`` or ``packed_seq_params`` it returns logits or
    losses of the same positions. With ``labels`` the LM head and the loss run once per distinct (token, label) pair, so
    ``-model(..., labels=labels)`` is the cheapest way to log-probabilities. Padding between sequences, and the ends of
    rows that Transformer Engine's mask names as padding, are not computed: their hidden state is 0.

    Under pipeline parallelism every stage must get the same ``input_ids``, and ``variable_seq_lengths`` must be set.

    Args:
        model: A GPTModel, a module around one, or a list of these (the chunks of a pipeline stage).
        min_sharing: Tokens of rows per distinct token below which a call runs as it came.
        pack_lm_head: Whether the LM head too runs once per distinct token where a call returns logits: fewer FLOPs, but
            the logits of distinct tokens are kept next to those of rows.
        tokenwise: Names of further classes of modules that compute token by token, adapters for example.

    Returns:
        The argument.

    Raises:
        ConfigError: There is no GPTModel in it.
        UnsupportedError: The model has no exact form on a tree; the message names the reason and the way out.
    """
    for found in _models(model):
        check(found, tokenwise)
        unconvert(found)
        found.__dict__[_HOOKS] = _Conversion(found, min_sharing, pack_lm_head)
    return model


def unconvert(model: Any) -> Any:
    """Remove the hooks of `convert` from a model.

    Raises:
        ConfigError: There is no GPTModel in it.
    """
    for found in _models(model):
        hooks: _Conversion | None = found.__dict__.pop(_HOOKS, None)
        if hooks is not None:
            hooks.remove()
    return model


def _models(given: Any) -> list[Any]:
    chunks: Iterable[nn.Module] = given if isinstance(given, list | tuple) else [given]
    found = [
        module
        for chunk in chunks
        for module in chunk.modules()
        if "GPTModel" in {base.__name__ for base in type(module).__mro__}
    ]
    if not found:
        raise ConfigError(f"expected a GPTModel of Megatron-Core or a module around one, got {type(given).__name__}")
    return found


class _Conversion:
    """Hooks of one GPTModel.

    Args:
        model: The GPTModel, checked.
        min_sharing: As in `convert`.
        pack_lm_head: As in `convert`.
    """

    def __init__(self, model: Any, min_sharing: float, pack_lm_head: bool) -> None:
        self.config, self.rewrites = Config(inner="eager", min_sharing=min_sharing), list[Rewritten]()
        self._model, self._pack_lm_head = model, pack_lm_head
        self._is_split = bool(model.config.sequence_parallel)
        self._ranks = int(model.config.tensor_model_parallel_size) if self._is_split else 1
        self._trees = Trees()
        self._index: Tensor | None = None
        self._pairs: Pairs | None = None
        self._expands_logits = False
        self._report = GraphReport(has_tokens=True, way="converted")
        self._report.parameters.update(dict.fromkeys(model.parameters()))
        self._report.steps = steps_of(list(model.parameters()))
        self._hang()
        register(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise UnsupportedError(_NO_COPY)

    def __reduce__(self) -> Any:
        raise UnsupportedError(_NO_COPY)

    @property
    def reports(self) -> list[GraphReport]:
        """The one report of the model."""
        return [self._report]

    # Hooks ------------------------------------------------------------------------------------------------------------

    def _hang(self) -> None:
        model, found = self._model, attentions(self._model.decoder)
        self._cores = [TreeCore(module) for _, module in found]
        self._reads_packed = all(is_te(core.core) for core in self._cores)
        for core in self._cores:
            core.core.forward = core
        routers = [module for module in model.decoder.modules() if hasattr(module, "is_aux_loss_enabled")]
        self._replaying = [router for router in routers if replays(router)]
        self._routers: list[Routing] = [
            (RowRouting if counts_tokens(router) else ReplayedRouting)(router, self._trees)
            for router in routers
            if counts_tokens(router) or replays(router)
        ]
        for routing in self._routers:
            routing.router.routing = routing
        check_recomputation(model.config, self._routers)
        self._report.attention_layers = self._report.attention_rewritten = len(found)
        rotary = [module.rotary_pos_emb for module in (model, *(m for _, m in found)) if has_rotary(module)]
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
            model.decoder.register_forward_hook(self._behind_decoder),
            *(module.register_forward_hook(self._by_depth) for module in rotary),
            *(layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in model.decoder.layers),
        ]
        if model.post_process:
            self._handles.append(model.output_layer.register_forward_hook(self._behind_head))

    def remove(self) -> None:
        """Remove the hooks, and give attentions and routers their own functions back."""
        for item in (*self._handles, *self._cores, *self._routers):
            item.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the rows of a call by the packed row of its distinct tokens."""
        self._clear()
        self._begin()
        given = arguments_by_name(model, args, kwargs)
        with lasting():
            packed = self._pack(given)
        return None if packed is None else ((), {**given, **packed})

    def _pack(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments that change; None for a call that runs as it came."""
        rows = read_rows(given, self._reads_packed)
        keys = self._keys(rows, given)
        if isinstance(rows, Reason) or isinstance(keys, Reason):
            assert isinstance(keys, Reason)
            self._run_rows(given, keys)
            return None
        batch = self._plan(rows, keys)
        if batch is None:
            return None
        tree = self._tree(rows, batch, given.get("padding_mask"))
        self._trees.add(tree)
        self._choose_head(tree, given)
        return self._packed(rows, batch, tree, given)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._trees.enter(kwargs["attention_mask"] if "attention_mask" in kwargs else (*args, None, None)[1])

    def _by_depth(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Rows of the rotary table by the depth of tokens; YaRN returns the table and a factor."""
        tree = self._trees.now
        if tree is None:
            return None
        if isinstance(output, tuple):
            return output[0][tree.depth], *output[1:]
        return output[tree.depth]

    def _behind_decoder(self, module: nn.Module, args: tuple[Any, ...], hidden: Any) -> Any:
        if self._index is None or self._expands_logits:
            return None
        return expand_hidden(hidden, self._index, self._is_split)

    def _behind_head(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Logits [N, 1, V of this rank] on rows; sequence parallelism has gathered tokens by now."""
        if self._index is None or not self._expands_logits:
            return None
        logits, *others = output
        return expand(logits[:, 0], self._index), *others

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        pairs = self._pairs
        self._clear()
        return None if pairs is None or output is None else expand(output[0], pairs.pair_BT)

    def _clear(self) -> None:
        self._trees.now, self._index, self._pairs, self._expands_logits = None, None, None, False

    # Plans ------------------------------------------------------------------------------------------------------------

    def _doubt(self, rows: Rows, given: Mapping[str, Any]) -> Reason | None:
        """Why rows that can be read run as they came; the same on all stages of a pipeline."""
        if rows.keep is not None and given.get("padding_mask") is None and has_losses(self._model.config):
            return Reason(Cause.INPUT, _ROUTED_PADDING)
        positions = given.get("position_ids")
        if self._reads_positions() and (positions is None or positions.shape[1:] != rows.ids.shape[1:]):
            return Reason(Cause.INPUT, "the call gives no position_ids [B, T] to learned position embeddings")
        if rows.ids.shape[1] % self._ranks:
            return Reason(Cause.INPUT, f"the call has {rows.ids.shape[1]} columns for {self._ranks} ranks")
        return None

    def _run_rows(self, given: Mapping[str, Any], reason: Reason) -> None:
        """Leave a call as it came. Stages of a pipeline decide alike, so each of them must have read the rows."""
        if getattr(self._model.config, "pipeline_model_parallel_size", 1) > 1 and reason.cause is Cause.INPUT:
            raise UnsupportedError(_STAGE.format(reason.text))
        self._agree(None)
        self._note_rows(given, reason)

    def _keys(self, rows: Rows | Reason, given: Mapping[str, Any]) -> list[Tensor] | Reason:
        """Values that tokens differ by, [B, T] each; or why the call runs as it came."""
        reason = rows if isinstance(rows, Reason) else self._doubt(rows, given)
        if reason is not None or isinstance(rows, Reason):
            assert reason is not None
            return reason
        routes = routes_to_replay(self._replaying, rows.ids.shape, self._is_split)
        if isinstance(routes, Reason):
            return routes
        positions = [given["position_ids"].expand_as(rows.ids)] if self._reads_positions() else []
        return [rows.ids, *positions, *([] if routes is None else [routes])]

    def _plan(self, rows: Rows, keys: list[Tensor]) -> Batch | None:
        """The trie of a call; None if it shares too little."""
        ids = rows.ids
        batch = pad_batch(build_batch(keys, rows.keep, None, rows.starts), self._ranks)
        raw = ids.numel() if rows.keep is None else int(rows.keep.sum())
        shares = shares_enough(raw, batch.tokens, self.config.min_sharing)
        shares = shares or (rows.is_packed and not self._reads_packed)  # local attention raises on packed rows
        size = self._agree(batch.size if shares else None)
        self._count(rows, raw, batch, shares and size is not None)
        return pad_batch(batch, size) if shares and size is not None else None

    def _reads_positions(self) -> bool:
        return bool(self._model.position_embedding_type == "learned_absolute")

    def _agree(self, size: int | None) -> int | None:
        """Agree on the packed row's length among ranks whose experts gather each other's tokens.

        Returns None if any of them runs rows.

        Every call of every such rank comes here.
        """
        group = gathering_group(self._model)
        if group is None:
            return size
        device = next(self._model.parameters()).device
        figures = torch.tensor([size or 0, int(size is None)], device=device)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group)
        largest, any_rows = figures.tolist()
        return None if any_rows else -(-int(largest) // self._ranks) * self._ranks

    def _tree(self, rows: Rows, batch: Batch, padding_mask: Tensor | None) -> Tree:
        row, column, end, token_of = batch.metadata
        token_TB = token_of.t().contiguous()
        if padding_mask is not None:  # calls on equal rows share the batch, and may have other masks
            end = end.clone()
        return Tree(end, rows.positions()[row, column], token_TB, first_places(token_TB, len(row)), padding_mask)

    def _choose_head(self, tree: Tree, given: Mapping[str, Any]) -> None:
        """Choose the hidden states for the LM head.

        A forward that is not Megatron's own gets those of rows.
        """
        if not self._model.post_process:
            return
        labels = given.get("labels")
        self._index = tree.token_TB
        if given.get("output_processor") is not None or not is_own(self._model):
            return
        if labels is not None and labels.shape == tree.token_TB.t().shape:
            self._pairs = find_pairs(tree.token_TB, labels, self._ranks)
            self._index = self._pairs.token_M1
        self._expands_logits = labels is None and self._pack_lm_head
        self._report.head_tokens = len(tree.depth) if self._expands_logits else self._index.numel()

    def _packed(self, rows: Rows, batch: Batch, tree: Tree, given: Mapping[str, Any]) -> dict[str, Any]:
        row, column = batch.metadata[:2]
        positions = tree.depth
        if self._reads_positions():
            positions = given["position_ids"].expand_as(rows.ids)[row, column]
        packed: dict[str, Any] = {
            "input_ids": rows.ids[row, column][None], "position_ids": positions[None],
            "attention_mask": tree.subtree_end, "packed_seq_params": None,
        }  # fmt: skip
        packed |= {"labels": self._pairs.label_1M} if self._pairs is not None else {}
        if given.get("output_processor") is not None:
            packed["output_processor"] = on_rows(given["output_processor"], {name: given.get(name) for name in packed})
        return packed | ({"padding_mask": None} if "padding_mask" in given else {})

    # Figures ----------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._report.keep_rows(None)
        self._report.head_tokens = None
        self._report.count_call()

    def _count(self, rows: Rows, raw: int, batch: Batch, shares: bool) -> None:
        report, tokens = self._report, batch.tokens if shares else raw
        report.raw_tokens, report.tokens, report.distinct_tokens = raw, tokens, batch.tokens
        report.ran, report.reason = ("packed" if shares else "ordinary"), None
        if batch.prefixes is not None and torch.is_grad_enabled():
            report.steps.count(version_of(report.parameters), raw, tokens, batch.prefixes, rows.ids)

    def _note_rows(self, given: Mapping[str, Any], reason: Reason) -> None:
        report, ids = self._report, given.get("input_ids")
        report.ran, report.reason, report.distinct_tokens = "ordinary", reason, None
        report.raw_tokens = report.tokens = ids.numel() if isinstance(ids, Tensor) else 0
        report.keep_rows(CallRows.find(given))
        report.calls_on_rows += 1
        if not report.calls_on_rows & (report.calls_on_rows - 1) and not report.warned:
            warn_of_rows(report, EVERY_ROW, reason.text, self.config.min_sharing, self._model)


_NO_COPY = (
    "a Megatron model that treefx has converted cannot be copied or pickled, because its hooks hold it; call "
    "treefx.integrations.megatron.unconvert(model) before, and convert both"
)
_ROUTED_PADDING = (
    "routers with auxiliary losses or expert biases count the padding of the call; give GPTModel a padding_mask, or "
    "set moe_aux_loss_coeff=0 and moe_z_loss_coeff=None"
)
_STAGE = (
    "treefx expected the rows of the call on every pipeline stage, because all must run the same distinct tokens, but "
    "{}; hand the same input_ids, packed_seq_params and attention_mask to each stage"
)
