"""``treefx.convert(model)``: shared prefixes without a graph of the whole model."""

from __future__ import annotations

import inspect
from typing import Literal

from torch import nn

from treefx.config import Config
from treefx.errors import ConfigError
from treefx.runtime.converted.hooks import Hooks
from treefx.runtime.converted.seam import attention_modules

__all__ = ["convert"]

_HOOKS = "treefx_hooks"


def convert(
    model: nn.Module,
    *,
    min_sharing: float = 1.15,
    padding: Literal["auto", "drop"] = "auto",
    lazy_outputs: bool = False,
) -> nn.Module:
    """Run the backbone of a model once per distinct token of a batch, without a compiler.

    For models that do not reach one whole graph: sharded (``fully_shard``), in tensor or sequence parallelism
    (``parallelize_module``; PyTorch 2.13 compiles blocks of these for one size alone), compiled block by block, with
    adapters, or in a trainer that calls the backbone itself. Before or after any of these, once. Calls stay as they
    are: rows ``[B, T]`` with a mask, padded on either side, or packed rows whose positions start anew. The backbone
    gets the distinct tokens as one row, and its attention (transformers' functions, any implementation) runs on the
    tree.

    What it returns is expanded to rows ``[B, T, H]``; LM head and loss run on these. With ``lazy_outputs`` that happens
    when it is read: an LM head, caps, temperatures, softmaxes, and log-probabilities and entropies that are gathered of
    them (``cross_entropy``, ``log_softmax`` and ``gather``, ``logsumexp``) are computed once per distinct token, and
    ``treefx.inspect(model).stats["head_tokens"]`` counts what the head ran on. Other functions, and compiled ones, get
    rows. Gradients are those of rows either way.

    That the model computes on a tree what it computes on rows is proved at the first call of each kind, on a copy
    without weights. Calls with a cache, a mask of four dimensions, embeddings in place of ids or attention
    probabilities among the outputs run on rows, and so do batches that share too little; ``treefx.inspect(model)``
    says which and why. ``past_key_values`` of an output is None unless the call says ``use_cache=True``. Hooks of
    others on blocks see the packed row. In the model's file, ``ALL_ATTENTION_FUNCTIONS`` is from then on an object that
    hands out the same functions, which read a tree where they are given one.

    Args:
        model: A model of transformers, or one that holds one (PEFT).
        min_sharing: Positions of a batch per distinct token below which a call runs on rows.
        padding: Padding that sees no key, in front of a row or a whole window behind it, never runs; its hidden states
            come back as zero. "auto": other padding runs, and what is computed there is exact. "drop": none runs.
        lazy_outputs: Compute LM head and log-probabilities on distinct tokens. Hidden states and logits then
            have no memory of rows until they are read. Ask for gradients of them (hooks, ``retain_grad``) before
            something is computed of them, and change them in place with PyTorch's functions alone, not through DLPack
            and not in a function that inductor compiles.

    Returns:
        The model itself, with hooks.

    Raises:
        ConfigError: No module of the model takes ids and holds attentions of transformers, or a bad option.
        UnsupportedError: At a call: the model is not proved to be one that can run on a tree; the message names what
            stands against it.

    Example:
        >>> treefx.convert(model)
        >>> for block in model.model.layers:
        ...     fully_shard(block)
        >>> fully_shard(model)
    """
    config = Config(
        inner="eager", on_unsupported="fallback", min_sharing=min_sharing, padding=padding, lazy_outputs=lazy_outputs
    )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"treefx.convert expects a model, got {type(model).__name__}")
    owner = _owner(model)
    known = getattr(owner, _HOOKS, None)
    if isinstance(known, Hooks):
        raise ConfigError(f"treefx.convert expects a model that is not converted yet, got {type(model).__name__}")
    hooks = Hooks(model, owner, config)
    owner.__dict__[_HOOKS] = hooks
    hooks.hang()
    return model


def _owner(model: nn.Module) -> nn.Module:
    """The smallest module that holds all attentions and takes token ids."""
    wanted = set(attention_modules(model).values())
    fitting = [module for module in model.modules() if wanted <= set(module.modules()) and _takes_ids(module)]
    if not wanted or not fitting:
        what = "takes input_ids, attention_mask and position_ids" if wanted else "takes its attention from transformers"
        raise ConfigError(
            f"treefx.convert expects a model of transformers, got {type(model).__name__}, of which no module {what}; "
            "compile the whole model with backend='treefx' instead"
        )
    return min(fitting, key=lambda module: len(list(module.modules())))


def _takes_ids(module: nn.Module) -> bool:
    """Whether a module takes token ids and computes no loss, which would meet labels of rows."""
    parameters = set(inspect.signature(type(module).forward).parameters)
    return {"input_ids", "position_ids", "attention_mask"} <= parameters and "labels" not in parameters
