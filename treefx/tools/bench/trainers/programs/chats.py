"""Encode rows of chats as token ids and labels, by any tokenizer with a template."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Row", "collate", "read_documents", "read_rows"]

Row = tuple[list[int], list[int]]
"""Token ids and labels."""
_IGNORED = -100
_PAD = 0
"""Of rows that are shorter than others: masked."""


def read_documents(path: Path, write: Callable[..., str], encode: Callable[[str], Sequence[int]]) -> list[Row]:
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


def read_rows(path: Path, model: Path) -> list[Row]:
    """The same by the tokenizer in a folder that transformers reads."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def write(messages: Any, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    return read_documents(path, write, tokenizer.encode)


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows padded on the right."""
    width = max(len(ids) for ids, _ in rows)
    fields = {
        "input_ids": [ids + [_PAD] * (width - len(ids)) for ids, _ in rows],
        "attention_mask": [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows],
        "labels": [labels + [_IGNORED] * (width - len(labels)) for _, labels in rows],
    }
    return {name: torch.tensor(values) for name, values in fields.items()}
