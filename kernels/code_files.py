"""Keep files that run as code in folders of this user, and compare them before use.

Files in a cache folder come from an earlier process, perhaps cut off, perhaps from another user of a shared folder. So
code is kept only where no other user can write, and its bytes are compared with what they should be.
"""

import atexit
import functools
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "code_folder", "digest", "is_private", "temporary_folder", "write_whole"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder of sources and tuning results.

    ``TREEFX_CACHE_DIR`` or ``~/.cache/treefx``.
    """
    given = os.environ.get("TREEFX_CACHE_DIR")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache" / "treefx"
    except RuntimeError:  # a user without a home, as in containers
        return Path(tempfile.gettempdir()) / f"treefx-user-{_user()}"


def code_folder() -> Path | None:
    """Return a folder of this user alone for code, created if missing; None if impossible.

    It is the cache folder itself, or, where other users may write to that, a folder in it.
    """
    base = cache_folder()
    for folder in (base, base / f"user-{_user()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_private(folder) and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                return folder
        except OSError:
            return None
    return None


def is_private(path: Path) -> bool:
    """Whether a file or folder belongs to this user, and no other user can write to it."""
    found = path.stat()
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & _OTHERS_WRITE)


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "0"


@functools.cache
def temporary_folder() -> Path:
    """Return a folder of this process for code without a permanent place; removed at the end."""
    folder, owner = Path(tempfile.mkdtemp(prefix="treefx-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, while other processes may write it too."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def digest(content: bytes) -> str:
    """Return the digest of a file's bytes for its name."""
    return hashlib.sha256(content).hexdigest()[:32]
