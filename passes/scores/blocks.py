"""Find blocks of tokens that see each other in a causal model.

Examples are the patches of an image, and the prompt of a prefix LM.

The mask of such a model is ``causal | block``, where ``block`` compares a number of the query's token with that of the
key's. A lifted score shows it in the *future*, where the key comes after the query: its conditions simplify there to
``number[query] == number[key]``, and to conditions on one of both tokens::

    mask[q, k] = (k <= q) | ((block[q] == block[k]) & (block[q] >= 0))    ->    blocks: block >= 0, equal block

``treefx.runtime.blocks`` checks in every call that tokens of equal numbers are one run of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treefx.kernels.score import Expr
from treefx.passes.labels.facts import Kind, fact_of
from treefx.passes.labels.purity import impurity
from treefx.passes.scores.score_algebra import Tables, conjuncts, simplify, split_mask

__all__ = ["Blocks", "find_blocks"]


@dataclass(frozen=True)
class Blocks:
    """Hold the conditions under which a query sees a later key.

    Both have equal numbers, the query meets all of ``of_queries``, and the key meets all of ``of_keys``.

    All expressions are functions of the inputs at one token, written with ``("ck",)`` as its column.
    """

    numbers: tuple[Expr, ...]
    of_queries: tuple[Expr, ...]
    of_keys: tuple[Expr, ...]

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """Return all expressions that decide where blocks are."""
        return (*self.numbers, *self.of_queries, *self.of_keys)


def find_blocks(
    score: Expr, value: Expr, conditions: Iterable[Expr], tables: Tables
) -> tuple[Blocks, list[tuple[Expr, Expr]]] | None:
    """Find the blocks of a score that does not mask all later keys, or None.

    Args:
        score: The lifted score.
        value: Its value in the past, where all ``conditions`` hold. Both must be those of a block too.
        conditions: The conditions of ``value``.
        tables: Known properties of the values that the score loads.

    Returns:
        The blocks; and each condition under which a query sees a later key, with the score where it does not hold. None
        if the score has another form.
    """
    later, found = split_mask(simplify(score, tables, "future"), tables)
    asked = [item for condition, _ in found for item in conjuncts(condition)]
    past = [item for condition in conditions for item in conjuncts(condition)]
    staying = [part for item in past for part in conjuncts(simplify(item, tables, "future")) if part != ("const", True)]
    if later != value or not {*asked} - {*past} or not {*staying} <= {*asked}:
        return None
    numbers, of_queries, of_keys = [], [], []
    for item in asked:
        if _reads(item, "ck"):
            of_keys.append(item)
        elif _reads(item, "cq"):
            of_queries.append(_of_key(item))
        elif item[0] == "eq" and _compares_one_number(item[1:]):
            numbers.append(_of_key(item[1]))
        else:
            return None
    return Blocks(*(tuple(dict.fromkeys(items)) for items in (numbers, of_queries, of_keys))), found


def _compares_one_number(sides: Sequence[Expr]) -> bool:
    """Return True if a comparison has one function of the query's token and of the key's."""
    own = any(_reads(sides[i], "cq") and _reads(sides[1 - i], "ck") for i in (0, 1))
    return own and _of_key(sides[0]) == _of_key(sides[1])


def _reads(expr: Expr, column: str) -> bool:
    """Return True if an expression reads inputs at one column's token, not the column itself."""
    if expr[0] != "load":
        items = [item for item in expr[1:] if isinstance(item, tuple)]
        kinds = [_reads(item, column) for item in items if item[0] != "const"]
        return expr[0] not in ("dot", "head", "b", "cq", "ck") and bool(kinds) and all(kinds)
    _, node, *indices = expr
    wanted = {Kind.PREFIX: [(column,)], Kind.ROW: [("b",), (column,)]}.get(fact_of(node).kind)
    return indices == wanted and impurity(node) is None


def _of_key(expr: Expr) -> Expr:
    """Replace the query's column by the key's."""
    if expr == ("cq",):
        return ("ck",)
    return (expr[0], *[_of_key(item) if isinstance(item, tuple) else item for item in expr[1:]])
