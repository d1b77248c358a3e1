"""Generate a Python module of Triton kernels from a score and templates.

The source is a function of its request alone. It is written under a name made of its content, so that tracebacks and
Triton's own reading of the source find it, and so that processes share it.
"""

import hashlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import Lock
from types import CodeType, ModuleType

import jinja2

from treefx.kernels.code_files import cache_folder, code_folder, is_private, temporary_folder, write_whole
from treefx.kernels.dumps import dump
from treefx.kernels.expression_text import format_condition, format_expression
from treefx.kernels.gpu.triton_tree.arguments import TOO_LARGE
from treefx.kernels.gpu.triton_tree.expressions import BufferKind, score_code
from treefx.kernels.score import Score

__all__ = ["Request", "cache_folder", "kernel_module", "kernel_source", "row_vectors", "row_width"]

_TEMPLATES = Path(__file__).parent / "templates"
_IMPORTS = ("import triton", "import triton.language as tl")
_GLUON_IMPORTS = (
    "from triton.experimental import gluon",
    "from triton.experimental.gluon import language as tl",
    "from triton.experimental.gluon.language.nvidia.hopper import (",
    *(f"    {name}," for name in ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")),
    ")",
)
"""Its language has the names of Triton's, which statements of scores use; tensors have layouts."""
_PACKED = {
    "plain": (),
    "gluon": ("packed_rows", "packed_keys", "lists"),
    "values": ("packed_rows", "packed_columns"),
    "repair": ("packed_rows", "lists"),
}
"""How far vectors of rows and of keys lie apart, by path; and how many lists of tiles there are."""
_lock = Lock()


@dataclass(frozen=True)
class Request:
    """Hold the inputs of a kernel's text; everything else is an argument.

    Attributes:
        score: text of ``Score.to_json()``.
        buffers: kinds of the loaded buffers.
        head_dim: width of queries and keys.
        value_dim: width of values.
        chunk_widths: the narrowest and the widest piece of a head in one product, powers of two.
        path: a template: ``"plain"``, ``"gluon"``, ``"values"``, which Gluon reads, or ``"repair"``, which follows it.
        origin: the line of the model that the attention comes from, or ``""``.
    """

    score: str
    buffers: tuple[BufferKind, ...]
    head_dim: int
    value_dim: int
    chunk_widths: tuple[int, int] = (16, 256)
    path: str = "plain"
    origin: str = ""


def head_chunks(width: int, smallest: int, largest: int) -> tuple[tuple[int, int, int], ...]:
    """Split a head into powers of two: (start, width, width of the head) per chunk.

    The last may overhang.
    """
    chunks, start = [], 0
    while start < width:
        left = width - start
        size = max(smallest, min(largest, 1 << (left.bit_length() - 1)))
        chunks.append((start, size, width))
        start += size
    return tuple(chunks)


def row_width(width: int, chunk_widths: tuple[int, int]) -> int:
    """Return the features of a head with the overhang of its last chunk."""
    start, size, _ = head_chunks(width, *chunk_widths)[-1]
    return start + size


def row_vectors(path: str) -> dict[str, int]:
    """Return how backward kernels read the log-sum-exp and minus delta, in words per row."""
    return {"PackedHalves": 2} if path == "plain" else {"PackedLse": 1, "PackedDelta": 1}


@lru_cache(maxsize=256)
def kernel_source(request: Request) -> str:
    """Return the source of a request's module.

    Raises:
        UnsupportedError: the score cannot be generated.
        InputError: it does not fit the buffers.
    """
    score = score_code(request.score, request.buffers)
    lengths = ["queries", "keys", "query_base", "key_base", *_PACKED[request.path]]
    for number in score.used if request.path != "gluon" else ():
        for dim in range(request.buffers[number].ndim):
            last = dim == request.buffers[number].ndim - 1
            lengths += [f"buffer_{number}_size_{dim}", *([] if last else [f"buffer_{number}_stride_{dim}"])]
    text = (
        _environment()
        .get_template(f"{request.path}.py.jinja")
        .render(
            score=score,
            buffers=[(number, request.buffers[number].ndim) for number in score.used],
            key_chunks=head_chunks(request.head_dim, *request.chunk_widths),
            value_chunks=head_chunks(request.value_dim, *request.chunk_widths),
            lengths=lengths,
            too_large=TOO_LARGE,
            row_width=row_width(request.head_dim, request.chunk_widths),
            value_row_width=row_width(request.value_dim, request.chunk_widths),
        )
    )
    return _header(request) + _formatted(text)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )


def _header(request: Request) -> str:
    score = Score.from_json(request.score)
    names = [f"buffer_{number}" for number in range(len(request.buffers))]
    seen = "low[k] <= q < low[k] + size[k]"
    if score.visible is not None:
        seen += f" and {format_condition(score.visible, names)}"
    rows = [
        '"""Tree attention, generated by treefx.',
        "",
        f"    softmax over k of   {format_expression(score.value, names)}",
        f"    where               {seen}",
        f"    head dims           {request.head_dim} (queries, keys), {request.value_dim} (values)",
        f"    path                {request.path}",
        f"    line                {_one_line(request.origin) or 'not known'}",
        '"""',
        "",
        *(_GLUON_IMPORTS if request.path == "gluon" else _IMPORTS),
        "",
        "from treefx.kernels.gpu.triton_tree.device import (",
        *(f"    {name}," for name in _device_names()),
        ")",
        *(["from treefx.kernels.gpu.triton_tree.row_kernels import prologue as lay_rows"] * (request.path == "values")),
        "",
        "LOG2_E = tl.constexpr(1.4426950408889634)",
        "",
        "",
        "",
    ]
    return "\n".join(rows)


def _one_line(text: str) -> str:
    """Return text that may stand in the docstring of a module."""
    return " ".join(text.split()).replace("\\", "/").replace('"', "'")


def _device_names() -> list[str]:
    text = (Path(__file__).parent / "device.py").read_text(encoding="utf-8")
    return sorted(re.findall(r"^def (\w+)\(", text, re.MULTILINE))


def _formatted(text: str) -> str:
    """Drop the blank lines that template statements leave; two stay before each kernel."""
    kept = "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
    return re.sub(r"^@(triton|gluon).jit", r"\n\n@\1.jit", kept, flags=re.MULTILINE).strip() + "\n"


@lru_cache(maxsize=256)
def kernel_module(request: Request) -> ModuleType:
    """Return the module of a request's kernels, imported from its file."""
    source = kernel_source(request)
    name = f"treefx_kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    dump("kernels", f"{name}.py", source)
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        loader = _SourceLoader(name, str(_written(f"{name}.py", source)), source)
        specification = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # Triton looks the functions' module up
        specification.loader.exec_module(module)
    return module


def _written(name: str, source: str) -> Path:
    """Write a file unless present; an unwritable folder gives way to a fresh one."""
    kept, content = code_folder(), source.encode()
    if kept is not None:
        path = kept / "kernels" / name
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if not is_private(path.parent):
                path.parent.chmod(0o700)
            if not path.exists() or path.read_bytes() != content:
                write_whole(path, content)
            return path
        except OSError:
            pass
    path = temporary_folder() / name
    write_whole(path, content)
    return path


class _SourceLoader(SourceFileLoader):
    """Load a given source, not its file, which may change, nor compiled code next to it."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)
