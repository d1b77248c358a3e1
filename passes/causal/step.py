"""Register laws of the causal domain, and align operands for one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from treefx.passes.causal.domain import Step, one_row
from treefx.passes.causal.state import RowDigit, State, States, Unknown

__all__ = ["LAWS", "CausalLaw", "along", "law", "of_rank", "same_rows", "shifted", "with_dim"]

CausalLaw = Callable[[Step], States]
LAWS: dict[Any, CausalLaw] = {}
"""By operator overload."""


def law(*packets: Any) -> Callable[[CausalLaw], CausalLaw]:
    """Register a function as the law of all overloads of the given operators."""

    def register(function: CausalLaw) -> CausalLaw:
        for packet in packets:
            LAWS.update({getattr(packet, name): function for name in packet.overloads()})
        return function

    return register


def along(given: Any, rank: int, row: RowDigit | None) -> int:
    """A dimension that an operator works along, which must not hold the rows.

    Raises:
        Unknown: It does.
    """
    dim = int(given) % rank
    if row is not None and dim == row.dim:
        raise Unknown
    return dim


def shifted(row: RowDigit | None, by: int) -> RowDigit | None:
    """The rows after ``by`` dimensions came before theirs."""
    return None if row is None else RowDigit(row.dim + by, row.inner)


def with_dim(state: State, given: int) -> State:
    """``unsqueeze``."""
    dim = given % (state.rank + 1)
    row = state.row if state.row is None or state.row.dim < dim else shifted(state.row, 1)
    return state.mapped(lambda table: table.unsqueeze(dim), [*state.shape[:dim], 1, *state.shape[dim:]], row)


def same_rows(step: Step, nodes: Sequence[fx.Node]) -> list[State]:
    """States of operands of one rank, each for one row."""
    states = [step.state(node) for node in nodes]
    found = next((state for state in states if state.row is not None), None)
    if found is None or found.row is None:
        return states
    offset = found.rank - found.row.dim
    return [one_row(step, node, offset, found.row.inner) for node in nodes]


def of_rank(state: State, rank: int) -> State:
    """Dimensions of size one in front until there are ``rank``."""
    new = rank - state.rank
    if new == 0:
        return state
    ones = [1] * new
    row = shifted(state.row, new)
    return state.mapped(lambda table: table.reshape([*ones, *table.shape]), [*ones, *state.shape], row)
