"""Learning on trees: advantages, and the rollouts they are computed for.

In: a tree of steps or a forest, and rewards. Out: advantages for ``treefx.losses``: one number per row (``rows``), or
one per step of each row (``portool``). ``relative`` is the formula they share, ``steps`` the tree. ``rollouts`` samples
such trees from a policy and an environment, ``samplers`` are such policies.

Order of imports, each only of what stands before an arrow::

    relative, steps -> rows -> portool -> rollouts -> samplers -> __init__
"""

from treefx.rl.portool import fork_relative, portool, step_rewards
from treefx.rl.rollouts import (
    Completion,
    Environment,
    Generate,
    Group,
    Outcome,
    PortoolTree,
    RandomExpansion,
    Rollouts,
    Scheme,
    rollout,
)
from treefx.rl.rows import grpo, reinforce_plus_plus, reinforce_plus_plus_tokens, rloo, tree_grpo
from treefx.rl.samplers import CompletionsSampler, TransformersSampler
from treefx.rl.steps import StepTree

__all__ = [
    "Completion",
    "CompletionsSampler",
    "Environment",
    "Generate",
    "Group",
    "Outcome",
    "PortoolTree",
    "RandomExpansion",
    "Rollouts",
    "Scheme",
    "StepTree",
    "TransformersSampler",
    "fork_relative",
    "grpo",
    "portool",
    "reinforce_plus_plus",
    "reinforce_plus_plus_tokens",
    "rloo",
    "rollout",
    "step_rewards",
    "tree_grpo",
]
