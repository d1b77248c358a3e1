"""Check the masks of a call: causal attention, within documents or across them.

Documents begin where positions are 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Masks", "takes_masks"]

_MOST = 512
"""Queries and keys of a row at which a mask's function is compared."""


def takes_masks(decoder: nn.Module) -> bool:
    """Whether the inner attentions read masks; the others are causal over the whole row."""
    names = {base.__name__ for module in decoder.modules() for base in type(module).__mro__}
    return bool(names & {"FlexAttention", "VarlenAttention"})


class Masks:
    """Replace a decoder's ``get_attention_masks`` and remember its last masks and positions."""

    def __init__(self, decoder: Any) -> None:
        self._make = decoder.get_attention_masks
        self._windows = [getattr(module, "window_size", (-1, 0)) for module in decoder.modules()]
        self._made: tuple[Any, Any] = (None, None)
        self._compared: set[Any] = set()

    def __call__(self, positions: Tensor, **more: Any) -> Any:
        masks = self._make(positions=positions, **more)
        self._made = (positions, masks)
        return masks

    def doubt(self, positions: Any, masks: Any) -> str | None:
        """Return why the masks of a call may have another meaning; None if they are as expected.

        Expected masks hide other documents and later tokens.
        """
        if positions is None or self._made[0] is not positions or self._made[1] is not masks:
            return "the call gives attention_masks that get_attention_masks did not make of its positions"
        if bool((positions[:, 0] != 0).any()):
            return "a row begins inside of a document"
        if hasattr(masks, "mask_mod"):
            return self._doubt_function(masks.mask_mod, positions)
        if hasattr(masks, "cu_seq_q"):
            return self._doubt_starts(masks, positions)
        return f"the attention masks are of another kind, {type(masks).__name__}"

    def _doubt_starts(self, masks: Any, positions: Tensor) -> str | None:
        starts = (positions.flatten() == 0).nonzero().flatten().tolist() + [positions.numel()]
        same = masks.cu_seq_q.tolist() == masks.cu_seq_k.tolist() == starts
        if not same:
            return "the sequence starts among the attention masks are not where positions are 0"
        windows = [tuple(window) for window in self._windows if tuple(window) != (-1, 0)]
        return f"an attention has the window {windows[0]}" if windows else None

    def _doubt_function(self, function: Any, positions: Tensor) -> str | None:
        """Compare a mask's function with the expected mask, once for each code object."""
        code = getattr(function, "__code__", function)
        kind = (code, len(positions) == 1)
        if kind in self._compared:
            return None
        rows, width = positions.shape
        chosen = torch.linspace(0, width - 1, min(width, _MOST), device=positions.device).round().long()
        row = torch.arange(rows, device=positions.device)[:, None, None]
        query, key = chosen[None, :, None], chosen[None, None, :]
        document = (positions == 0).cumsum(1)
        expected = (document[row, query] == document[row, key]) & (query >= key)
        got = function(row, torch.zeros_like(row), query, key)
        if not torch.equal(got.expand_as(expected), expected):
            return "an attention mask hides something else than other documents and later tokens"
        self._compared.add(kind)
        return None
