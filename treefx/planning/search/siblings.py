"""Batch inner siblings into one part: one call for several, all held together.

Where many small trees hang on one part, and each is too large to run whole with the parts above, their upper pieces are
parts of the same shape. Together they are one call, and their subtrees can be merged across them
(`treefx.planning.search.merge`), but less of it at a time. The predicted time of the plans decides the number.
"""

from collections.abc import Sequence

from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.draft import Draft, demand_of, held_bytes
from treefx.planning.search.merge import joined_size
from treefx.planning.search.outlook import Outlook

__all__ = ["batch_siblings"]


def batch_siblings(
    roots: Sequence[Draft], cost: CostModel, budget: float, many: int, outlook: Outlook | None = None
) -> list[Draft]:
    """Merge inner siblings of the same mode where everything below still fits.

    Args:
        roots: the topmost parts; only their demand changes.
        cost: of the model.
        budget: bytes that parts may use.
        many: the most siblings that become one part.
        outlook: of these parts, where it is known.

    Returns:
        New topmost parts.
    """
    outlook = outlook or Outlook.of(roots, cost, budget)
    apart = {id(draft) for draft, may in zip(outlook.drafts, outlook.may_batch.tolist(), strict=True) if not may}
    for draft, demand in zip(outlook.drafts, outlook.demand.tolist(), strict=True):
        draft.demand = demand
    result: list[Draft] = []
    waiting: list[tuple[Sequence[Draft], float, int, list[Draft], bool]] = [(roots, budget, 0, result, many < 2)]
    while waiting:
        siblings, room, most_above, target, is_apart = waiting.pop()
        groups = ((draft,) for draft in siblings) if is_apart else _groups(siblings, cost, (room, most_above, many))
        for group in groups:
            first = group[0]
            size = first.size if len(group) == 1 else _together(group, most_above)
            made = Draft([span for draft in group for span in draft.ranges], size, first.keep, first.above)
            target.append(made)
            below: Sequence[Draft] = first.children
            if len(group) > 1:
                made.above = first.above if all(draft.above == first.above for draft in group) else None
                below = [child for draft in group for child in draft.children]
            if below:
                inside = room - held_bytes(cost, size, made.keep)
                stays = many < 2 or (len(group) == 1 and id(first) in apart)
                waiting.append((below, inside, size.boundary + size.tokens, made.children, stays))
    return result


def _groups(siblings: Sequence[Draft], cost: CostModel, limits: tuple[float, int, int]) -> list[list[Draft]]:
    """Group inner siblings with the following ones; leaves stay alone."""
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
