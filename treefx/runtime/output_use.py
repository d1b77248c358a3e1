"""Which outputs of a compiled model its callers use, learned as they do."""

from __future__ import annotations

import torch
from torch.utils import checkpoint

from treefx.passes.analysis import Analysis

__all__ = ["OutputUse"]


class OutputUse:
    """Record which packed outputs of a graph its callers have read and differentiated.

    Args:
        lazy: Whether that is to be learned; all of them, from the first call on, where it is not.
    """

    def __init__(self, *, lazy: bool = True) -> None:
        self._lazy = lazy
        self.read: set[int] = set()
        self.differentiated: set[int] = set()
        self.settled = False
        """Whether a call has run."""

    def settle(self, analysis: Analysis) -> None:
        """Mark all outputs as used where use is not learned.

        That is: without a loss, where a second run would have other effects, and where a checkpoint compares one with
        the first: reading in between must not change its saved tensors.
        """
        if _in_checkpoint() or not self.settled and self._are_always_used(analysis):
            self.read |= set(analysis.packed_outputs)
            self.differentiated |= set(analysis.packed_outputs)
        self.settled = True

    def _are_always_used(self, analysis: Analysis) -> bool:
        return not self._lazy or not analysis.returns_loss or analysis.has_side_effects

    def detached(self, analysis: Analysis) -> frozenset[int]:
        """The outputs that leave lazily."""
        return frozenset(analysis.packed_outputs) - self.differentiated


def _in_checkpoint() -> bool:
    """Return whether a non-reentrant checkpoint runs the model.

    That is ``torch.utils.checkpoint(use_reentrant=False)``, for the first time or again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__
