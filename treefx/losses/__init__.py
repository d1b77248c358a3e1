"""Compute losses over a forest's edges, equal in value and gradient to losses over rows.

In: log-probabilities [E] from ``edge_logprobs`` (with its ``temperature``), the forest, and the advantages or labels of
    rows.
Out: a scalar, and metrics (``Metrics``) as trainers log them. With w the forest's weights, W_b the sum of row b's, W
the sum of all and R the number of rows, the reductions are

    "sum"                sum_{b,t} w[b,t] l[b,t]
    "token_mean"         sum_{b,t} w[b,t] l[b,t] / W                    (DAPO; `CrossEntropyLoss` with labels)
    "row_mean"           sum_b (sum_t w[b,t] l[b,t] / W_b) / R          (GRPO)
    Constant(length)     sum_{b,t} w[b,t] l[b,t] / (R * length)         (Dr. GRPO)
    PromptMean(prompts)  mean over prompts of the token mean over the prompt's rows

A token of weight 0 is left out for every value of its log-probability, -inf (a forbidden token) and NaN included.
With weights 0 or 1, token_mean is the mean over the tokens of weight 1, equal to `torch.nn.CrossEntropyLoss` with
labels -100 elsewhere. A row or a prompt whose weights are all 0 has no mean; it adds 0 and still counts. Over several
batches or ranks: "sum", divided by the number of tokens in all of them.

How terms of rows that share an edge become one term of the edge:

    linear     row b contributes c_b f(logp): the edge's term is (sum_b c_b) f(logp). `sft`, `policy_gradient`,
               `cispo`, `kl`, `entropy`.
    by sign    row b contributes max(c_b, 0) f(logp) + min(c_b, 0) g(logp): the edge's term is C+ f + C- g, where C+
    sums the
               positive c_b and C- the negative ones. `clipped`, for which summed advantages would be wrong.
    per entry  f differs from row to row, as where rows recorded unequal old log-probabilities for an edge: one term per
               (edge, row). The functions look whether any do, and take this form only then.
    per row    f reads the whole row: `clipped(level="sequence")`, `dpo`, `ipo`, `kto`, `orpo`, `simpo`. The
               gradient of an edge is the sum over its rows of weight times the gradient of the row.

All but the last are sums over edges and run part by part through ``treefx.forward_backward``. The last raise
`CoupledLossError` on some of a forest's edges, and ``treefx.forward_backward`` then runs the parts twice:
log-probabilities first.
"""

from treefx.losses.metrics import Metrics
from treefx.losses.off_policy import importance_weights
from treefx.losses.pairs import dpo, ipo, orpo, simpo
from treefx.losses.reductions import Constant, PromptMean, Reduction
from treefx.losses.regularisers import entropy, kl
from treefx.losses.supervised import sft
from treefx.losses.surrogates import cispo, clipped, policy, policy_gradient
from treefx.losses.unpaired import kto

__all__ = [
    "Constant",
    "Metrics",
    "PromptMean",
    "Reduction",
    "cispo",
    "clipped",
    "dpo",
    "entropy",
    "importance_weights",
    "ipo",
    "kl",
    "kto",
    "orpo",
    "policy",
    "policy_gradient",
    "sft",
    "simpo",
]
