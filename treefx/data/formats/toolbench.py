"""Decision trees of ToolBench (Qin et al. 2023, https://arxiv.org/abs/2307.16789).

An answer found by depth-first search over decisions (DFSDT) is a tree already: ``tree.tree`` holds nested
nodes with ``node_type`` (``Thought``, ``Action``, ``Action Input``), ``description``, ``observation`` and
``children``. Every path from the root to a leaf is one conversation: thoughts, an action and its input are
one assistant message with a tool call, the observation is the tool's answer.
"""

from collections.abc import Sequence
from typing import Any

from treefx.data.files import Value
from treefx.data.formats.openai_chat import parse_message
from treefx.data.trajectories import Conversation, Message, ToolCall

__all__ = ["is_toolbench", "parse_toolbench"]

_KINDS = ("Thought", "Action", "Action Input")


def is_toolbench(raw: Any) -> bool:
    """Whether a parsed record is a DFSDT answer of ToolBench."""
    return isinstance(raw, dict) and isinstance(raw.get("tree"), dict) and "tree" in raw["tree"]


def parse_toolbench(record: Value, source: str) -> list[Conversation]:
    """Parse the conversations of a record, one per leaf of its tree, depth first.

    ``task`` is the file's name.

    Raises:
        RecordError: a field is missing or of the wrong type, or a node is of an unknown type.
    """
    opening = _opening(record)
    root = record["tree"]["tree"]
    return [
        Conversation(source, trial, (*opening, *_messages(path)), source=source, place=record.place)
        for trial, path in enumerate(_paths(root))
    ]


def _opening(record: Value) -> list[Message]:
    """System prompt and query: every logged request starts with the same two messages."""
    answers = record.get("answer_generation")
    logged = answers.get("train_messages") if answers else None
    requests = logged.items("a list of logged requests") if logged else []
    if requests:
        return [parse_message(entry) for entry in requests[0].items("a list of messages")[:2]]
    query = answers.get("query") if answers else None
    return [Message("user", query.text() if query else "")]


def _paths(root: Value) -> list[list[Value]]:
    """List root-to-leaf paths without the empty root, depth first; iterative for any depth."""
    paths = []
    stack: list[tuple[Value, list[Value]]] = [(root, [])]
    while stack:
        node, path = stack.pop()
        below = node.get("children")
        children = below.items("a list of nodes") if below else []
        for child in reversed(children):
            child["node_type"].choice(_KINDS, "a node_type that is one of")
            stack.append((child, [*path, child]))
        if not children and path:
            paths.append(path)
    return paths


def _messages(path: Sequence[Value]) -> list[Message]:
    messages: list[Message] = []
    thoughts: list[str] = []
    action = ""
    for node in path:
        text, kind = _text(node, "description"), node["node_type"].raw
        if kind == "Thought":
            thoughts.append(text)
        elif kind == "Action":
            action = text
        else:
            messages.append(Message("assistant", "\n".join(thoughts), (ToolCall(action, text),)))
            messages.append(Message("tool", _text(node, "observation"), name=action))
            thoughts, action = [], ""
    if thoughts or action:
        # A pruned branch: it ends before the call was made.
        calls = (ToolCall(action, ""),) if action else ()
        messages.append(Message("assistant", "\n".join(thoughts), calls))
    return messages


def _text(node: Value, name: str) -> str:
    found = node.get(name)
    return found.text() if found else ""
