"""Files for people who debug: graphs before and after each pass, sources of generated kernels.

Nothing is written unless the environment variable ``TREEFX_DUMP_DIR`` names a folder, which is made when needed.
"""

from __future__ import annotations

import os
import re
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
        text: What to write.

    Returns:
        The file, or None where no dumps are wanted.
    """
    if not dumps_wanted():
        return None
    path = Path(os.environ["TREEFX_DUMP_DIR"]) / _safe(kind) / _safe(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _safe(name: str) -> str:
    return re.sub(r"[^\w.+=-]", "_", name)
