"""The log of a run, as transformers' trainer saves it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_log"]


def write_log(folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write one entry per optimizer step, each with ``loss`` and ``grad_norm``; folders in between are made."""
    state = folder / "trainer_state.json"
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps({"log_history": list(entries)}), encoding="utf-8")
