"""Rows of chats as token ids and labels, by any tokenizer that can write a chat and encode it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["read_documents"]

_IGNORED = -100


def read_documents(
    path: Path, write: Callable[..., str], encode: Callable[[str], Sequence[int]]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of each chat, and its labels: the ids of the last answer, -100 before it.

    Args:
        path: JSON Lines with ``messages``.
        write: messages, and ``add_generation_prompt``, to a text.
        encode: a text to ids.
    """
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        chat: list[dict[str, Any]] = json.loads(line)["messages"]
        before = list(encode(write(chat[:-1], add_generation_prompt=True)))
        ids = list(encode(write(chat, add_generation_prompt=False)))
        found.append((ids, [_IGNORED] * len(before) + ids[len(before) :]))
    return found
