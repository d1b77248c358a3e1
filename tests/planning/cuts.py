"""Plans made by hand: a forest cut at given tokens, siblings joined, modes as asked."""

import random
from collections.abc import Collection, Sequence
from typing import Any

import treefx
from treefx.planning.cost.model import Size
from treefx.planning.search.draft import Draft
from treefx.planning.search.layout import Layout, to_schedule
from treefx.planning.search.part import Keep
from treefx.planning.search.plan import Plan

__all__ = ["cut_at", "every_node", "inside_nodes", "random_cuts", "uncut"]

KEEPS: tuple[Keep, ...] = ("keep", "recompute", "offload")


def cut_at(
    forest: treefx.Forest, tokens: Collection[int], keeps: Sequence[Keep] = ("keep",), join: float = 0.0, seed: int = 0
) -> Plan:
    """Every one of `tokens` begins a part, as every root does.

    Args:
        forest: the forest.
        tokens: packed indices of the topmost tokens of parts.
        keeps: modes of parts with children, drawn at random.
        join: probability that a part joins the one before it that hangs on the same part.
        seed: of the random choices.
    """
    draw = random.Random(seed)
    drafts: list[Draft] = []
    of: dict[int, Draft] = {}
    latest: dict[int, Draft] = {}
    for token, above in enumerate(forest.parent.tolist()):
        if above >= 0 and token not in tokens:
            of[token] = of[above]
        else:
            owner = of.get(above)
            sibling = latest.get(id(owner))
            if sibling is not None and draw.random() < join:
                of[token] = sibling
            else:
                of[token] = latest[id(owner)] = Draft([], Size(0, 0, 0, 0, 0))
                (drafts if owner is None else owner.children).append(of[token])
        of[token].ranges.append((token, token + 1))
    for draft in of.values():
        if draft.children:
            draft.keep = draw.choice(list(keeps))
    nothing: Any = None
    return Plan(forest, to_schedule(Layout.of_drafts(drafts)), (), (), nothing, 0)


def uncut(forest: treefx.Forest) -> Plan:
    """Every tree is one part."""
    return cut_at(forest, ())


def every_node(forest: treefx.Forest, **options: Any) -> Plan:
    """A part per node."""
    return cut_at(forest, set(forest.nodes.start.tolist()), **options)


def inside_nodes(forest: treefx.Forest, **options: Any) -> Plan:
    """Cuts in the middle of every node, and nowhere else."""
    nodes = forest.nodes
    middles = [(a + b) // 2 for a, b in zip(nodes.start.tolist(), nodes.stop.tolist(), strict=True) if b - a > 1]
    return cut_at(forest, set(middles), **options)


def random_cuts(forest: treefx.Forest, seed: int, share: float = 0.3, **options: Any) -> Plan:
    """Each token begins a part with probability `share`; half of the siblings are joined."""
    draw = random.Random(seed)
    tokens = {token for token in range(forest.num_tokens) if draw.random() < share}
    return cut_at(forest, tokens, **{"join": 0.5, "keeps": KEEPS, "seed": seed, **options})
