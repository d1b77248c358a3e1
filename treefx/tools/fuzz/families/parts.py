"""What the catalogues hold: pieces of a model as text."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Part"]


@dataclass(frozen=True)
class Part:
    """One feature: what it does in forward, what it makes in __init__, and what it needs.

    Text of forward reads ``ids``, ``am``, ``labels``, the hidden states ``x`` [B, T, D], the columns ``i`` [T], the sum
    of auxiliary losses ``aux``, the sizes ``B``, ``T``, ``D``, ``H``, ``V``, and the inputs it names. ``{n}`` stands
    for the number of the layer.
    """

    forward: str
    init: str = ""
    top: str = ""
    """What stands before the class: functions, autograd functions."""
    inputs: str = ""
    """Names of inputs besides ids, am and labels, separated by blanks."""
    traits: str = ""
    """Of "random" (draws numbers), "single" (computes in float32), "angles" (cosines in float32, which inductor rounds
    otherwise), "strange" (no token-wise law to be expected)."""

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return "random" in self.traits
