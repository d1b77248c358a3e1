"""Linear recurrences along the paths of a forest, in chunks: Mamba 2 (SSD) and the gated delta rule.

Per head, with the state S [D, E] of a token taken from its parent::

    SSD           S = exp(g) S_parent + k v^T                                    o = S^T q
    delta rule    S = exp(g) S_parent + k (beta (v - exp(g) S_parent^T k))^T     o = S^T q

Within a chunk both are products of [L, L] matrices (Dao and Gu 2024; the WY form of Yang et al. 2024, one triangular
solve more); between chunks only the state at a chunk's end is passed on. At a fork the chunks of all children read the
state of one parent, and the gradients of their reads add up.
"""

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.kernels.tree_chunks import Level, plan_levels

__all__ = ["tree_delta_rule", "tree_ssd"]


def tree_ssd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, parent: Tensor, subtree_end: Tensor, chunk: int = 64
) -> Tensor:
    """The state space recurrence of Mamba 2 along every path.

    Args:
        q: what reads the state (C of Mamba 2) ``[N, H, D]``.
        k: what writes it (B) ``[N, H, D]``.
        v: what is written (x times its step) ``[N, H, E]``.
        g: logarithm of the decay, at most 0, ``[N, H]``.
        parent: int64 ``[N]``, -1 at roots.
        subtree_end: int ``[N]``, exclusive end of each token's subtree in packed order.
        chunk: tokens per chunk.

    Returns:
        ``[N, H, E]``, differentiable in q, k, v and g.

    Raises:
        InputError: a shape does not fit.
    """
    return _scan(q, k, v, g, None, plan_levels(_checked(q, k, v, g, parent), subtree_end, chunk))


def tree_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parent: Tensor, subtree_end: Tensor, chunk: int = 64
) -> Tensor:
    """The gated delta rule along every path; ``beta`` is the step ``[N, H]``, the rest as in :func:`tree_ssd`."""
    if beta.shape != g.shape:
        raise InputError(f"tree_delta_rule expected beta of shape {list(g.shape)} as g, got {list(beta.shape)}")
    return _scan(q, k, v, g, beta, plan_levels(_checked(q, k, v, g, parent), subtree_end, chunk))


def _checked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, parent: Tensor) -> Tensor:
    tokens, heads = parent.shape[0], g.shape[-1]
    fits = q.shape == k.shape and v.dim() == q.dim() == 3 and g.shape == (tokens, heads)
    if not fits or q.shape[:2] != (tokens, heads) or v.shape[:2] != (tokens, heads):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v), ("g", g)))
        raise InputError(f"expected q and k [N, H, D], v [N, H, E], g [N, H] for N = {tokens} tokens, got {shapes}")
    return parent


def _scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, levels: list[Level]) -> Tensor:
    padded = [torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (q, k, v, g)]
    padded += [] if beta is None else [torch.cat([beta, beta.new_zeros(1, beta.shape[1])])]
    state: Tensor | None = None
    outputs, places = [], []
    for level in levels:
        inputs = [x[level.tokens].transpose(1, 2) for x in padded]  # [C, H, L, ...]
        incoming = None if state is None else state.index_select(0, level.parent)
        out, state = _chunk(inputs[0], inputs[1], inputs[2], inputs[3], None if beta is None else inputs[4], incoming)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        places.append(level.tokens.flatten())
    if not outputs:
        return v.new_zeros(v.shape)
    place = torch.cat(places)
    position = torch.empty_like(padded[3][:, 0], dtype=torch.int64)
    position[place] = torch.arange(len(place), device=place.device)
    return torch.cat(outputs).index_select(0, position[:-1])


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [C, H, L, E] and outgoing states [C, H, D, E] of chunks; padded tokens write and decay nothing."""
    total = g.cumsum(-1)
    length = g.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=g.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    if beta is not None:
        v = _corrected(k, v, total, beta, decay, state)
    out = (q @ k.mT * decay) @ v
    last = total[..., -1:]
    outgoing = (k * (last - total).exp()[..., None]).mT @ v
    if state is None:
        return out, outgoing
    out = out + (q * total.exp()[..., None]) @ state
    return out, outgoing + last.exp()[..., None] * state


def _corrected(k: Tensor, v: Tensor, total: Tensor, beta: Tensor, decay: Tensor, state: Tensor | None) -> Tensor:
    """What the delta rule writes: (I + tril(beta k k^T decay, -1))^-1 beta (v - exp(total) S^T k)."""
    read = v if state is None else v - (k * total.exp()[..., None]) @ state
    written = beta[..., None] * read
    mixing = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    corrected: Tensor = torch.linalg.solve_triangular(mixing, written, upper=False, unitriangular=True)
    return corrected
