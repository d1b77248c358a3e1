"""Sample tokens for a rollout.

In: prefixes and seeds. Out: completions with their log-probabilities. ``transformers_sampler`` runs a model and keeps
the keys and values of prefixes (``prefix_cache``); ``draw`` turns logits into tokens; ``completions_sampler`` calls a
server.

Order of imports, each only of what stands before an arrow::

    draw, prefix_cache -> transformers_sampler, completions_sampler -> __init__
"""

from treefx.rl.samplers.completions_sampler import CompletionsSampler
from treefx.rl.samplers.transformers_sampler import TransformersSampler

__all__ = ["CompletionsSampler", "TransformersSampler"]
