"""Models whose blocks are compiled and sharded one by one: ``treefx.distribute(model)``.

With FSDP2 each block is a graph of its own that sees no token ids. So the trie is built where the ids arrive, in a hook
of the module that owns the blocks: the module runs on the packed row of distinct tokens, hidden states stay packed from
block to block, and its output is expanded to rows again.

The tree reaches each block as a keyword argument and enters its graph as a real input: the backward, a recomputation
under a checkpoint, and gradient accumulation over several forwards each read the tree of their own forward.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from treefx.errors import ConfigError, UnsupportedError
from treefx.forests.context import RunningTree, set_tree
from treefx.runtime.batch import build_batch
from treefx.runtime.blocks.on_tree import on_tree
from treefx.runtime.converted.hooks import expanded

__all__ = ["distribute"]

_ARGUMENT = "treefx_tree"
_DEPRECATED = "treefx.distribute is deprecated: treefx.convert(model) does it for models of transformers"
_PER_POSITION = ("input_ids", "attention_mask", "position_ids")
"""What a batch is made of, each [B, T]; positions may be [1, T]."""
_PER_TOKEN = ("position_ids", "position_embeddings")
"""Arguments of blocks that hold something for each token."""


@dataclass(frozen=True)
class _Tree:
    """What a block gets: subtree_end int32 [N], and seen int64 [N], 0 at padding (None: there is none)."""

    subtree_end: Tensor
    seen: Tensor | None


def distribute(model: nn.Module, *, min_sharing: float = 1.15) -> nn.Module:
    """Share prefixes in a model whose blocks are compiled one by one, such as under FSDP2.

    Deprecated: ``treefx.convert`` does it for models of transformers, with windows, softcaps, sinks and padding on
    either side, whatever compiles the blocks. This serves models of one's own with full causal attention.

    Call it once, after the blocks were compiled with ``block.compile(backend="treefx")``; sharding (``fully_shard``)
    may come before or after. Plain forwards ``model(input_ids=..., attention_mask=...)`` then run the blocks once per
    distinct token. Padding on the right runs too and is exact. Calls with a cache, and batches that share too little,
    run as they are. The LM head and the loss run on rows.

    Args:
        model: A causal LM in the shape of transformers: one module owns the blocks, takes ``input_ids`` and hands its
            keyword arguments on to them.
        min_sharing: Sharing ratio (raw tokens / distinct tokens) below which a call runs on rows.

    Returns:
        The model itself, with hooks.

    Raises:
        ConfigError: No block is compiled, only some of them are, or no module fits the description above.
        UnsupportedError: At a call: padding on the left without ``position_ids``, attention with a window or a bias,
            an operator that is not token-wise, or outputs that cannot be expanded.

    Example:
        >>> for block in model.model.layers:
        ...     block.compile(backend="treefx")
        ...     fully_shard(block)
        >>> fully_shard(model)
        >>> treefx.distribute(model)
    """
    warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=2)
    blocks = [module for module in model.modules() if module._compiled_call_impl is not None and module is not model]
    if not blocks:
        raise ConfigError(
            "treefx.distribute expects a model whose blocks are compiled, got none that is; call "
            "block.compile(backend='treefx') on each block first (and do not compile the model as a whole)"
        )
    _check_all_compiled(model, blocks)
    _check_full_attention(model)
    owner = _owner(model, blocks)
    hooks = _Hooks(model, owner, min_sharing)
    owner.register_forward_pre_hook(hooks.before, with_kwargs=True)
    owner.register_forward_hook(hooks.after, always_call=True)
    for block in blocks:
        block.forward = types.MethodType(_forward_on_tree, block)
    return model


def _check_all_compiled(model: nn.Module, blocks: list[nn.Module]) -> None:
    """A block left out would run plain causal attention over the packed row."""
    compiled = set(blocks)
    for name, module in model.named_modules():
        children = list(module.children())
        given = [child in compiled for child in children]
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and any(given) and not all(given):
            missing = f"{name}.{given.index(False)}"
            raise ConfigError(
                f"treefx.distribute expects all blocks of {name} to be compiled, but {missing} is not; "
                "call block.compile(backend='treefx') on it too"
            )


def _check_full_attention(model: nn.Module) -> None:
    """A window lives in the mask, which the packed row cannot be given."""
    config = getattr(model, "config", None)
    windows = [getattr(item, "sliding_window", None) for item in (config, *model.modules())]
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or any(window is not None for window in windows):
        raise ConfigError(
            "treefx.distribute expects full causal attention in every block, got "
            f"{', '.join(sorted(kinds)) or 'a sliding window'}; compile the whole model with backend='treefx' instead"
        )


def _owner(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    """The smallest module that holds all blocks and takes token ids."""
    wanted = set(blocks)
    fitting = [module for module in model.modules() if wanted <= set(module.modules()) and _takes_ids(module)]
    if not fitting:
        raise ConfigError(
            f"treefx.distribute expects a module around the blocks whose forward takes input_ids, position_ids, "
            f"attention_mask and further keyword arguments, found none in {type(model).__name__}"
        )
    return min(fitting, key=lambda module: len(list(module.modules())))


def _takes_ids(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters
    further = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    return further and {"input_ids", "position_ids", "attention_mask"} <= set(parameters)


class _Hooks:
    """Before and after the module that owns the blocks."""

    def __init__(self, model: nn.Module, owner: nn.Module, min_sharing: float) -> None:
        self._model = model
        parameters = inspect.signature(type(owner).forward).parameters
        self._names = [name for name, item in parameters.items() if item.kind is item.POSITIONAL_OR_KEYWORD][1:]
        self._min_sharing = min_sharing
        self._token_of: Tensor | None = None

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a batch [B, T] by the packed row of its distinct tokens."""
        self._token_of = None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not _is_batch(given):
            return None
        ids, mask, positions = (given.get(name) for name in _PER_POSITION)
        assert ids is not None
        mask = None if mask is None or bool((mask != 0).all()) else (mask != 0).to(torch.int64)
        if mask is not None and positions is None and not bool(mask[:, 0].all()):
            raise UnsupportedError(
                "under treefx.distribute a batch padded on the left must come with position_ids, because models count "
                "positions in different ways; pass position_ids, or pad on the right"
            )
        keys = [x.expand_as(ids) for x in (ids, mask, positions) if x is not None]
        batch = build_batch(keys, None)
        raw = ids.numel() if mask is None else int(mask.sum())
        if ids.numel() < self._min_sharing * batch.tokens:
            return None
        row, column, subtree_end, self._token_of = batch.metadata
        seen = None if mask is None else mask[row, column]
        given["input_ids"] = ids[row, column][None]
        given["position_ids"] = (column if positions is None else positions.expand_as(ids)[row, column])[None]
        # transformers hands a mask of four dimensions on as it is, and makes none; blocks take it off again.
        given["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        given["use_cache"] = False
        given[_ARGUMENT] = _Tree(subtree_end, seen)
        distinct = batch.tokens if seen is None else int(seen[: batch.tokens].sum())
        set_tree(RunningTree(raw, distinct, tuple(self._model.parameters())))
        return (), given

    def after(self, owner: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Expand what the module returns to rows."""
        token_of, self._token_of = self._token_of, None
        if token_of is None:
            return None
        set_tree(None)
        return None if output is None else expanded(output, token_of)


def _is_batch(given: dict[str, Any]) -> bool:
    """Whether a call is one of token ids [B, T] without a cache.

    Raises:
        UnsupportedError: It is, and has further tensors, of which nobody knows what they mean on the packed row.
    """
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    cached = given.get("use_cache") or given.get("past_key_values") is not None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or cached or (mask is not None and mask.dim() != 2):
        return False
    further = [name for name, value in given.items() if isinstance(value, Tensor) and name not in _PER_POSITION]
    if further:
        raise UnsupportedError(
            f"under treefx.distribute the model takes {', '.join(_PER_POSITION)}, got {further[0]} too; "
            "leave it out, or compile the whole model with backend='treefx'"
        )
    return True


def _forward_on_tree(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block; marks what it gets as packed. A method, because hooks are no part of a block's graph."""
    tree = kwargs.pop(_ARGUMENT, None)
    if tree is not None:
        if not args:
            raise UnsupportedError(
                f"under treefx.distribute a block takes its hidden states as its first positional argument, got "
                f"{', '.join(kwargs)} by name in {type(block).__name__}; compile the blocks, not modules inside of them"
            )
        args = (_mark(tree, args[0]), *args[1:])
        kwargs["attention_mask"] = None
        for name in _PER_TOKEN:
            if name in kwargs:
                kwargs[name] = tree_map_only(Tensor, functools.partial(_mark, tree), kwargs[name])
    return type(block).forward(block, *args, **kwargs)


def _mark(tree: _Tree, value: Tensor) -> Tensor:
    marked: Tensor = on_tree(value, tree.subtree_end, tree.seen)
    return marked
