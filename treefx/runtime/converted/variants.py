"""Keep the scores that calls of a model have stated, by the size of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from treefx.runtime.converted.seam import Stated

__all__ = ["Variant", "Variants"]

_MOST = 32


@dataclass(frozen=True, eq=False)
class Variant:
    """Scores by the name of the module, and the size of the trees that they read."""

    size: int
    scores: Mapping[str, Stated]
    _moved: dict[torch.device, Mapping[str, Stated]] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Mapping[str, Stated]:
        """Return the scores with their tables on a device, the same objects each time.

        Compiled blocks guard on them.
        """
        if device not in self._moved:
            self._moved[device] = {name: stated.on(device) for name, stated in self.scores.items()}
        return self._moved[device]


class Variants:
    """Keep all stated scores of one model, so that a checkpoint's recomputation finds its own."""

    def __init__(self) -> None:
        self._known: list[Variant] = []

    def find(self, scores: Mapping[str, Stated], planes: int) -> Variant | None:
        """The variant of these scores, a new one if there is none; None if there are too many.

        Args:
            scores: By the name of the module.
            planes: How many planes they read.
        """
        for known in self._known:
            if known.scores is scores:
                return known
        for known in self._known:
            if known.scores.keys() == scores.keys() and all(known.scores[x].equals(scores[x]) for x in scores):
                return known
        if len(self._known) == _MOST:
            return None
        taken = {known.size for known in self._known}
        size = next(size for size in range(max(2, 1 + planes), _MOST + planes + 3) if size not in taken)
        self._known.append(Variant(size, scores))
        return self._known[-1]
