"""Store sampled trees with rewards, old log-probabilities and masks; build their forest."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.kernels.memory import lasting_property
from treefx.rl.rollouts.files import read_columns, write_columns
from treefx.rl.rollouts.growth import PROMPT, GrowingTree
from treefx.rl.steps import StepTree

__all__ = ["Rollouts"]

_INTEGER, _FLOAT = torch.int64, torch.float64
_DTYPES = {
    "prompt_tokens": _INTEGER,
    "prompt_offsets": _INTEGER,
    "step_tokens": _INTEGER,
    "step_offsets": _INTEGER,
    "step_sampled": _INTEGER,
    "step_logprobs": _FLOAT,
    "step_rewards": _FLOAT,
    "parent": _INTEGER,
    "leaf": _INTEGER,
    "group": _INTEGER,
    "tree": _INTEGER,
    "rewards": _FLOAT,
    "finished": torch.bool,
}


@dataclass(frozen=True, eq=False, repr=False)
class Rollouts:
    """Hold trajectories of some tasks; every shared step is stored once.

    `rollout` makes them.

    G: tasks. S: steps. P: tokens of all prompts. T: tokens of all steps. L: sampled tokens of these. K: trajectories,
    in the order of tasks, and within a task in the order they ended.

    Attributes:
        prompt_tokens: int64 [P], token ids of all prompts end to end.
        prompt_offsets: int64 [G + 1], where each begins.
        step_tokens: int64 [T], token ids of all steps end to end: sampled tokens, then the observation.
        step_offsets: int64 [S + 1], where each begins.
        step_sampled: int64 [S], how many of the step's tokens were sampled; the others are the environment's.
        step_logprobs: float64 [L], log-probabilities of all sampled tokens end to end, under the policy that sampled
            them.
        step_rewards: float64 [S], each step's own reward (PORTool's formatting reward).
        parent: int64 [S], the step before, -1 after the prompt.
        leaf: int64 [K], each trajectory's last step.
        group: int64 [K], the task of each trajectory.
        tree: int64 [K], the tree it was sampled in; numbered through all tasks.
        rewards: float64 [K], outcome reward.
        finished: bool [K], the environment ended it; False where a limit did.
        info: JSON that is saved too: the seed, `sampled_tokens` (of branches that were given up, too), `tasks`.

    Raises:
        InputError: a column has a shape or values that do not fit the others.
    """

    prompt_tokens: Tensor
    prompt_offsets: Tensor
    step_tokens: Tensor
    step_offsets: Tensor
    step_sampled: Tensor
    step_logprobs: Tensor
    step_rewards: Tensor
    parent: Tensor
    leaf: Tensor
    group: Tensor
    tree: Tensor
    rewards: Tensor
    finished: Tensor
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, fits in self._check_columns():
            if not bool(fits):
                raise InputError(
                    f"these are no rollouts: {name}; use what treefx.rl.rollout returned or saved, unchanged"
                )

    @classmethod
    def from_trees(cls, trees: Sequence[GrowingTree], info: dict[str, Any]) -> "Rollouts":
        """Collect finished trajectories from fully grown trees, one tree per task."""
        columns: dict[str, list[Any]] = {name: [] for name in _DTYPES}
        columns["prompt_offsets"], columns["step_offsets"] = [0], [0]
        num_trees = 0
        for group, tree in enumerate(trees):
            columns["prompt_tokens"] += tree.prompt
            columns["prompt_offsets"].append(len(columns["prompt_tokens"]))
            number = _append_steps(columns, tree)
            for last in tree.ended():
                step = tree.steps[last]
                columns["leaf"].append(number[last])
                columns["group"].append(group)
                columns["tree"].append(num_trees + step.branch.tree)
                columns["rewards"].append(float(step.outcome.reward))
                columns["finished"].append(step.outcome.done)
            num_trees = max(columns["tree"], default=-1) + 1
        tensors = {name: torch.tensor(columns[name], dtype=dtype) for name, dtype in _DTYPES.items()}
        return cls(**tensors, info=info)

    @classmethod
    def load(cls, path: "str | PathLike[str]") -> "Rollouts":
        """Read a file that `save` wrote.

        Raises:
            InputError: the file is of another kind or version, or damaged; the message names it and the field.
            OSError: the file cannot be read.
        """
        columns, info = read_columns(path, _DTYPES)
        try:
            found = cls(**columns, info=info)
            StepTree(found.parent, found.leaf, found.group, found.tree)  # refuses steps that are no trees
            return found
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def save(self, path: "str | PathLike[str]") -> None:
        """Write one safetensors file, with `info` as JSON in its metadata.

        Raises:
            InputError: `info` is not JSON.
            OSError: the file cannot be written.
        """
        write_columns(path, {name: getattr(self, name) for name in _DTYPES}, self.info)

    def __len__(self) -> int:
        """Number K of trajectories."""
        return len(self.leaf)

    def __repr__(self) -> str:
        return (
            f"Rollouts({len(self)} trajectories of {len(self.prompt_offsets) - 1} tasks, {len(self.parent)} steps, "
            f"{int(self.step_sampled.sum())} sampled tokens, mean reward {float(self.rewards.mean()):.3f})"
        )

    @lasting_property
    def steps(self) -> StepTree:
        """Return the steps as advantages take them.

        `steps.span` has their tokens [start, stop) on the rows.
        """
        plain = StepTree(self.parent, self.leaf, self.group, self.tree)
        length = self.step_offsets.diff()
        stop = torch.zeros_like(length)
        prompt = self.prompt_offsets.diff()
        for row, path in enumerate(plain.paths):
            stop[path] = prompt[self.group[row]] + length[path].cumsum(0)
        span = torch.stack([stop - length, stop], 1)
        return dataclasses.replace(plain, span=span, row_lengths=stop[self.leaf])

    @lasting_property
    def forest(self) -> Forest:
        """Return the trajectories as rows; weights are 1 for sampled tokens, 0 elsewhere."""
        return Forest.from_sequences(self.spread(self.step_tokens, self.prompt_tokens), self.sampled)

    @lasting_property
    def forest_once(self) -> Forest:
        """Return the forest with weight 1 for a step in its first trajectory alone, else 0.

        A loss on `forest` is the sum over trajectories, as training on separate rows; on this, over sampled steps.
        """
        first = torch.zeros_like(self.parent)
        for row in reversed(range(len(self))):
            first[self.steps.paths[row]] = row
        of_tokens = torch.repeat_interleave(first, self.step_offsets.diff())
        owners = self.spread(of_tokens, torch.full_like(self.prompt_tokens, -1))
        weights = [sampled & (owners[row] == row) for row, sampled in enumerate(self.sampled)]
        return Forest.from_sequences(self.spread(self.step_tokens, self.prompt_tokens), weights)

    @lasting_property
    def sampled(self) -> list[Tensor]:
        """Per row, bool [length]: the policy sampled the token, so it is trained."""
        return self.spread(self._is_sampled, torch.zeros_like(self.prompt_tokens, dtype=torch.bool))

    @lasting_property
    def observed(self) -> list[Tensor]:
        """Per row, bool [length]: the token is the environment's, a tool's output for example."""
        return self.spread(~self._is_sampled, torch.zeros_like(self.prompt_tokens, dtype=torch.bool))

    @lasting_property
    def old_logprobs(self) -> list[Tensor]:
        """Return, per row, float64 [length]: the log-probability of sampled tokens, else NaN."""
        of_step = torch.full(self.step_tokens.shape, torch.nan, dtype=torch.float64)
        of_step[self._is_sampled] = self.step_logprobs
        return self.spread(of_step, torch.full(self.prompt_tokens.shape, torch.nan, dtype=torch.float64))

    def spread(self, of_steps: Tensor, of_prompts: Tensor) -> list[Tensor]:
        """Lay values along the rows.

        Args:
            of_steps: [T], one value per entry of `step_tokens`.
            of_prompts: [P], one value per entry of `prompt_tokens`.

        Returns:
            Per row, [length].
        """
        prompts = torch.split(of_prompts, self.prompt_offsets.diff().tolist())
        pieces = torch.split(of_steps, self.step_offsets.diff().tolist())
        return [
            torch.cat([prompts[group], *(pieces[step] for step in path.tolist())])
            for group, path in zip(self.group.tolist(), self.steps.paths, strict=True)
        ]

    @lasting_property
    def _is_sampled(self) -> Tensor:
        """bool, one per entry of `step_tokens`."""
        length = self.step_offsets.diff()
        place = torch.arange(len(self.step_tokens)) - torch.repeat_interleave(self.step_offsets[:-1], length)
        return place < torch.repeat_interleave(self.step_sampled, length)

    def _check_columns(self) -> Iterator[tuple[str, Any]]:
        """Yield the invariants of all rollouts, each with whether it holds.

        A later one may rely on those before.
        """
        columns = [(getattr(self, name), dtype) for name, dtype in _DTYPES.items()]
        yield "columns must be one-dimensional, of their dtypes", all(x.ndim == 1 and x.dtype == d for x, d in columns)
        steps, rows = len(self.parent), len(self.leaf)
        yield "there must be a step and a trajectory", steps and rows
        lengths = {len(x) for x in (self.step_sampled, self.step_rewards, self.step_offsets[1:])}
        yield "step_sampled, step_rewards and step_offsets must fit parent", lengths == {steps}
        lengths = {len(x) for x in (self.group, self.tree, self.rewards, self.finished)}
        yield "group, tree, rewards and finished must be as long as leaf", lengths == {rows}
        yield "prompt_offsets must cut prompt_tokens", _cuts(self.prompt_offsets, self.prompt_tokens)
        yield "step_offsets must cut step_tokens", _cuts(self.step_offsets, self.step_tokens)
        yield "token ids must be at least 0", (torch.cat([self.prompt_tokens, self.step_tokens]) >= 0).all()
        yield "group must name tasks", ((self.group >= 0) & (self.group < len(self.prompt_offsets) - 1)).all()
        sampled = self.step_sampled
        yield "a step has between 1 and all of its tokens sampled", (sampled >= 1).all()
        yield "a step has between 1 and all of its tokens sampled", (sampled <= self.step_offsets.diff()).all()
        yield "step_logprobs must be one per sampled token", len(self.step_logprobs) == int(sampled.sum())
        numbers = torch.cat([self.rewards, self.step_rewards, self.step_logprobs])
        yield "rewards and log-probabilities must be finite", numbers.isfinite().all()


def _append_steps(columns: dict[str, list[Any]], tree: GrowingTree) -> dict[int, int]:
    """Append the steps of a task that are on a trajectory; returns their numbers among all."""
    kept: set[int] = set()
    for last in tree.ended():
        while last != PROMPT and last not in kept:
            kept.add(last)
            last = tree.steps[last].branch.parent
    number = {PROMPT: -1}
    for own in sorted(kept):
        step = tree.steps[own]
        number[own] = len(columns["parent"])
        columns["parent"].append(number[step.branch.parent])
        columns["step_tokens"] += [*step.completion.tokens, *step.outcome.observation]
        columns["step_offsets"].append(len(columns["step_tokens"]))
        columns["step_sampled"].append(len(step.completion.tokens))
        columns["step_logprobs"] += [float(value) for value in step.completion.logprobs]
        columns["step_rewards"].append(float(step.outcome.step_reward))
    return number


def _cuts(offsets: Tensor, values: Tensor) -> bool:
    return len(offsets) > 1 and bool(offsets[0] == 0 and offsets[-1] == len(values) and (offsets.diff() >= 1).all())
