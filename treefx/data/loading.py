"""Read trajectories of any known format."""

import json
from pathlib import Path
from typing import Any

from treefx.data.openai_chat import is_openai_chat, read_openai_chat
from treefx.data.tau_bench import is_tau_bench, read_tau_bench
from treefx.data.toolbench import is_toolbench, read_toolbench
from treefx.data.trajectories import Conversation
from treefx.errors import InputError

__all__ = ["load"]

_FORMATS = (
    "tau-bench trajectories (a JSON list of {task_id, traj}), a ToolBench decision tree ({tree: {tree}}), "
    "or chats (JSON lines or a list of {messages})"
)


def load(path: str | Path) -> list[Conversation]:
    """Read the conversations of a file, or of each ``.json`` and ``.jsonl`` file below a folder.

    Files are read in sorted order. The content tells the format: tau-bench, ToolBench or OpenAI chats.

    Raises:
        InputError: Nothing is there, a file is not JSON, or it is of no known format.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"no file or folder {path}: give a path to {_FORMATS}")
    if path.is_file():
        return _load_file(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in (".json", ".jsonl"))
    if not files:
        raise InputError(f"the folder {path} holds no .json or .jsonl file: give a path to {_FORMATS}")
    return [conversation for file in files for conversation in _load_file(file)]


def _load_file(path: Path) -> list[Conversation]:
    document = _parse(path)
    for recognises, read in (
        (is_tau_bench, read_tau_bench),
        (is_toolbench, read_toolbench),
        (is_openai_chat, read_openai_chat),
    ):
        if recognises(document):
            return read(document, path.stem)
    raise InputError(f"{path} is of no known format: expected {_FORMATS}; got {_outline(document)}")


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not JSON ({error}): give a path to {_FORMATS}") from error


def _outline(document: Any) -> str:
    """The outer shape of a document, for messages of errors."""
    if isinstance(document, dict):
        return f"an object with the keys {', '.join(map(repr, list(document)[:6])) or '(none)'}"
    if isinstance(document, list):
        return f"a list of {len(document)}, its first entry {_outline(document[0])}" if document else "an empty list"
    return f"a {type(document).__name__}"
