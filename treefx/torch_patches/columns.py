"""How many columns the packed row of the forest in use has, which Dynamo takes for a symbol."""

from contextvars import ContextVar

__all__ = ["COLUMNS_IN_USE"]

COLUMNS_IN_USE: ContextVar[int | None] = ContextVar("treefx_columns", default=None)
"""Set by ``treefx.use``; None outside of it."""
