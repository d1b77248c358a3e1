"""Tree rollouts: a policy and an environment in, trajectories with rewards and old log-probabilities out.

A ``scheme`` says which branches come next, ``run`` samples and acts, ``growth`` is a tree meanwhile, ``records`` what
is left of it, ``files`` how that is kept. ``protocol`` is what a policy and an environment have to be.

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
