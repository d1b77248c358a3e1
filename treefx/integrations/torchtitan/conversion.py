"""A decoder of torchtitan between its caller and its blocks: the packed row in, rows out."""

from __future__ import annotations

from inspect import getclosurevars
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from treefx.config import Config
from treefx.errors import ConfigError, UnsupportedError
from treefx.integrations.torchtitan.masks import Masks, takes_masks
from treefx.runtime.converted.hooks import Hooks
from treefx.runtime.converted.seam import attention_modules
from treefx.runtime.converted.skeleton import UNWRAPPED
from treefx.runtime.reason import Cause, Reason

__all__ = ["ONLY_DATA", "Rows", "convert", "other_parallelism"]

ONLY_DATA = "treefx shares prefixes in torchtitan under data parallelism alone, got {}"

_HOOKS = "treefx_hooks"
_PARALLELIZED = "forward_with_redistribution"


class Rows(nn.Module):
    """Wrap a decoder under the names and masks of ``treefx.convert``; only a copy is traced.

    Args:
        decoder: A ``torchtitan.models.common.decoder.Decoder``.
        documents: Whether attentions stay inside of documents.
    """

    def __init__(self, decoder: nn.Module, documents: bool) -> None:
        super().__init__()
        self.decoder, self.documents = decoder, documents

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> dict[str, Tensor]:
        """Map ids and positions [B, L] to the decoder's output [B, L, features].

        The mask may be a tree.
        """
        seen = self._seen(input_ids, position_ids) if attention_mask is None else attention_mask
        if position_ids is None:  # left out where they count columns; blocks are given them
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return {"output": self.decoder(input_ids, positions=position_ids, attention_masks=seen)}

    def _seen(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """Keys that each query sees, bool [B or 1, 1, L, L]."""
        column = torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = column[:, None] >= column
        if not self.documents or position_ids is None:
            return seen[None, None]
        document = (position_ids == 0).cumsum(1)
        return ((document[:, :, None] == document[:, None, :]) & seen)[:, None]


def convert(decoder: nn.Module, *, min_sharing: float = 1.15) -> nn.Module:
    """Run a decoder of torchtitan once per distinct token of its batches.

    Its blocks may be compiled, checkpointed and sharded by ``fully_shard``; not cut into stages, nor sharded by
    sequence or heads. It returns rows again, so LM head and loss are the trainer's. The first call proves that results
    on a tree equal those on rows, as ``treefx.convert`` does; calls whose masks are not those that
    ``get_attention_masks`` made of their positions run on rows, and ``treefx.inspect(decoder)`` says why.

    Args:
        decoder: The model of torchtitan, after `attention.read_trees`.
        min_sharing: Positions of a batch per distinct token below which a call runs on rows.

    Returns:
        The decoder itself, with hooks.

    Raises:
        ConfigError: No attention of torchtitan is in it, or it is converted already.
        UnsupportedError: It is parallelized in another way.

    Warns:
        UserWarning: The model is not proved to be one that can run on a tree (experts that count their tokens, say),
            and runs on rows.
    """
    if _HOOKS in decoder.__dict__:
        raise ConfigError(f"expected a decoder that is not converted yet, got {type(decoder).__name__}")
    if not attention_modules(decoder) or not hasattr(decoder, "get_attention_masks"):
        raise ConfigError(
            f"expected a decoder of torchtitan with its inner attentions, got {type(decoder).__name__}; "
            "call treefx.integrations.torchtitan.install() before it is made"
        )
    _keep_forwards(decoder)
    decoder.__dict__[_HOOKS] = _Conversion(decoder, min_sharing)
    return decoder


def other_parallelism(parallel: Any) -> str | None:
    """Name the parallelism of ``ParallelDims`` other than data parallelism; None without any."""
    degrees = {
        "pipeline": "pp_enabled", "context": "cp_enabled", "tensor": "tp_enabled", "expert": "ep_enabled",
    }  # fmt: skip
    return next((f"{name} parallelism" for name, field in degrees.items() if getattr(parallel, field)), None)


def _keep_forwards(decoder: nn.Module) -> None:
    """Make copies of parallelized modules run their own code instead of the originals'.

    ``Module.parallelize`` wraps each forward in a function that redistributes inputs and outputs; under data
    parallelism there is nothing to redistribute.
    """
    for module in decoder.modules():
        wrapped: Any = module.__dict__.get("forward")
        if getattr(wrapped, "__name__", "") != _PARALLELIZED:
            continue
        reason = other_parallelism(getclosurevars(wrapped).nonlocals["parallel_dims"])
        if reason is not None:
            raise UnsupportedError(ONLY_DATA.format(reason))
        module.__dict__[UNWRAPPED] = MethodType(type(module).forward, module)


class _Conversion:
    """Hooks of one decoder."""

    def __init__(self, decoder: Any, min_sharing: float) -> None:
        rows = Rows(decoder, takes_masks(decoder))
        config = Config(inner="eager", on_unsupported="fallback", min_sharing=min_sharing)
        self._rows, self._hooks = rows, Hooks(decoder, rows, config)
        self._masks = decoder.__dict__["get_attention_masks"] = Masks(decoder)
        decoder.register_forward_pre_hook(self._before, with_kwargs=True)
        decoder.register_forward_hook(self._hooks.after, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("tokens", "positions", "attention_masks")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        positions, masks = given.get("positions"), given.get("attention_masks")
        reason = self._doubt(positions, masks)
        ids = given.get("tokens") if reason is None else None
        found = self._hooks.before(self._rows, (), {"input_ids": ids, "position_ids": positions})
        if reason is not None:
            self._hooks.reports[0].reason = Reason(Cause.INPUT, reason)
        if found is None:
            return None
        packed = found[1]
        place, tree = packed["position_ids"], packed["attention_mask"]
        return (packed["input_ids"],), {"positions": place, "attention_masks": tree}

    def _doubt(self, positions: Any, masks: Any) -> str | None:
        if self._rows.documents:
            return self._masks.doubt(positions, masks)
        return None if masks is None else "the call gives attention_masks to attentions that read none"
