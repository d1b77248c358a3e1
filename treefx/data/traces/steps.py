"""Chain model calls that were recorded with their whole prompts.

A call continues an earlier one if the earlier prompt and answer are the beginning of its prompt. Its node then holds
only what it adds. A call whose history was rewritten (compaction, reasoning left out) continues none and is a root.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treefx.data.traces.trace import TraceNode

__all__ = ["Step", "chain_steps", "nodes_of_answer"]


@dataclass(frozen=True, eq=False)
class Step:
    """Hold one call of a model: ``prompt`` [P] and ``answer`` [T], token ids."""

    prompt: npt.NDArray[np.int64]
    answer: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    """bool [T]."""
    logprobs: npt.NDArray[np.float64] | None
    """float64 [T]."""
    advantage: float | None = None
    reward: float | None = None


def chain_steps(steps: Iterable[Step]) -> tuple[TraceNode, ...]:
    """Return the nodes of calls in the order they were made.

    Of several calls that a prompt continues, the longest counts, and of those the latest.

    Args:
        steps: the calls.

    Returns:
        Per call a node of new prompt tokens and one of answer tokens, each only if it has any.
    """
    nodes: list[TraceNode] = []
    known: list[tuple[npt.NDArray[np.int64], int]] = []
    for step in steps:
        size, parent = _find_parent(step.prompt, known)
        nodes += nodes_of_answer(step, len(nodes), size, parent)
        added = len(step.answer) > 0 or len(step.prompt) > size
        known.append((np.concatenate([step.prompt, step.answer]), len(nodes) - 1 if added else parent))
    return tuple(nodes)


def nodes_of_answer(step: Step, first: int = 0, known: int = 0, parent: int = -1) -> list[TraceNode]:
    """Return the nodes of a call: its prompt behind the known tokens, and its answer.

    Args:
        step: the call.
        first: number of the first node that is returned.
        known: number of prompt tokens that stand in other nodes.
        parent: the node of the last of these; -1 without.
    """
    nodes = []
    if len(step.prompt) > known:
        new = step.prompt[known:]
        nodes.append(TraceNode(new, parent, np.zeros(len(new), dtype=np.bool_)))
        parent = first
    if len(step.answer):
        advantages = None if step.advantage is None else np.where(step.trained, step.advantage, 0.0)
        logprobs = None if step.logprobs is None else np.where(step.trained, step.logprobs, 0.0)
        nodes.append(TraceNode(step.answer, parent, step.trained, logprobs, advantages, step.reward))
    return nodes


def _find_parent(prompt: npt.NDArray[np.int64], known: list[tuple[npt.NDArray[np.int64], int]]) -> tuple[int, int]:
    """Return the length of the longest earlier call that the prompt continues, and its last node."""
    for tokens, node in sorted(reversed(known), key=lambda each: len(each[0]), reverse=True):
        if np.array_equal(tokens, prompt[: len(tokens)]):
            return len(tokens), node
    return 0, -1
