"""Merge parts without recomputation: siblings together, chains and leaves into parents.

Every step keeps `held above + demand <= budget` at the part it changes, so that no part above or below has to be
checked again (see `treefx.planning.search.draft.demand_of`).
"""

from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.draft import Draft, demand_of, held_bytes, peak_bytes
from treefx.planning.search.outlook import Outlook

__all__ = ["joined_size", "merge_parts"]

_OPEN_GROUPS = 8


def merge_parts(roots: list[Draft], cost: CostModel, budget: float, outlook: Outlook | None = None) -> list[Draft]:
    """Merge drafts that fit into fewer ones that fit.

    Args:
        roots: the topmost parts; changed in place.
        cost: of the model.
        budget: bytes that parts may use.
        outlook: of these parts, where it is known.

    Returns:
        The topmost parts.
    """
    outlook = outlook or Outlook.of(roots, cost, budget)
    rooms, demands, may_merge = outlook.room.tolist(), outlook.demand.tolist(), outlook.may_merge.tolist()
    is_changed = [False] * (len(rooms) + 1)  # the last entry is a placeholder above the topmost parts
    for number in range(len(rooms) - 1, -1, -1):
        draft = outlook.drafts[number]
        draft.demand = demands[number]
        if may_merge[number]:
            _group_children(draft, cost, rooms[number])
            if _absorb_children(draft, cost, rooms[number]):
                _group_children(draft, cost, rooms[number])
            is_changed[number] = True
        if is_changed[number]:
            draft.demand = demand_of(cost, draft.size, draft.keep, draft.children)
            is_changed[outlook.parent[number]] = True
    return _group_leaves(roots, cost, budget, 0)


def _group_children(draft: Draft, cost: CostModel, room: float) -> None:
    inside = room - held_bytes(cost, draft.size, draft.keep)
    draft.children = _group_leaves(draft.children, cost, inside, draft.size.boundary + draft.size.tokens)


def _group_leaves(siblings: list[Draft], cost: CostModel, room: float, most_above: int) -> list[Draft]:
    """Merge parts without children, by first fit, the largest first.

    Args:
        siblings: parts with one parent, or all roots.
        cost: of the model.
        room: bytes the siblings may use.
        most_above: tokens above all siblings together.
    """
    leaves = [draft for draft in siblings if not draft.children]
    if len(leaves) < 2:
        return siblings
    leaves.sort(key=lambda draft: -draft.size.tokens)
    groups: list[Draft] = []
    open_groups: list[Draft] = []
    for draft in leaves:
        group = next((group for group in open_groups if _add(group, draft, cost, room, most_above)), None)
        if group is None:
            draft.demand = peak_bytes(cost, draft.size, "keep")
            groups.append(draft)
            open_groups = [*open_groups[-_OPEN_GROUPS + 1 :], draft]
        elif _peak_together(group, leaves[-1], cost, most_above) > room:
            open_groups.remove(group)
    return sorted([*(draft for draft in siblings if draft.children), *groups], key=lambda draft: min(draft.ranges))


def _peak_together(group: Draft, draft: Draft, cost: CostModel, most_above: int) -> float:
    return peak_bytes(cost, _size_together(group, draft, most_above), "keep")


def _size_together(group: Draft, draft: Draft, most_above: int) -> Size:
    same = group.above is not None and group.above == draft.above
    return joined_size(group.size, draft.size, boundary=group.size.boundary if same else most_above)


def _add(group: Draft, draft: Draft, cost: CostModel, room: float, most_above: int) -> bool:
    """Add a leaf to a group if both fit together."""
    peak = _peak_together(group, draft, cost, most_above)
    if peak > room:
        return False
    group.size, group.demand = _size_together(group, draft, most_above), peak
    group.above = group.above if group.above == draft.above else None
    group.ranges += draft.ranges
    return True


def _absorb_children(draft: Draft, cost: CostModel, room: float) -> bool:
    """Merge fitting children into the part, the smallest first; return True if any was."""
    any_taken = False
    for child in sorted(draft.children, key=lambda child: child.size.tokens):
        others = [other for other in draft.children if other is not child]
        # Recomputing a leaf with its parent would cost time; different modes cannot be one part.
        if draft.keep != (child.keep if child.children else "keep") and (child.children or others):
            continue
        below = others + child.children
        size = joined_size(draft.size, child.size, boundary=draft.size.boundary, closed=not below)
        demand = demand_of(cost, size, draft.keep if below else "keep", below)
        if demand > room:
            break
        draft.ranges += child.ranges
        draft.size, draft.keep, draft.children = size, draft.keep if below else "keep", below
        any_taken = True
    return any_taken


def joined_size(first: Size, second: Size, *, boundary: int, closed: bool = False) -> Size:
    """Add the sizes of two parts; `closed` means that the result has no children."""
    return Size(
        tokens=first.tokens + second.tokens,
        boundary=boundary,
        edges=first.edges + second.edges,
        outgoing=0 if closed else first.outgoing + second.outgoing,
        pairs=first.pairs + second.pairs,
    )
