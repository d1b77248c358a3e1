"""Batch inner siblings into one part: one call for several, all held together.

Where many small trees hang on one part, and each is too large to run whole with the parts above, their upper pieces are
parts of the same shape. Together they are one call, and their subtrees can be merged across them
(`treefx.planning.search.merge`), but less of it at a time. Which number pays is left to the predicted time of the
plans.
"""

from collections.abc import Sequence

from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.draft import Draft, demand_of, held_bytes, in_order
from treefx.planning.search.merge import joined_size

__all__ = ["batch_siblings"]


def batch_siblings(roots: Sequence[Draft], cost: CostModel, budget: float, many: int) -> list[Draft]:
    """Put inner siblings that keep the same together, wherever everything below still fits.

    Args:
        roots: the topmost parts; left as they are but for their demand.
        cost: of the model.
        budget: bytes that parts may use.
        many: the most siblings that become one part.

    Returns:
        New topmost parts.
    """
    for draft, _ in reversed(list(in_order(roots))):
        if not draft.demand:  # else known from another size of groups
            draft.demand = demand_of(cost, draft.size, draft.keep, draft.children)
    result: list[Draft] = []
    waiting: list[tuple[Sequence[Draft], float, int, list[Draft]]] = [(roots, budget, 0, result)]
    while waiting:
        siblings, room, most_above, target = waiting.pop()
        for group in _groups(siblings, cost, (room, most_above, many)):
            size = _together(group, most_above)
            above = {draft.above for draft in group}
            ranges = [span for draft in group for span in draft.ranges]
            made = Draft(ranges, size, group[0].keep, above.pop() if len(above) == 1 else None)
            target.append(made)
            below = [child for draft in group for child in draft.children]
            if below:
                inside = room - held_bytes(cost, size, made.keep)
                waiting.append((below, inside, size.boundary + size.tokens, made.children))
    return result


def _groups(siblings: Sequence[Draft], cost: CostModel, limits: tuple[float, int, int]) -> list[list[Draft]]:
    """Leaves alone, inner siblings with those that follow them."""
    room, most_above, many = limits
    groups: list[list[Draft]] = []
    for draft in siblings:
        last = groups[-1] if groups else []
        together = [*last, draft]
        if last and last[0].children and draft.children and last[0].keep == draft.keep and len(last) < many:
            below = [child for inner in together for child in inner.children]
            if demand_of(cost, _together(together, most_above), draft.keep, below) <= room:
                groups[-1] = together
                continue
        groups.append([draft])
    return groups


def _together(group: Sequence[Draft], most_above: int) -> Size:
    size = group[0].size
    for draft in group[1:]:
        same = draft.above is not None and draft.above == group[0].above
        size = joined_size(size, draft.size, boundary=size.boundary if same else most_above)
    return size
