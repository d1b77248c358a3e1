"""Open a file for reading bytes: unpack gzip, refuse other binary formats by name."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from treefx.data.files.values import Place

__all__ = ["Opened", "open_bytes"]

_HEAD = 4096
_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_FROM_ARROW = (
    "write it as JSON lines, for example with `datasets.Dataset.to_json`; Arrow fills the arguments of calls with null "
    "where other calls have some: read such lines with drop_null_arguments=True"
)
_NO_TEXT = {
    b"\xff\xfe": "UTF-16 text: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "UTF-16 text: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": f"a Parquet file: {_FROM_ARROW}",
    b"ARROW1": f"an Arrow file: {_FROM_ARROW}",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, or use gzip",
    b"\xfd7zXZ": "compressed by xz: unpack it, or use gzip",
    b"BZh": "compressed by bzip2: unpack it, or use gzip",
} | {
    bytes((0x80, protocol)): (
        "a pickle, which is not loaded, as that may run code: load a DataProto with verl, and hand it to "
        "treefx.data.traces_of_dataproto"
    )
    for protocol in range(2, 6)
}
"""First bytes of files of other kinds."""


class Opened:
    """Bytes of a file, and how far its reading is.

    Attributes:
        stream: the bytes, unpacked, without a byte order mark of UTF-8.
        place: the file.
        position: bytes of the file, as it lies on the disk, that were read.
    """

    def __init__(self, stream: io.BufferedReader, place: Place, position: Callable[[], int]) -> None:
        self.stream, self.place, self.position = stream, place, position

    def head(self) -> bytes:
        """Peek at the next bytes, some kilobytes at most, without consuming them."""
        return self.stream.peek(_HEAD)[:_HEAD]


@contextmanager
def open_bytes(path: Path) -> Iterator[Opened]:
    """Open a file.

    Raises:
        RecordError: it cannot be opened, is empty, or is no text: its kind is named where it is known.
    """
    place = Place(str(path))
    try:
        raw = path.open("rb")
        packed = raw.peek(2)[:2] == _GZIP
    except OSError as error:
        raise place.error(f"cannot be opened: {error.strerror}") from error
    with raw:
        stream: io.BufferedReader = raw
        if packed:
            stream = io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=cast("BinaryIO", raw))))
        opened = Opened(stream, place, raw.tell)
        _check_text(opened)
        yield opened


def _check_text(opened: Opened) -> None:
    try:
        head = opened.head()
    except (OSError, EOFError, zlib.error) as error:
        raise opened.place.error(f"is no whole gzip file ({error}): it may be truncated") from error
    if head.startswith(_UTF8_MARK):
        head = head[len(opened.stream.read(len(_UTF8_MARK))) :]
    for mark, kind in _NO_TEXT.items():
        if head.startswith(mark):
            raise opened.place.error(f"is not JSON but {kind}")
    if b"\0" in head:
        raise opened.place.error(f"is not JSON but binary: byte {head.index(0)} is 0")
    if not head:
        raise opened.place.error("is empty")
