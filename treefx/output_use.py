"""Which outputs of a compiled model its callers use, learned as they do."""

from __future__ import annotations

from treefx.passes.pipeline import Analysis

__all__ = ["OutputUse"]


class OutputUse:
    """Which packed outputs of a graph its callers have read, and which they have differentiated.

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
        """Without a loss of its own, or where a second run would have other effects, all outputs are in use."""
        if not self.settled and (not self._lazy or not analysis.returns_loss or analysis.has_side_effects):
            self.read |= set(analysis.packed_outputs)
            self.differentiated |= set(analysis.packed_outputs)
        self.settled = True

    def detached(self, analysis: Analysis) -> frozenset[int]:
        """The outputs that leave lazily."""
        return frozenset(analysis.packed_outputs) - self.differentiated
