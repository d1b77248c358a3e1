"""Track updates: fire a DMA when a group's tiles are all in memory (T3, section 4.2)."""

from collections.abc import Callable, Hashable

from treefx.errors import TreefxError

__all__ = ["SimulationError", "Tracker"]


class SimulationError(TreefxError):
    """The simulated hardware lost, doubled or sent data before it was complete."""


class Tracker:
    """Count updates per group of tiles; call ``fire(group, ranks)`` after ``updates``.

    ``ranks`` is the number of GPUs whose part of the sum the group then holds: an update brings that of one GPU
    (a store of the GEMM) or of several (a partial sum from the neighbour). An entry lives from the first update of
    its group to the last; ``peak`` is the largest number of groups that had an entry at once.
    """

    def __init__(self, fire: Callable[[Hashable, int], None], updates: int = 2) -> None:
        self.fire = fire
        self.updates = updates
        self.peak = 0
        self._entries: dict[Hashable, tuple[int, int]] = {}
        self._fired: set[Hashable] = set()

    def update(self, group: Hashable, ranks: int) -> None:
        """Note that an update of ``group`` is in memory.

        Raises:
            SimulationError: the DMA of the group has been fired before.
        """
        if group in self._fired:
            raise SimulationError(
                f"expected all updates of tile group {group} before its DMA; one came after it, so the neighbour's sum "
                f"lacks {ranks} rank(s). The tracker fires after {self.updates} update(s): let it wait for all"
            )
        count, held = self._entries.get(group, (0, 0))
        self._entries[group] = count + 1, held + ranks
        self.peak = max(self.peak, len(self._entries))
        if count + 1 == self.updates:
            del self._entries[group]
            self._fired.add(group)
            self.fire(group, held + ranks)

    def check_empty(self) -> None:
        """Raise ``SimulationError`` if a group still waits for an update."""
        if self._entries:
            raise SimulationError(
                f"expected every tile group to be complete at the end; {len(self._entries)} still wait, the first "
                f"{next(iter(self._entries))} with {next(iter(self._entries.values()))[0]} of {self.updates} updates"
            )
