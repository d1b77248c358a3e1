"""``treefx.convert(model)``: shared prefixes without a graph of the whole model."""

from __future__ import annotations

import inspect
from typing import Literal

from torch import nn

from treefx.config import Config
from treefx.errors import ConfigError
from treefx.runtime.converted.hooks import Hooks
from treefx.runtime.converted.seam import attention_modules

__all__ = ["convert", "is_converted", "unconvert"]

_HOOKS = "treefx_hooks"


def convert(
    model: nn.Module,
    *,
    min_sharing: float = 1.15,
    padding: Literal["auto", "drop"] = "auto",
    pack_lm_head: bool = False,
    on_unsupported: Literal["expand", "fallback", "error"] = "expand",
    lazy_outputs: bool | None = None,
) -> nn.Module:
    """Run the backbone of a model once per distinct token of a batch, without a compiler.

    For models that do not reach one whole graph: sharded (``fully_shard``), in tensor or sequence parallelism
    (``parallelize_module``; PyTorch 2.13 compiles blocks of these for one size alone), compiled block by block, with
    adapters, or in a trainer that calls the backbone itself. Convert before or after any of these. Calls stay
    unchanged: rows ``[B, T]`` with a mask, padded on either side, or packed rows whose positions restart. The backbone
        gets the distinct tokens as one row, and its attention (transformers' functions, any implementation) runs on the
        tree.

    The backbone's outputs are expanded to rows ``[B, T, H]``; LM head and loss run on these. With ``pack_lm_head`` they
    are expanded when they are read: an LM head, caps, temperatures, softmaxes, and log-probabilities and entropies that
    are gathered of them (``cross_entropy``, ``log_softmax`` and ``gather``, ``logsumexp``) are computed once per
    distinct token, and ``treefx.inspect(model).stats["head_tokens"]`` counts the positions of the head. Other
    functions, and compiled ones, get rows. Gradients are those of rows either way.

    The first call of each kind proves, on a copy without weights, that results on a tree equal those on rows. Without a
    proof the model runs on rows, and a warning names the obstacle: dropout, a hook below the module that takes the ids,
    a tensor of tokens that its forward keeps in an attribute, a list or a buffer. Tensors that depend on weights alone
    may be kept. Calls with a cache, a mask of four dimensions, embeddings in place of ids or attention probabilities
    among the outputs run on rows, and so do batches that share too little; ``treefx.inspect(model)`` says which and
    why. ``past_key_values`` of an output is None unless the call says ``use_cache=True``.

    A second call of ``convert`` changes the options. ``treefx.unconvert`` undoes the first. Each attention module of a
    converted model gets a copy of its forward from the first packed call on; other models are not changed. Call the
    model, a block alone or ``unconvert`` between a forward and its backward only if blocks are not checkpointed.

    Args:
        model: A model of transformers, or one that holds one (PEFT).
        min_sharing: Positions of a batch per distinct token below which a call runs on rows.
        padding: Padding that sees no key, in front of a row or a whole window behind it, never runs; its hidden states
            come back as zero. "auto": other padding runs, with exact results. "drop": none runs.
        pack_lm_head: Compute LM head and log-probabilities on distinct tokens. Hidden states and logits then
            have no memory of rows until they are read. Ask for gradients of them (hooks, ``retain_grad``) before
            something is computed of them, and change them in place with PyTorch's functions alone, not through DLPack
            and not in a function that inductor compiles.
        on_unsupported: Reaction to a missing proof. "expand" and "fallback": the call runs on rows. "error": it
            raises.
        lazy_outputs: The old name of ``pack_lm_head``.

    Returns:
        The model itself, with hooks.

    Raises:
        ConfigError: No module of the model takes ids and holds attentions of transformers, or a bad option.
        UnsupportedError: At a call with ``on_unsupported="error"``: there is no proof; the message names the obstacle.
            At a first call: code that no trace shows has kept a tensor of distinct tokens.

    Example:
        >>> treefx.convert(model)
        >>> for block in model.model.layers:
        ...     fully_shard(block)
        >>> fully_shard(model)
    """
    packs_head = pack_lm_head if lazy_outputs is None else lazy_outputs
    Config(inner="eager", on_unsupported=on_unsupported, lazy_outputs=packs_head)  # checks these two by name
    config = Config(
        inner="eager", on_unsupported="fallback", min_sharing=min_sharing, padding=padding, lazy_outputs=packs_head
    )
    _check_model(model, "convert")
    owner = _owner(model)
    known = owner.__dict__.get(_HOOKS)
    if isinstance(known, Hooks):
        known.change(model, config, on_unsupported == "error")
        return model
    unconvert(model)
    hooks = Hooks(model, owner, config, on_unsupported == "error")
    owner.__dict__[_HOOKS] = hooks
    hooks.hang()
    return model


def unconvert(model: nn.Module) -> nn.Module:
    """Undo ``treefx.convert``: remove its hooks and attributes, and restore forwards.

    Call it between steps: blocks under checkpoints run again in the backward of a packed call.

    Args:
        model: A model, converted or not.

    Returns:
        The model itself.

    Raises:
        ConfigError: It is no model.

    Example:
        >>> treefx.unconvert(model)
    """
    _check_model(model, "unconvert")
    for module in list(model.modules()):
        hooks = module.__dict__.get(_HOOKS)
        if hooks is not None:
            hooks.remove()
            del module.__dict__[_HOOKS]
    return model


def is_converted(model: nn.Module) -> bool:
    """Return whether a model, or a module in it, was converted by ``treefx.convert``.

    Args:
        model: A model.

    Returns:
        True between `treefx.convert` and `treefx.unconvert`.

    Raises:
        ConfigError: It is no model.
    """
    _check_model(model, "is_converted")
    return any(_HOOKS in module.__dict__ for module in model.modules())


def _check_model(model: nn.Module, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"treefx.{function} expects a model, got {type(model).__name__}")


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
