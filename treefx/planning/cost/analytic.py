"""Estimate a cost model from a model's dimensions, without the model and the machine.

Counts, per token and layer, the bytes that a llama-like block saves for its backward under the min-cut partitioner in
its dtype, with tree attention: the two normalised inputs, q, k, v, the attention's result, the residual, and three
intermediates of the gated MLP; the logits and their gradient at the top. An estimate: measured profiles
(`treefx.profile`) are the basis of promises.
"""

from dataclasses import dataclass

from treefx.arguments import check_number, check_whole
from treefx.planning.cost.model import Bytes, CostModel, Seconds

__all__ = ["Dimensions", "estimate_cost"]

_BACKWARD_WORK = 2.0
_ATTENTION_BACKWARD_WORK = 2.5
_SECONDS_PER_LAYER = 20e-6
"""Launching a layer's kernels once."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes of a causal language model that matter for a plan.

    Attributes:
        layers: number of blocks.
        hidden: width.
        intermediate: width of the MLP, of the experts that see a token together.
        heads, kv_heads, head_dim: of the attention.
        vocabulary: number of token ids.
        parameters: number of all parameters.
        active_parameters: of those that see a token.
        bytes_per_number: of parameters, gradients and activations.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int
    active_parameters: int
    bytes_per_number: int

    def __post_init__(self) -> None:
        """Refuse sizes that no model has.

        Raises:
            InputError: a size is no whole number of at least 1.
        """
        for name, size in vars(self).items():
            check_whole(size, name, least=1)


def estimate_cost(
    dimensions: Dimensions, *, flops_per_second: float, host_bytes_per_second: float | None = None
) -> CostModel:
    """The cost model of these dimensions.

    Args:
        dimensions: of the model.
        flops_per_second: that the machine reaches in training.
        host_bytes_per_second: speed to host memory; None: nothing is put there.
    """
    check_number(flops_per_second, "flops_per_second", "above 0", above=0)
    if host_bytes_per_second is not None:
        check_number(host_bytes_per_second, "host_bytes_per_second", "above 0, or None", above=0, infinite=True)
    d = dimensions
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    layer = 4 * d.hidden + 2 * q + 2 * kv + 3 * d.intermediate
    kv_bytes = 2.0 * d.layers * kv * d.bytes_per_number
    logits = d.vocabulary * d.bytes_per_number
    gradients = float(d.parameters * d.bytes_per_number)
    saved = [0.0, float(d.layers * layer * d.bytes_per_number + logits), kv_bytes]
    chunk = 2.0 * d.vocabulary * 4
    # One layer's gradients at a time: twice its saved bytes.
    transient = 2.0 * layer * d.bytes_per_number
    pair = 4.0 * d.layers * q / flops_per_second
    token = 2.0 * d.active_parameters / flops_per_second
    launch = d.layers * _SECONDS_PER_LAYER
    at_logits = [0.0, saved[1] + logits, kv_bytes, 0.0, 0.0, 0.0, chunk]
    at_layers = [gradients, saved[1] + transient, 2 * kv_bytes]
    return CostModel(
        resident_bytes=2 * gradients,
        saved=Bytes([saved]),
        forward=Bytes([[*saved, 0.0, 0.0, 0.0, chunk]]),
        backward=Bytes([at_logits, at_layers]),
        kv=Bytes([[0.0, kv_bytes + transient, kv_bytes]]),
        kv_bytes_per_token=kv_bytes,
        kv_grad_bytes_per_token=2.0 * d.layers * kv * 4,
        kv_tangent_bytes_per_token=kv_bytes if d.bytes_per_number < 4 else 0.0,
        forward_seconds=Seconds(launch, token, pair),
        backward_seconds=Seconds(2 * launch, _BACKWARD_WORK * token, _ATTENTION_BACKWARD_WORK * pair),
        kv_seconds=Seconds(launch, token * d.layers / (d.layers + 1), pair),
        host_bytes_per_second=host_bytes_per_second,
    )
