"""Sample tree rollouts from a policy and an environment.

Out: trajectories with rewards and old log-probabilities. A ``scheme`` chooses the next branches, ``run`` samples and
    acts, ``growth`` is a growing tree, ``records`` the finished one, ``files`` its storage. ``protocol`` is the
    interface of a policy and an environment.

Order of imports, each only of what stands before an arrow::

    protocol, files -> growth -> schemes, records -> run -> __init__
"""

from treefx.rl.rollouts.protocol import Completion, Environment, Generate, Outcome
from treefx.rl.rollouts.records import Rollouts
from treefx.rl.rollouts.run import rollout
from treefx.rl.rollouts.schemes import Group, PortoolTree, RandomExpansion, Scheme

__all__ = [
    "Completion",
    "Environment",
    "Generate",
    "Group",
    "Outcome",
    "PortoolTree",
    "RandomExpansion",
    "Rollouts",
    "Scheme",
    "rollout",
]
