"""Folders for files that are run as code: of this user alone, and every file is compared before it runs.

What lies in a cache folder was written by an earlier process, perhaps cut off, perhaps by another user of a folder that
several share. So code is kept only where no other user can write, and its bytes are compared with what they should be.
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
    """Return where sources and tuning results are kept: ``TREEFX_CACHE_DIR`` or ``~/.cache/treefx``."""
    given = os.environ.get("TREEFX_CACHE_DIR")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache" / "treefx"
    except RuntimeError:  # a user without a home, as in containers
        return Path(tempfile.gettempdir()) / f"treefx-user-{_user()}"


def code_folder() -> Path | None:
    """Return a folder of this user alone for code, made where there is none; None where none can be made.

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
    """Return a folder of this process, for code that can be kept nowhere; it is removed at the end."""
    folder, owner = Path(tempfile.mkdtemp(prefix="treefx-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file at once or not at all, whatever other processes write there."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def digest(content: bytes) -> str:
    """Return what stands for a file's bytes in its name."""
    return hashlib.sha256(content).hexdigest()[:32]
