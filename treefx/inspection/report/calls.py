"""The last calls of a model, one line each."""

from __future__ import annotations

from treefx.inspection.report.call_records import Call
from treefx.inspection.report.material import Material
from treefx.reason_codes import LITTLE_SHARING
from treefx.runtime.call_log import MOST_CALLS, LoggedCall

__all__ = ["account_calls"]

_LITTLE = "shares less than min_sharing"


def account_calls(material: Material) -> tuple[Call, ...]:
    """The last ``MOST_CALLS`` calls of all graphs together, in the order in which they began."""
    found = [_call(i, logged) for i, graph in enumerate(material.calls) for logged in graph]
    return tuple(sorted(found, key=lambda call: call.number)[-MOST_CALLS:])


def _call(graph: int, logged: LoggedCall) -> Call:
    code, text = "", ""
    if logged.ran != "packed":
        code = LITTLE_SHARING if logged.reason is None else logged.reason.code
        text = _LITTLE if logged.reason is None else logged.reason.text
    return Call(
        logged.number, graph, logged.ran, logged.raw_tokens, logged.tokens, logged.distinct_tokens, code, text,
        logged.seconds, logged.compiles,
    )  # fmt: skip
