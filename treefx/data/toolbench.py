"""Decision trees of ToolBench (Qin et al. 2023, https://arxiv.org/abs/2307.16789).

An answer found by depth-first search over decisions (DFSDT) is a tree already: ``tree.tree`` holds nested
nodes with ``node_type`` (``Thought``, ``Action``, ``Action Input``), ``description``, ``observation`` and
``children``. Every path from the root to a leaf is one conversation: thoughts, an action and its input are
one assistant message with a tool call, the observation is the tool's answer.
"""

from typing import Any

from treefx.data.openai_chat import parse_message
from treefx.data.trajectories import Conversation, Message, ToolCall
from treefx.errors import InputError

__all__ = ["is_toolbench", "read_toolbench"]

_KINDS = ("Thought", "Action", "Action Input")


def is_toolbench(document: Any) -> bool:
    """Whether a parsed file is a DFSDT answer of ToolBench."""
    tree = document.get("tree") if isinstance(document, dict) else None
    return isinstance(tree, dict) and isinstance(tree.get("tree"), dict) and "children" in tree["tree"]


def read_toolbench(document: Any, source: str) -> list[Conversation]:
    """Conversations of a parsed file, one per leaf of its tree, depth first; ``task`` is the file's name.

    Raises:
        InputError: A node is of an unknown type.
    """
    opening = _opening(document, source)
    return [
        Conversation(source, trial, (*opening, *_messages(path)), source=source)
        for trial, path in enumerate(_paths(document["tree"]["tree"], source))
    ]


def _opening(document: Any, source: str) -> list[Message]:
    """System prompt and query: every logged request starts with the same two messages."""
    answers = document.get("answer_generation") or {}
    logged = answers.get("train_messages") or []
    if logged:
        return [parse_message(entry, source) for entry in logged[0][:2]]
    return [Message("user", str(answers.get("query", "")))]


def _paths(root: dict[str, Any], source: str) -> list[list[dict[str, Any]]]:
    """Root-to-leaf paths without the empty root, in depth-first order; iterative, so depth is not limited."""
    paths = []
    stack: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [(root, [])]
    while stack:
        node, path = stack.pop()
        children = node.get("children") or []
        for child in reversed(children):
            if child.get("node_type") not in _KINDS:
                raise InputError(
                    f"{source}: node_type must be one of {', '.join(_KINDS)}, got {child.get('node_type')!r}"
                )
            stack.append((child, [*path, child]))
        if not children and path:
            paths.append(path)
    return paths


def _messages(path: list[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    thoughts: list[str] = []
    action = ""
    for node in path:
        text = str(node.get("description") or "")
        if node["node_type"] == "Thought":
            thoughts.append(text)
        elif node["node_type"] == "Action":
            action = text
        else:
            messages.append(Message("assistant", "\n".join(thoughts), (ToolCall(action, text),)))
            messages.append(Message("tool", str(node.get("observation") or ""), name=action))
            thoughts, action = [], ""
    if thoughts or action:
        # A pruned branch: it ends before the call was made.
        calls = (ToolCall(action, ""),) if action else ()
        messages.append(Message("assistant", "\n".join(thoughts), calls))
    return messages
