"""Compute log-probabilities of edges, and entropies at their sources.

Inputs are logits, or hidden states and the LM head.

All forms compute in float32 (float64 for float64 input) and never hold a float32 copy of [N, V]: those of logits, and
entropies, go over rows in chunks, log-probabilities of hidden states over the vocabulary
(`treefx.passes.packing.vocab_tail`). On a GPU log-probabilities come from Triton kernels (`treefx.kernels.head_loss`);
entropies, and float64, keep the form in chunks, which waits for the device once.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from treefx.arguments import check_number, check_whole
from treefx.errors import ForestError, InputError
from treefx.forests.context import check_run
from treefx.forests.forest import Forest
from treefx.kernels.first_derivatives import once_differentiable
from treefx.kernels.head_loss.choose import runs_fused

__all__ = ["edge_entropy", "edge_logprobs"]

_ROWS_PER_CHUNK = 512


def edge_logprobs(
    x: torch.Tensor,
    forest: Forest,
    temperature: float = 1.0,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    chunk: int = 4096,
) -> torch.Tensor:
    """Log-probability of every edge's token at the edge's source.

    With z the logits at the source, logp = z[token] / T - logsumexp(z / T).

    Args:
        x: logits [1, N, V] or [N, V]; or, with `weight`, the final hidden states [1, N, H] or [N, H].
        forest: the forest whose packed row the model ran on.
        temperature: T above, greater than 0.
        weight: LM-head weight [V, H]. Logits are computed `chunk` entries of the vocabulary at a time.
        bias: LM-head bias [V].
        softcap: final logit cap, z = softcap * tanh(z / softcap), as Gemma has it.
        chunk: vocabulary entries per step of the hidden-state form.

    Returns:
        [E] in the order of `forest.edges`, float32, or float64 for float64 input. Differentiable once.

    Raises:
        ForestError: `x` does not have one row per token of the forest, lies on another device, or has too
            small a vocabulary for the forest's tokens.
        InputError: an argument is out of range or does not fit the form.
        UnsupportedError: `treefx.use` of the forest saw no run of a compiled model.

    Example:
        >>> logp = edge_logprobs(out.logits, forest)
        >>> logp = edge_logprobs(hidden, forest, weight=model.lm_head.weight)
    """
    _check_temperature(temperature)
    rows = _read_rows(x, forest)
    if weight is None:
        _check_no_head(bias, softcap)
        _check_vocabulary(rows.shape[1], forest)
        edges = forest.edges
        logp = _LogitsLogprobs.apply(rows, edges.source, edges.token, temperature)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, logp)
    _check_head(rows, weight, bias, softcap, chunk)
    _check_vocabulary(weight.shape[0], forest)
    return _hidden_logprobs(rows, forest, weight, bias, _Head(1.0 / temperature, softcap, chunk))


def edge_entropy(
    x: torch.Tensor,
    forest: Forest,
    temperature: float = 1.0,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the entropy in nats of the distribution at every edge's source.

    With p = softmax(z / T) and z the logits at the edge's source, H = -sum_v p_v log p_v.

    Args:
        x: as in `edge_logprobs`.
        forest: the forest whose packed row the model ran on.
        temperature: T above, greater than 0.
        weight: LM-head weight [V, H]; logits are then computed for some rows at a time, and again in the backward.
        bias: LM-head bias [V].
        softcap: final logit cap.

    Returns:
        [E] in the order of `forest.edges`, float32, or float64 for float64 input. Differentiable once.

    Raises:
        ForestError: `x` does not have one row per token of the forest, or lies on another device.
        InputError: an argument is out of range or does not fit the form.

    Example:
        >>> bonus = treefx.losses.entropy(edge_entropy(out.logits, forest), forest)
    """
    _check_temperature(temperature)
    rows = _read_rows(x, forest)
    sources, slot = torch.unique(forest.edges.source, return_inverse=True)
    if weight is None:
        _check_no_head(bias, softcap)
        entropies = [_LogitsEntropy.apply(rows, sources, temperature)]  # type: ignore[no-untyped-call]
    else:
        _check_head(rows, weight, bias, softcap, 1)
        given = (weight, bias, softcap, temperature)
        chunks = torch.split(rows.index_select(0, sources), _ROWS_PER_CHUNK)
        entropies = [checkpoint(_hidden_entropy, chunk, *given, use_reentrant=False) for chunk in chunks]
    return torch.cat(entropies)[slot]


def _check_temperature(temperature: float) -> None:
    if isinstance(temperature, torch.Tensor) and temperature.requires_grad:
        raise InputError("temperature gets no gradient; divide the logits by it, and leave temperature at 1")
    if isinstance(temperature, torch.Tensor) and temperature.numel() != 1:
        raise InputError(f"temperature must be one number greater than 0, got shape {list(temperature.shape)}")
    check_number(temperature, "temperature", "greater than 0", above=0)


def _check_no_head(bias: torch.Tensor | None, softcap: float | None) -> None:
    if bias is not None or softcap is not None:
        raise InputError("bias and softcap belong to the hidden-state form; pass weight=, or apply them to the logits")


def _read_rows(x: torch.Tensor, forest: Forest) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise InputError(f"expected a tensor of logits or hidden states, got {type(x).__name__}; pass out.logits")
    if not isinstance(forest, Forest):
        raise ForestError(f"expected the Forest that the model ran on, got {type(forest).__name__}")
    rows = x[0] if x.ndim == 3 and x.shape[0] == 1 else x
    if rows.ndim != 2 or rows.shape[0] != forest.num_tokens:
        raise ForestError(
            f"expected logits or hidden states [1, N, ...] or [N, ...] with N = {forest.num_tokens} tokens, "
            f"got {list(x.shape)}; run the model on this forest's model_inputs() inside treefx.use(forest)"
        )
    if rows.device != forest.device:
        raise ForestError(f"logits are on {rows.device}, the forest on {forest.device}; use forest.to(...)")
    if not rows.is_floating_point():
        raise InputError(f"expected floating-point logits or hidden states, got {rows.dtype}")
    check_run(forest)
    return rows


def _check_vocabulary(size: int, forest: Forest) -> None:
    if forest.max_edge_token >= size:
        raise ForestError(
            f"the forest has token {forest.max_edge_token}, but the vocabulary has only {size} entries; "
            "were the rows made by the model's own tokenizer?"
        )


def _check_head(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, chunk: int
) -> None:
    if weight.ndim != 2 or weight.shape[1] != rows.shape[1]:
        raise InputError(f"weight must be [V, H] with H = {rows.shape[1]}, got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias must be [V] with V = {weight.shape[0]}, got {list(bias.shape)}")
    if softcap is not None:
        check_number(softcap, "softcap", "greater than 0 or None", above=0)
    check_whole(chunk, "chunk", least=1)
    given = [rows] + [tensor for tensor in (weight, bias) if tensor is not None]
    if len({tensor.dtype for tensor in given}) > 1 and not torch.is_autocast_enabled(rows.device.type):
        kinds = ", ".join(str(tensor.dtype) for tensor in given)
        raise InputError(f"hidden states, weight and bias must have one dtype, got {kinds}: convert them, or autocast")


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _LogitsLogprobs(torch.autograd.Function):
    """Compute edge log-probabilities of given logits.

    Saves the logits, which the caller holds, and a number per source.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, source: torch.Tensor, token: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        ctx.temperature, ctx.fused = temperature, logits.is_cuda and runs_fused(logits, None)
        if ctx.fused:
            return _forward_on_device(ctx, logits, source, token)
        dtype = _accumulate_dtype(logits.dtype)
        rows, slot = torch.unique(source, return_inverse=True)
        lse = torch.empty(len(rows), dtype=dtype, device=logits.device)
        for part, out in zip(torch.split(rows, _ROWS_PER_CHUNK), torch.split(lse, _ROWS_PER_CHUNK), strict=True):
            torch.logsumexp(logits[part].to(dtype).div_(temperature), dim=1, out=out)
        ctx.save_for_backward(logits, source, token, rows, slot, lse)
        return logits[source, token].to(dtype) / temperature - lse[slot]

    @staticmethod
    @once_differentiable("treefx.edge_logprobs")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.fused:
            return _backward_on_device(ctx, grad), None, None, None
        logits, source, token, rows, slot, lse = ctx.saved_tensors
        grad = grad.to(lse.dtype) / ctx.temperature
        total = torch.zeros_like(lse).index_add_(0, slot, grad)
        grad_logits = torch.zeros_like(logits)
        for part, size, bound in zip(*(torch.split(t, _ROWS_PER_CHUNK) for t in (rows, total, lse)), strict=True):
            probs = logits[part].to(lse.dtype).div_(ctx.temperature).sub_(bound[:, None]).exp_()
            grad_logits[part] = probs.mul_(-size[:, None]).to(logits.dtype)
            del probs  # or it is there while the next chunk is made
        # Edges to one token of one row of logits are added up: siblings that are known by their nodes may have equal
        # tokens. Writing the finished value rounds once; adding to the rounded one would round twice.
        place, twin = torch.unique(source * logits.shape[1] + token, return_inverse=True)
        own = torch.zeros(len(place), dtype=grad.dtype, device=grad.device).index_add_(0, twin, grad)
        probs = (logits[source, token].to(lse.dtype) / ctx.temperature - lse[slot]).exp()
        grad_logits[source, token] = (own[twin] - probs * total[slot]).to(logits.dtype)
        return grad_logits, None, None, None


def _forward_on_device(ctx: Any, logits: torch.Tensor, source: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Run the Triton kernels of fused LM heads on given logits.

    They use 2 bytes per logit and do not synchronize.
    """
    from treefx.kernels.head_loss import fused

    dense = logits if logits.stride(1) == 1 else logits.contiguous()
    loss, lse = fused.forward_of_logits(dense, source, token, 1 / float(ctx.temperature))
    ctx.save_for_backward(dense, source, token, loss, lse)
    return -loss


def _backward_on_device(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    from treefx.kernels.head_loss import fused

    logits, source, token, loss, lse = ctx.saved_tensors
    return fused.backward_of_logits(logits, source, token, 1 / float(ctx.temperature), -grad, loss, lse)


class _LogitsEntropy(torch.autograd.Function):
    """Compute entropies of some rows of given logits.

    Saves the logits, which the caller holds, and two numbers per row.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
        dtype = _accumulate_dtype(logits.dtype)
        lse, entropy = torch.empty(2, len(rows), dtype=dtype, device=logits.device)
        for part, bound, out in zip(*(torch.split(t, _ROWS_PER_CHUNK) for t in (rows, lse, entropy)), strict=True):
            scaled = logits[part].to(dtype).div_(temperature)
            torch.logsumexp(scaled, dim=1, out=bound)
            torch.sum(torch.special.entr(scaled.sub_(bound[:, None]).exp_()), dim=1, out=out)
        ctx.save_for_backward(logits, rows, lse, entropy)
        ctx.temperature = temperature
        return cast(torch.Tensor, entropy)

    @staticmethod
    @once_differentiable("treefx.edge_entropy")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, rows, lse, entropy = ctx.saved_tensors
        grad = grad.to(lse.dtype) / ctx.temperature
        grad_logits = torch.zeros_like(logits)
        parts = (torch.split(t, _ROWS_PER_CHUNK) for t in (rows, lse, entropy, grad))
        for part, bound, value, size in zip(*parts, strict=True):
            # dH / dz_v = -p_v (log p_v + H) / T = (entr(p_v) - p_v H) / T, and 0 where p_v is.
            probs = logits[part].to(lse.dtype).div_(ctx.temperature).sub_(bound[:, None]).exp_()
            slope = torch.special.entr(probs).sub_(probs.mul_(value[:, None]))
            grad_logits[part] = slope.mul_(size[:, None]).to(logits.dtype)
            del probs, slope
        return grad_logits, None, None


def _hidden_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    temperature: float,
) -> torch.Tensor:
    """Compute entropies of a few rows of hidden states.

    Under ambient autocast, the linear layer rounds as the model's does.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(_accumulate_dtype(logits.dtype))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    rows = torch.arange(len(logits), device=logits.device)
    return cast(torch.Tensor, _LogitsEntropy.apply(logits, rows, temperature))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Head:
    """Compute logits from hidden states: z = scale * cap(h W^T + b), in chunks.

    A chunk has `chunk` entries of the vocabulary.
    """

    scale: float
    softcap: float | None
    chunk: int


def _hidden_logprobs(
    rows: torch.Tensor, forest: Forest, weight: torch.Tensor, bias: torch.Tensor | None, head: _Head
) -> torch.Tensor:
    """Gather the source rows, apply ambient autocast, and run the fused head operator.

    On devices all rows: the host would wait for the number of sources, and most tokens are one.
    """
    # The passes load torch.fx and more: only this form needs them.
    from treefx.passes.packing.vocab_tail import surprise

    edges = forest.edges
    hidden, slot, kind = rows, edges.source, rows.device.type
    if kind == "cpu":
        sources, slot = torch.unique(edges.source, return_inverse=True)
        hidden = rows.index_select(0, sources)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        losses: torch.Tensor
        losses, _ = surprise(hidden, weight, bias, slot, edges.token, head.scale, head.softcap, head.chunk)
    return -losses
