"""What is drawn anew for every state of the sources: programs of the search, and cases of long tests."""

import functools
import hashlib
from pathlib import Path

import pytest

import treefx

__all__ = ["is_drawn", "sources"]


@functools.cache
def sources() -> str:
    """A hash of the sources."""
    root = Path(treefx.__file__).parent
    files = sorted(path for folder in (root, root / "passes", root / "kernels") for path in folder.glob("**/*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def is_drawn(item: pytest.Item) -> bool:
    """Whether a case runs where only a sample does: one in n of a test marked ``sample(n)``, all of the others."""
    marker = item.get_closest_marker("sample")
    digest = hashlib.sha256(f"{sources()} {item.nodeid}".encode()).hexdigest()
    return marker is None or int(digest, 16) % marker.args[0] == 0
