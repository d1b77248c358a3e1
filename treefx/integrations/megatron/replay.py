"""Routers that replay or record the experts of each position: recorded routes tell tokens apart, as ids do.

Megatron's ``RouterReplay`` (``moe_enable_routing_replay``), and verl's class of that name, hold the experts that the
rollout engine chose, ``[T * B, k]`` per router, sequence first. Two rows share a token only up to the first position
where any router's routes differ. A router then gets the routes of the distinct tokens, and what it records is expanded
to positions::

    target [T * B, k] --first copies--> [N, k] --routing--> recorded [N, k] --expand--> [T * B, k]

Routers that count their tokens (`routers.RowRouting`) read and record rows anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from treefx.errors import UnsupportedError
from treefx.integrations.megatron.head import across_ranks
from treefx.integrations.megatron.routers import Routing, same
from treefx.integrations.megatron.tree import Tree
from treefx.passes.labels.facts import Axis, Factor
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.token_bits import number_tokens

__all__ = ["ReplayedRouting", "replays", "routes_to_replay"]

_RECORD, _FORWARD, _BACKWARD = "record", "replay_forward", "replay_backward"
_FIELDS = ("target_topk_idx", "recorded_topk_idx")
_SEQUENCE_FIRST = (Factor(Axis.TOKEN, -1),), (Factor(Axis.ROW, -1),), (Factor(Axis.PLAIN, -1),)


def replays(router: Any) -> bool:
    """Whether a router was built to replay or record routes."""
    return getattr(router, "router_replay", None) is not None


def routes_to_replay(routers: Sequence[Any], shape: torch.Size, is_split: bool) -> Tensor | Reason | None:
    """Return numbers [B, T] that are equal iff the routes of two positions are.

    Args:
        routers: Those that replay or record.
        shape: B and T.
        is_split: Whether positions are split over tensor-parallel ranks.

    Returns:
        int64 [B, T], None if no router replays, or why the call runs as it came.
    """
    strange = next((name for router in routers for name in _unknown(router.router_replay)), None)
    if strange is not None:
        return Reason(Cause.INPUT, f"router replay holds {strange!r}, of which nothing is known on a tree")
    found = [routes for routes in map(_given, routers) if routes is not None]
    if not found:
        return None
    gather = across_ranks()[0] if is_split else same
    planes = [gather(routes) for routes in found]
    rows, columns = shape
    wrong = next((x for x in planes if x.dim() != 2 or len(x) != rows * columns), None)
    if wrong is not None:
        text = f"routers replay routes {list(wrong.shape)}, not of the {rows * columns} positions of the call"
        return Reason(Cause.INPUT, text)
    together = torch.cat([x.to(torch.int64) for x in planes], 1)
    return number_tokens(together.view(columns, rows, -1), _SEQUENCE_FIRST)


def _unknown(replay: Any) -> list[str]:
    """Return further tensors, as a mask of positions that are replayed in other versions."""
    return [name for name, x in vars(replay).items() if isinstance(x, Tensor) and name not in _FIELDS]


def _given(router: Any) -> Tensor | None:
    """The routes that a router takes next; None if it chooses them."""
    replay, action = router.router_replay, _action(router.router_replay)
    if action == _FORWARD:
        return _as_tensor(replay.target_topk_idx)
    return _as_tensor(replay.replay_backward_list[0]) if action == _BACKWARD and replay.replay_backward_list else None


def _as_tensor(routes: Any) -> Tensor | None:
    return routes if isinstance(routes, Tensor) else None


def _action(replay: Any) -> str | None:
    found = replay.router_replay_action
    return getattr(found, "value", None)


class ReplayedRouting(Routing):
    """Stands for the ``routing`` of a router that replays or records, and computes token by token."""

    def __call__(self, logits: Tensor, padding_mask: Tensor | None = None, **others: Any) -> tuple[Tensor, Tensor]:
        tree = self.trees.now
        with nullcontext() if tree is None else self._on_tokens(tree):
            found: tuple[Tensor, Tensor] = self.own_routing(logits, padding_mask=padding_mask, **others)
        return found

    @contextmanager
    def _on_tokens(self, tree: Tree) -> Iterator[None]:
        """Hold the routes of distinct tokens where the router looks for those of positions."""
        replay, action = self.router.router_replay, _action(self.router.router_replay)
        gather, scatter = across_ranks() if self.is_split else (same, same)
        target, before = replay.target_topk_idx, replay.recorded_topk_idx
        routes = _given(self.router)
        if routes is not None:
            of_tokens = scatter(_of_positions(gather(routes), tree)[tree.first_N.to(routes.device)])
            if action == _FORWARD:
                replay.target_topk_idx = of_tokens
            else:
                replay.replay_backward_list[0] = of_tokens  # which the router takes off
        try:
            yield
        finally:
            replay.target_topk_idx = target
        recorded = replay.recorded_topk_idx
        if action == _RECORD and recorded is not None and recorded is not before:  # fused routing records nothing
            token = tree.token_TB.reshape(-1).clamp(min=0)
            replay.recorded_topk_idx = scatter(gather(recorded)[token])


def _of_positions(routes: Tensor, tree: Tree) -> Tensor:
    if len(routes) != tree.token_TB.numel():
        raise UnsupportedError(
            f"expected replayed routes of the {tree.token_TB.numel()} positions of the call that a layer computes or "
            f"recomputes, got {len(routes)}; hand out routes (set_replay_data) once per micro-batch, before its call"
        )
    return routes
