"""Advantages of whole trajectories: GRPO, RLOO, REINFORCE++ and Tree-GRPO.

Each takes the tree of steps (or a forest, whose rows are the trajectories) and one outcome reward per trajectory, and
returns advantages for `treefx.losses`. A trajectory without others in its group, or equal to all others, has advantage
0.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from treefx.arguments import check_number
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.rl.relative import Numbers, Scale, group_relative, read_numbers
from treefx.rl.steps import StepTree

__all__ = ["grpo", "read_tree", "reinforce_plus_plus", "reinforce_plus_plus_tokens", "rloo", "tree_grpo"]

Baseline = Literal["none", "group"]


def grpo(
    tree: StepTree | Forest,
    rewards: Numbers,
    *,
    scale: Scale = "sample_std",
    epsilon: float = 0.0,
) -> Tensor:
    """Group-relative advantages (GRPO: Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

        A_k = (R_k - mean over the prompt's trajectories) / std over them

    Args:
        tree: the trajectories; `tree.group` says which answer the same prompt. A forest of one tree is one prompt.
        rewards: [K], outcome reward of each trajectory.
        scale: which std; "none" divides by nothing (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783).
        epsilon: added to the std; TRL adds 1e-4.

    Returns:
        float64 [K].

    Raises:
        InputError: an argument does not fit.
    """
    tree = read_tree(tree)
    return group_relative(_read_rewards(rewards, tree), tree.group, scale, epsilon)


def rloo(tree: StepTree | Forest, rewards: Numbers) -> Tensor:
    """Return the reward less the mean of the prompt's other trajectories.

    RLOO: Ahmadian et al. 2024, arXiv 2402.14740.

        A_k = R_k - sum_{i != k} R_i / (n - 1)  =  n / (n - 1) (R_k - mean over the prompt's n trajectories)

    Args:
        tree: the trajectories; `tree.group` says which answer the same prompt.
        rewards: [K], outcome reward of each trajectory.

    Returns:
        float64 [K]; 0 for the only trajectory of a prompt.

    Raises:
        InputError: an argument does not fit.
    """
    tree = read_tree(tree)
    deviation = group_relative(_read_rewards(rewards, tree), tree.group, "none")
    number = torch.unique(tree.group, return_inverse=True)[1]
    count = torch.bincount(number)[number]
    return deviation * count / (count - 1).clamp(min=1)


def reinforce_plus_plus(
    tree: StepTree | Forest,
    rewards: Numbers,
    *,
    baseline: Baseline = "none",
    tokens: Numbers | None = None,
    scale: Scale = "sample_std",
    epsilon: float = 0.0,
) -> Tensor:
    """Normalise advantages over the whole batch (REINFORCE++), without a KL penalty.

    Hu 2025, arXiv 2501.03262.

        A_k = (R'_k - mean over the batch) / std over the batch,
        R'_k = R_k (baseline "none"), or R_k - mean over the prompt's trajectories ("group": REINFORCE++-baseline)

    Args:
        tree: the trajectories.
        rewards: [K], outcome reward of each trajectory.
        baseline: "none" or "group", above.
        tokens: [K], trained tokens of each trajectory: mean and std are then those over tokens, as OpenRLHF takes
            them; over trajectories when None.
        scale: which std.
        epsilon: added to the std.

    Returns:
        float64 [K].

    Raises:
        InputError: an argument does not fit.
    """
    tree = read_tree(tree)
    values = _less_baseline(_read_rewards(rewards, tree), tree, baseline)
    weights = None if tokens is None else read_numbers(tokens, len(values), "tokens", "trajectory")
    if weights is not None and bool((weights < 0).any()):
        raise InputError(f"tokens must be at least 0, got {float(weights.min())}")
    return group_relative(values, torch.zeros_like(tree.group), scale, epsilon, weights)


def reinforce_plus_plus_tokens(
    tree: StepTree | Forest,
    rewards: Numbers,
    mask: Sequence[Tensor],
    kl: Sequence[Tensor],
    *,
    beta: float = 0.01,
    baseline: Baseline = "none",
    scale: Scale = "sample_std",
    epsilon: float = 0.0,
) -> list[Tensor]:
    """Compute REINFORCE++ with its KL penalty inside the reward: one advantage per token.

    Hu 2025, arXiv 2501.03262.

        A_{k,t} = R'_k - beta sum_{i >= t} KL_{k,i}, then (A - mean) / std over all trained tokens of the batch

    Args:
        tree: the trajectories.
        rewards: [K], outcome reward of each trajectory.
        mask: per row, bool [length]: the tokens that are trained.
        kl: per row, [length]: estimate of the KL divergence from the reference at each token; read under the mask.
        beta: weight of the penalty.
        baseline: as for `reinforce_plus_plus`.
        scale: which std.
        epsilon: added to the std.

    Returns:
        Per row, float64 [length]; 0 at tokens that are not trained.

    Raises:
        InputError: an argument does not fit.
    """
    check_number(beta, "beta", "a finite number")
    tree = read_tree(tree)
    values = _less_baseline(_read_rewards(rewards, tree), tree, baseline)
    shapes = [[list(x.shape) for x in given] for given in (mask, kl)]
    if len(mask) != len(values) or shapes[0] != shapes[1]:
        raise InputError(f"mask and kl must have one vector of the same length per trajectory, got {shapes}")
    trained = [row.detach().to("cpu", torch.bool) for row in mask]
    flat_kl = [k.detach().to("cpu", torch.float64).where(m, 0.0) for k, m in zip(kl, trained, strict=True)]
    left = [row.flip(0).cumsum(0).flip(0) for row in flat_kl]
    returns = torch.cat([value - beta * row for value, row in zip(values, left, strict=True)])
    kept = torch.cat(trained)
    if not bool(returns[kept].isfinite().all()):
        raise InputError("kl must be finite wherever the mask is set, got NaN or infinity")
    batch = torch.zeros(int(kept.sum()), dtype=torch.int64)
    advantages = torch.zeros_like(returns)
    advantages[kept] = group_relative(returns[kept], batch, scale, epsilon)
    return list(torch.split(advantages, [len(row) for row in trained]))


def tree_grpo(
    tree: StepTree | Forest,
    rewards: Numbers,
    *,
    w_intra: float = 1.0,
    w_inter: float = 1.0,
    scale: Scale = "sample_std",
    epsilon: float = 0.0,
) -> Tensor:
    """Intra-tree plus inter-tree advantages (Tree-GRPO: arXiv 2509.21240, ICLR 2026).

        A_k = w_intra (R_k - mean over k's tree) / std over k's tree
            + w_inter (R_k - mean over all trees of the prompt) / std over them

    Both weights are 1 in the paper's sum, as quoted in reviews; the formula above is our reading of it. With one
    trajectory per tree it is GRPO.

    Args:
        tree: the trajectories; `tree.tree` says which tree each was sampled in, `tree.group` which prompt it answers.
        rewards: [K], outcome reward of each trajectory.
        w_intra: weight of the comparison within a tree. Reviews report that it is unstable alone.
        w_inter: weight of the comparison over a prompt's trees.
        scale: which std, in both terms.
        epsilon: added to the std.

    Returns:
        float64 [K].

    Raises:
        InputError: an argument does not fit.
    """
    for name, weight in (("w_intra", w_intra), ("w_inter", w_inter)):
        check_number(weight, name, "a finite number")
    tree = read_tree(tree)
    values = _read_rewards(rewards, tree)
    intra = group_relative(values, tree.tree, scale, epsilon)
    return w_intra * intra + w_inter * group_relative(values, tree.group, scale, epsilon)


def read_tree(tree: StepTree | Forest) -> StepTree:
    """The tree itself, or that of a forest with nodes for steps; see `StepTree.from_forest`."""
    if isinstance(tree, Forest):
        return StepTree.from_forest(tree)
    if isinstance(tree, StepTree):
        return tree
    raise InputError(f"expected a StepTree or a Forest, got {type(tree).__name__}; from Rollouts take .steps")


def _read_rewards(rewards: Numbers, tree: StepTree) -> Tensor:
    return read_numbers(rewards, len(tree.leaf), "rewards", "trajectory")


def _less_baseline(values: Tensor, tree: StepTree, baseline: Baseline) -> Tensor:
    if baseline not in ("none", "group"):
        raise InputError(f"baseline must be 'none' or 'group', got {baseline!r}")
    return values if baseline == "none" else group_relative(values, tree.group, "none")
