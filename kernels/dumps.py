"""Write debug dumps: graphs before and after passes, sources of generated kernels.

Nothing is written unless the environment variable ``TREEFX_DUMP_DIR`` names a folder, which is made when needed. A dump
never changes a run: one that cannot be made or written is left out, with one warning per folder.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

__all__ = ["dump", "dumps_wanted"]


def dumps_wanted() -> bool:
    """Whether ``TREEFX_DUMP_DIR`` is set: texts that take long to make are made only then."""
    return bool(os.environ.get("TREEFX_DUMP_DIR"))


def dump(kind: str, name: str, text: str) -> Path | None:
    """Write a text for people.

    Args:
        kind: Folder within ``TREEFX_DUMP_DIR``: "passes", "kernels", ...
        name: Name of the file with its ending; characters that a file name may not have become ``_``. A file of that
            name is replaced.
        text: Content of the file.

    Returns:
        The file, or None where there is none.
    """
    if not dumps_wanted():
        return None
    folder = os.environ["TREEFX_DUMP_DIR"]
    try:
        path = Path(folder) / _safe(kind) / _safe(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except Exception as error:  # of many types: no permission, a full disk, a graph that cannot be printed
        _warn_once(folder, error)
        return None
    return path


def _warn_once(folder: str, error: Exception) -> None:
    if _refused[-1:] != [folder]:
        _refused[:] = [folder]
        warnings.warn(
            f"TREEFX_DUMP_DIR should name a folder that can be written, but {folder}: {type(error).__name__}: {error}; "
            "such dumps are left out, and the model runs as it does without",
            stacklevel=3,
        )


_refused: list[str] = []
"""The folder that was last warned of."""


def _safe(name: str) -> str:
    return re.sub(r"[^\w.+=-]", "_", name)
