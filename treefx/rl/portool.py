"""PORTool: rewards of steps in a tree of tool calls, and the advantages they give.

Reference: PORTool, arXiv 2510.26020 (v1 "Tool-Use LLM Training with Rewarded Tree"). We had its abstracts and reviews
    only. This module builds their statements, and adds an option with a default for each open point: it is **our
    reading**, not a reproduction. With k the trajectories, T_k the steps of k, m(s) the trajectories
through step s, C(p) the children of step or prompt p, and t the number of s on its trajectories, from 1:

    R(s)      = G over k in m(s) of { gamma^(T_k - t) R_out(k) + R_fm(s) }     one reward, in all trajectories of m(s)
    A_fork(s) = (R(s) - mean of R over C(parent of s)) / std of R over C(parent of s)
    A_traj(k) = (R_out(k) - mean over the prompt's trajectories) / std over them
    A(k, s)   = w_traj A_traj(k) + w_fork A_fork(s)

Open there, options here: the aggregator G (`aggregate`), whether the last step counts as 0 or as 1 step from the end
(`exponent`), which std or none (`scale`), and the weights. The first steps after a prompt are siblings. On a step that
trajectories share, A_fork is one number and A_traj is not.
"""

from typing import Literal

import torch
from torch import Tensor

from treefx.arguments import check_number
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.rl.relative import Numbers, Scale, group_relative, read_numbers
from treefx.rl.rows import grpo, read_tree
from treefx.rl.steps import StepTree

__all__ = ["fork_relative", "portool", "step_rewards"]

Aggregate = Literal["max", "mean", "min"]
"""Best, mean or worst outcome reached through a step. The abstract of v2 credits a step if a correct answer *can* be
reached from it, which is "max", the default."""
Exponent = Literal["steps_after", "steps_from"]
"""T_k - t, so that the last step's outcome is not decayed, or T_k - t + 1, so that it is once."""


def step_rewards(
    tree: StepTree | Forest,
    rewards: Numbers,
    *,
    format_rewards: Numbers | None = None,
    gamma: float = 0.95,
    aggregate: Aggregate = "max",
    exponent: Exponent = "steps_after",
) -> Tensor:
    """Reward of every step, R(s) of the module's docstring.

    Args:
        tree: the steps.
        rewards: [K], outcome reward R_out of each trajectory. PORTool: 1 correct, 0 not answered, -1 wrong.
        format_rewards: [S], R_fm of each step: its calls are well formed and succeed. 0 when None.
        gamma: decay per step to the end, in [0, 1]; 0.95 is reported as the best of PORTool's ablation.
        aggregate: G, see `Aggregate`.
        exponent: see `Exponent`.

    Returns:
        float64 [S].

    Raises:
        InputError: an argument does not fit.
    """
    tree = read_tree(tree)
    outcome = read_numbers(rewards, len(tree.leaf), "rewards", "trajectory")
    formatting = torch.zeros(len(tree), dtype=torch.float64)
    if format_rewards is not None:
        formatting = read_numbers(format_rewards, len(tree), "format_rewards", "step")
    check_number(gamma, "gamma", "in [0, 1]", least=0, most=1)
    if exponent not in ("steps_after", "steps_from"):
        raise InputError(f"exponent must be 'steps_after' or 'steps_from', got {exponent!r}")
    left = tree.path_lengths[tree.entry_row] - tree.position[tree.entry_step] + (exponent == "steps_from")
    decayed = torch.tensor(gamma, dtype=torch.float64).pow(left) * outcome[tree.entry_row]
    # R_fm is the same for all k in m(s), so it may be added after G.
    return _aggregate(decayed, tree, aggregate) + formatting


def fork_relative(
    tree: StepTree | Forest, values: Numbers, *, scale: Scale = "sample_std", epsilon: float = 0.0
) -> Tensor:
    """Compute each step's value relative to its siblings': A_fork of the module's docstring.

    Siblings weigh alike.

    Args:
        tree: the steps.
        values: [S], from `step_rewards`.
        scale: which std.
        epsilon: added to the std.

    Returns:
        float64 [S]; 0 for an only child and among equals.

    Raises:
        InputError: an argument does not fit.
    """
    tree = read_tree(tree)
    return group_relative(read_numbers(values, len(tree), "values", "step"), tree.fork, scale, epsilon)


def portool(
    tree: StepTree | Forest,
    rewards: Numbers,
    *,
    format_rewards: Numbers | None = None,
    gamma: float = 0.95,
    aggregate: Aggregate = "max",
    exponent: Exponent = "steps_after",
    w_traj: float = 1.0,
    w_fork: float = 1.0,
    scale: Scale = "sample_std",
    epsilon: float = 0.0,
) -> list[Tensor]:
    """Compute the advantages A(k, s) of the module's docstring.

    They blend fork-relative with trajectory-relative values.

    Args:
        tree: the steps. Of a forest, every node is a step; for steps of your own, `StepTree.from_forest(spans=...)`.
        rewards: [K], outcome reward of each trajectory.
        format_rewards: [S], formatting reward of each step; 0 when None.
        gamma: decay per step to the end, in [0, 1].
        aggregate: G, see `Aggregate`.
        exponent: see `Exponent`.
        w_traj: weight of the trajectory-relative advantage.
        w_fork: weight of the fork-relative advantage.
        scale: which std, in both.
        epsilon: added to the std.

    Returns:
        For a StepTree, per trajectory float64 [T_k], one advantage per step: `tree.to_tokens` spreads them over tokens.
        For a Forest, per row float64 [length], one per token, in the form of `treefx.losses`.

    Raises:
        InputError: an argument does not fit.

    Example:
        >>> tree = StepTree.from_paths([["look up", "answer"], ["look up", "guess"]])
        >>> portool(tree, [1.0, -1.0], scale="none")
        [tensor([1., 2.], dtype=torch.float64), tensor([-1., -2.], dtype=torch.float64)]
    """
    steps = read_tree(tree)
    values = step_rewards(
        steps, rewards, format_rewards=format_rewards, gamma=gamma, aggregate=aggregate, exponent=exponent
    )
    fork = w_fork * fork_relative(steps, values, scale=scale, epsilon=epsilon)
    trajectory = w_traj * grpo(steps, rewards, scale=scale, epsilon=epsilon)
    per_step = [own + fork[path] for own, path in zip(trajectory, steps.paths, strict=True)]
    return steps.to_tokens(per_step) if isinstance(tree, Forest) else per_step


def _aggregate(values: Tensor, tree: StepTree, aggregate: Aggregate) -> Tensor:
    reductions = {"max": "amax", "mean": "mean", "min": "amin"}
    if aggregate not in reductions:
        raise InputError(f"aggregate must be 'max', 'mean' or 'min', got {aggregate!r}")
    start = torch.zeros(len(tree), dtype=torch.float64)
    return start.scatter_reduce(0, tree.entry_step, values, reductions[aggregate], include_self=False)
