"""Recorded expert routes of rows, and how engines hand them to Megatron's routers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.trainers.megatron import engine

__all__ = [
    "REPLAYED",
    "distinct",
    "draw",
    "filled",
    "hand_out",
    "model",
    "packed",
    "padded",
    "routers",
    "separately",
    "set_action",
]

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
REPLAYED: dict[str, Any] = {**engine.EXPERTS, "num_layers": LAYERS, "moe_enable_routing_replay": True}


def model(**options: Any) -> Any:
    """A model whose routers replay, the only one that Megatron knows of."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    return engine.model(**{**REPLAYED, **options})


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "router_replay", None) is not None]


def draw(rows: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Routes [T, layers, k] of every row: those of its prefixes, and other experts at a column of the second."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[tuple[int, ...], Tensor] = {}

    def of(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in known:
            chosen = [torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(LAYERS)]
            known[prefix] = torch.stack(chosen)
        return known[prefix]

    routes = [torch.stack([of(tuple(row[: t + 1].tolist())) for t in range(len(row))]) for row in rows]
    routes[1][3, 1] = (routes[1][3, 1] + 1) % EXPERTS
    return routes


def distinct(rows: Sequence[Tensor], routes: Sequence[Tensor]) -> int:
    """The distinct prefixes of (id, routes), by listing them all."""
    pairs = zip(rows, routes, strict=True)
    tokens = [list(zip(row.tolist(), map(str, given.tolist()), strict=True)) for row, given in pairs]
    return len({tuple(row[: t + 1]) for row in tokens for t in range(len(row))})


def set_action(name: str | None) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    if name is None:
        RouterReplay.clear_global_router_replay_action()
    else:
        RouterReplay.set_global_router_replay_action(RouterReplayAction(name))


def hand_out(routes: Tensor, rank: int = 0, ranks: int = 1) -> None:
    """Give each router its own of routes [T, B, layers, k], a rank of sequence parallelism its part of them."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    own = routes.chunk(ranks)[rank]
    RouterReplay.set_replay_data([own[:, :, i].flatten(0, 1) for i in range(LAYERS)])
    set_action("replay_forward")


def filled(routes: Sequence[Tensor], length: int) -> list[Tensor]:
    """Up to a length with experts 0 to k."""
    filler = torch.arange(CHOSEN).expand(LAYERS, CHOSEN)
    return [torch.cat([x, filler.expand(length - len(x), -1, -1)]) for x in routes]


def separately(
    model: Any, rows: Sequence[Tensor], routes: Sequence[Tensor], rank: int = 0, ranks: int = 1
) -> engine.Outcome:
    """Each row in a call with its routes, padded to a multiple of the ranks."""
    losses = []
    for row, given in zip(rows, routes, strict=True):
        even = F.pad(row, (0, -len(row) % ranks))
        hand_out(filled([given], len(even))[0][:, None], rank, ranks)
        losses.append(engine.nll(model(even[None], torch.arange(len(even))[None], None)[0], row))
    return engine.gradients(model, torch.stack(losses).sum())


def packed(
    model: Any, rows: Sequence[Tensor], routes: Sequence[Tensor], rank: int = 0, ranks: int = 1
) -> engine.Outcome:
    """All rows as sequences of one, padded to even lengths."""
    even = [filled([x], len(x) + len(x) % 2)[0] for x in routes]
    hand_out(torch.cat(even)[:, None], rank, ranks)
    set_backward(model)
    return engine.packed(model, rows, 2)


def padded(model: Any, rows: Sequence[Tensor], routes: Sequence[Tensor]) -> engine.Outcome:
    """All rows in a batch, padded on the right."""
    hand_out(torch.stack(filled(routes, max(map(len, rows))), 1))
    set_backward(model)
    return engine.padded(model, rows)


def set_backward(model: Any) -> None:
    """Replay in the backward what layers that are recomputed took in the forward, as verl does between the two."""
    if model.config.recompute_granularity == "full":
        model.output_layer.register_full_backward_pre_hook(_before_backward)


def _before_backward(module: Any, grads: Any) -> None:
    set_action("replay_backward")
