"""Which branches a rollout samples: plain groups, PORTool's trees, and random expansion.

A scheme is asked wave by wave; all branches of a wave, of all tasks, are sampled in one batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from treefx.arguments import check_whole
from treefx.errors import InputError
from treefx.rl.rollouts.growth import PROMPT, Branch, GrowingTree

__all__ = ["Group", "PortoolTree", "RandomExpansion", "Scheme"]


class Scheme(Protocol):
    """Define how the tree of a task grows."""

    def grow(self, tree: GrowingTree, random: np.random.Generator, /) -> Iterator[Sequence[Branch]]:
        """Yield the branches of one wave after the other.

        When asked again, the steps of the wave before are in `tree`. When it ends, every step that `tree.ended()` names
        is a trajectory; steps on none of them are left out.
        """


@dataclass(frozen=True)
class Group:
    """Sample plain groups (GRPO): independent trajectories of each task, one tree each.

    They share the task's prompt.

    Attributes:
        trajectories: n, at least 1.
    """

    trajectories: int

    def __post_init__(self) -> None:
        _check(trajectories=self.trajectories)

    def grow(self, tree: GrowingTree, random: np.random.Generator, /) -> Iterator[Sequence[Branch]]:
        """Yield the next step of every trajectory that has not ended."""
        yield [Branch(PROMPT, number) for number in range(self.trajectories)]
        while live := tree.live():
            yield [Branch(step, tree.steps[step].branch.tree) for step in live]


@dataclass(frozen=True)
class PortoolTree:
    """Grow PORTool's tree: one tree per task, in which every unfinished step may fork.

    arXiv 2510.26020.

    n first steps follow the prompt. In each later wave every unfinished step has f candidate forks, of which n minus
    the finished trajectories are kept, so that in the end n have finished. A step of which none is kept is given up.
    The kept forks are drawn uniformly, as nothing else is published. The draw does not depend on the candidates'
    tokens, so it comes first, and only kept forks are sampled: the same trees, for a fraction 1 / f of the tokens. That
    is as many tokens as independent trajectories have; to sample fewer, begin with fewer first steps.

    Attributes:
        trajectories: n, at least 1.
        forks: f, at least 1; with 1, all trajectories go on alone.
        first_steps: how many steps follow the prompt, from 1 to n; n when None, as published. From fewer the tree
            widens by f per wave until n is reached; where it finishes sooner, there are fewer trajectories than n.

    Raises:
        InputError: a number is out of its range.
    """

    trajectories: int
    forks: int = 2
    first_steps: int | None = None

    def __post_init__(self) -> None:
        _check(trajectories=self.trajectories, forks=self.forks)
        first = self.first_steps
        if first is not None and not 1 <= check_whole(first, "first_steps", least=-1) <= self.trajectories:
            raise InputError(f"first_steps must be in [1, trajectories = {self.trajectories}], got {self.first_steps}")

    def grow(self, tree: GrowingTree, random: np.random.Generator, /) -> Iterator[Sequence[Branch]]:
        """Yield n minus the finished branches, or all candidates where there are fewer."""
        yield [Branch(PROMPT, 0)] * (self.first_steps or self.trajectories)
        while live := tree.live():
            candidates = [Branch(step, 0) for step in live for _ in range(self.forks)]
            keep = min(self.trajectories - len(tree.ended()), len(candidates))
            kept = random.choice(len(candidates), keep, replace=False)
            yield [candidates[i] for i in sorted(kept.tolist())]


@dataclass(frozen=True)
class RandomExpansion:
    """Grow Tree-GRPO's trees: chains first, then branches from random nodes to their ends.

    arXiv 2509.21240.

    M chains per task, each of which becomes a tree. In each round N nodes of every tree are drawn, different ones as
    far as it has so many, and sampled on to the end. That makes M (1 + rounds N) trajectories.

    Attributes:
        chains: M, at least 1.
        nodes: N, at least 1.
        rounds: rounds of expansion; 0 for chains only.
        from_prompt: whether the prompt counts as a node of every tree; the steps that do are those that others follow.
            A tree of a single step has no other node, so there it counts always.
    """

    chains: int
    nodes: int = 1
    rounds: int = 1
    from_prompt: bool = True

    def __post_init__(self) -> None:
        _check(chains=self.chains, nodes=self.nodes)
        check_whole(self.rounds, "rounds")

    def grow(self, tree: GrowingTree, random: np.random.Generator, /) -> Iterator[Sequence[Branch]]:
        """Yield chains to their ends, then in each round the drawn branches to theirs."""
        yield from Group(self.chains).grow(tree, random)
        for _ in range(self.rounds):
            yield [branch for number in range(self.chains) for branch in self._draw(tree, number, random)]
            while live := tree.live():
                yield [Branch(step, tree.steps[step].branch.tree) for step in live]

    def _draw(self, tree: GrowingTree, number: int, random: np.random.Generator) -> list[Branch]:
        parents = {step.branch.parent for step in tree.steps if step.branch.tree == number} - {PROMPT}
        nodes = sorted(parents) if parents and not self.from_prompt else [PROMPT, *sorted(parents)]
        drawn = random.choice(len(nodes), self.nodes, replace=self.nodes > len(nodes))
        return [Branch(nodes[i], number) for i in sorted(drawn.tolist())]


def _check(**counts: int) -> None:
    for name, count in counts.items():
        check_whole(count, name, least=1)
