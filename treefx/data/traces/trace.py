"""The common form of traces: a tree of token runs, of which each leaf ends a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from treefx.data.files import Place

__all__ = ["Trace", "TraceNode"]


@dataclass(frozen=True, eq=False)
class TraceNode:
    """Hold the tokens that a message or a model call adds below its parent. T: their number, at least 1."""

    tokens: npt.NDArray[np.int64]
    """int64 [T]."""
    parent: int
    """Number of the node above in its trace, smaller than this node's; -1 at a root."""
    trained: npt.NDArray[np.bool_]
    """bool [T]: the loss mask, true at tokens that the policy sampled and learns from."""
    logprobs: npt.NDArray[np.float64] | None = None
    """float64 [T], as the sampler computed them; 0 at tokens that are not trained. None if not recorded."""
    advantages: npt.NDArray[np.float64] | None = None
    """float64 [T], if the engine recorded them; 0 at tokens that are not trained."""
    reward: float | None = None
    """Reward of the model call, if the engine rewards each."""
    loss_weights: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Further weights by name, float64 [T] each, as verifiers records them. Samples do not read them."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Hold one recorded rollout."""

    task: str
    """Traces of one task and one file form a group, whose rewards GRPO compares."""
    trial: int
    nodes: tuple[TraceNode, ...]
    """Empty where only texts were recorded."""
    reward: float | None
    """None if not recorded, or if there are several by name and none was chosen."""
    format: str
    """Name of the engine."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name, with their weights, if the engine records several."""
    texts: tuple[str, str] | None = None
    """Prompt and answer, where no token ids were recorded."""
    place: Place | None = None
    """The file and line it was read from."""

    @property
    def group(self) -> tuple[str, str]:
        """Return the file and the task, which name the group."""
        return (self.place.path if self.place else "", self.task)

    def paths(self) -> list[list[int]]:
        """Return per row the numbers of its nodes, from the root down.

        A row ends at each leaf; rows are in the order of their leaves.
        """
        inner = {node.parent for node in self.nodes}
        return [self.path(leaf) for leaf in range(len(self.nodes)) if leaf not in inner]

    def path(self, node: int) -> list[int]:
        """Return the numbers of the nodes from the root down to this one."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]
