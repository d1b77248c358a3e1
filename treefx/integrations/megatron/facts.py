"""Read facts of a built GPTModel: arguments, owner of its forward, ranks with its tokens."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

from treefx.errors import UnsupportedError

__all__ = ["arguments_by_name", "check_recomputation", "gathering_group", "has_rotary", "is_own"]


def arguments_by_name(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call; return none if the positional ones are unknown.

    An engine may have replaced the model's forward. One that hands on ``*args`` takes those of the class.
    """
    for forward, bound in ((model.forward, 0), (type(model).forward, 1)):
        parameters = list(inspect.signature(forward).parameters.values())[bound:]
        names = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
        if len(args) <= len(names):
            return {**dict(zip(names, args, strict=False)), **kwargs}
    return {}


def has_rotary(module: Any) -> bool:
    return isinstance(getattr(module, "rotary_pos_emb", None), nn.Module)


def is_own(model: Any) -> bool:
    """Return whether a model runs Megatron's own forward and loss; engines may replace them."""
    from megatron.core.models.gpt import GPTModel

    names = ("forward", "_postprocess", "compute_language_model_loss")
    own = all(name not in model.__dict__ and getattr(type(model), name) is getattr(GPTModel, name) for name in names)
    config = model.config
    fused = getattr(config, "cross_entropy_loss_fusion", False) and config.cross_entropy_fusion_impl == "linear"
    return own and not fused


def gathering_group(model: Any) -> Any:
    """Return the ranks whose experts all-gather tokens of several batches; None without any."""
    if getattr(model.config, "moe_token_dispatcher_type", None) != "allgather":
        return None
    if getattr(model.config, "expert_model_parallel_size", 1) == 1:
        return None
    found = (getattr(module, "token_dispatcher", None) for module in model.decoder.modules())
    return next((item.tp_ep_group for item in found if item is not None), None)


def check_recomputation(config: Any, routers: Collection[Any]) -> None:
    selected = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
    if routers and ("moe" in selected or getattr(config, "moe_layer_recompute", False)):
        raise UnsupportedError(
            "treefx cannot run this Megatron model on a tree: recompute_modules with 'moe' runs routers that count "
            "their tokens (auxiliary losses, expert biases) or replay routes outside of their layer; use "
            "recompute_granularity='full'"
        )
