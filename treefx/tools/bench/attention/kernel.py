"""Compile the generated kernels for a GPU that need not be there; check the assembler.

The checks need no run: registers, spills, shared memory, which matrix instructions were
chosen, whether warp specialisation happened where it was asked for, and the assembler's warnings about serialised
products.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from treefx.errors import InputError
from treefx.kernels.common import Boundary, Inputs
from treefx.kernels.gpu.triton_tree.configs import (
    GFX942,
    SHARED_MEMORY,
    one_pass_fits,
    usable_shared_memory,
)
from treefx.kernels.gpu.triton_tree.launch import Attention, KeySource, Launch
from treefx.kernels.gpu.triton_tree.paths import PATHS, form_refusal
from treefx.kernels.gpu.triton_tree.small_launches import launch_finish, launch_sums
from treefx.kernels.score import Expr, Score, make_score
from treefx.output import make_table, watch
from treefx.tools.kernels.ahead_of_time import CompileReport, compile_launch

__all__ = [
    "ARCHITECTURES",
    "CASES",
    "MORE_CASES",
    "Case",
    "has_form",
    "make_summary",
    "problems",
    "run",
    "run_with_progress",
]

ARCHITECTURES = (80, 86, 89, 90, 100, 120, GFX942)
_TOKENS, _KV_HEADS = 256, 2
_REPAIRS = ("repair_forward", "repair_backward_keys", "repair_backward_queries")
_WITHOUT_PRODUCTS = ("prologue", "values", "sum_parts", "finish_queries", *_REPAIRS)
_MULTIPLYING_WARPS = 8
"""Of a kernel in Gluon: two groups of four, which share a tile."""
_GLUON_LOOPS = 4
"""Two in each group of warps."""
_OF_ROWS = 8
"""Exponentials of a thread's rows may appear next to any product; its logits have more."""
_SPILL_LIMIT = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 256}
"""Bytes per thread."""
_SCALAR_SPILL_LIMIT = 64
"""Scalar registers of AMD's: each is written and read by one instruction, and lies in no memory."""


@dataclass(frozen=True)
class Case:
    """Describe an attention to compile: three kernels, or the small ones around them."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    group: int = 1
    features: tuple[str, ...] = ()


_WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_COMMON_WIDTHS = ((64, 64), (128, 128), (192, 128))
_FEATURES: tuple[tuple[str, ...], ...] = (
    ("window",),
    ("softcap",),
    ("alibi",),
    ("sinks",),
    ("chunked",),
    ("bias",),
    ("boundary",),
    ("window", "boundary"),
    ("alibi", "boundary"),
    ("window", "softcap", "alibi", "sinks"),
)
CASES = (
    *(Case(torch.bfloat16, *widths) for widths in _WIDTHS),
    *(Case(dtype, *widths) for dtype in (torch.float16, torch.float32) for widths in _COMMON_WIDTHS),
    *(Case(torch.bfloat16, 128, 128, group) for group in (4, 7)),
    *(Case(torch.bfloat16, 128, 128, 4, names) for names in _FEATURES),
    Case(torch.bfloat16, 256, 256, 4, ("window", "softcap")),
)
MORE_CASES = (
    *(Case(dtype, *w) for dtype in (torch.float16, torch.float32) for w in _WIDTHS if w not in _COMMON_WIDTHS),
    *(Case(torch.bfloat16, 128, 128, group) for group in (3, 5, 6, 8, 16)),
    *(Case(torch.bfloat16, 64, 64, 4, names) for names in _FEATURES),
    *(Case(torch.float32, 64, 64, 4, names) for names in _FEATURES),
)
"""What ``--full`` adds: together every type, width, group and feature."""


def run_with_progress(
    arch: str,
    path: str,
    *,
    quick: bool = False,
    full: bool = False,
    json: bool = False,
    jobs: int = 1,
    triton: Path | None = None,
) -> list[dict[str, Any]]:
    """Compile the table under a progress bar.

    Args:
        arch: ``"sm_90"`` or ``"gfx942"``, say: one of :data:`ARCHITECTURES`.
        path: ``"plain"``, ``"gluon"`` or ``"all"``.
        quick: every tenth case only.
        full: :data:`MORE_CASES` as well.
        json: a program reads the result, so no progress bar is shown.
        jobs: processes that compile at once.
        triton: a folder with another Triton in it, ``pip install --no-deps --target FOLDER triton==3.6.0``.

    Returns:
        The records of :func:`run`.

    Raises:
        InputError: another architecture or path, or no Triton in the folder.
    """
    if path not in (*PATHS, "all"):
        raise InputError(f"path must be {', '.join(PATHS)} or all, got {path!r}")
    number = _architecture(arch)
    cases = (*CASES, *MORE_CASES) if full else CASES[::10] if quick else CASES
    compile_case = partial(_compile_case, arch=number, paths=PATHS if path == "all" else (path,))
    with _pool(min(jobs, len(cases)), triton) as run_all:
        done = run_all(compile_case, cases)
        shown = watch(done, "compiling kernels", total=len(cases), quiet=json)
        return [record for records in shown for record in records]


def _architecture(arch: str) -> int:
    """Return the number of an architecture by its name.

    Raises:
        InputError: it has no tiles.
    """
    known = {"gfx942" if one == GFX942 else f"sm_{one}": one for one in ARCHITECTURES}
    if arch not in known:
        raise InputError(
            f"arch must be one of {', '.join(known)}, got {arch}: before sm_80 FlexAttention runs "
            "all attentions, and on other GPUs of AMD"
        )
    return known[arch]


@contextmanager
def _pool(jobs: int, triton: Path | None) -> Iterator[Callable[..., Iterable[Any]]]:
    """Give a ``map`` over some processes, which import Triton from a folder if there is one."""
    if triton is not None and not (triton / "triton" / "__init__.py").is_file():
        raise InputError(
            f"triton must be a folder that holds the package triton, got {triton}: "
            f"pip install --no-deps --target {triton} triton==3.6.0"
        )
    if jobs == 1 and triton is None:
        yield map
        return
    sys.path[:0] = folders = [] if triton is None else [str(triton.resolve())]  # processes inherit it
    try:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            yield pool.map
    finally:
        for folder in folders:
            sys.path.remove(folder)


def _compile_case(case: Case, *, arch: int, paths: Sequence[str]) -> list[dict[str, Any]]:
    return list(run(arch, paths=paths, cases=[case]))


def make_summary(arch: str, records: Sequence[dict[str, Any]]) -> Table:
    """Return the records as a table."""
    rows = [
        (
            f"{record['kernel']} ({record['path']})",
            record["dtype"],
            f"{record['head_dim']}/{record['head_dim_v']}",
            record["group"],
            " ".join(record["features"]) or "-",
            record["tile"],
            record["registers"],
            record["spill_bytes"],
            f"{record['shared_bytes']:,}",
            record["wgmma"] or record["tcgen05"] or record["mma"] or record["mfma"],
            "; ".join(record["problems"]) or "ok",
        )
        for record in records
    ]
    headers = ("kernel", "dtype", "heads", "group", "features", "tile", "registers", "spilled", "shared")
    bad = sum(bool(record["problems"]) for record in records)
    title = f"{len(records)} kernels compiled for {arch}, {bad} out of bounds"
    return make_table(title, (*headers, "matrix ops", "verdict"), rows)


def run(arch: int = 90, *, paths: Sequence[str] = PATHS, cases: Iterable[Case] = CASES) -> Iterator[dict[str, Any]]:
    """Compile every case for one architecture.

    Args:
        arch: one of :data:`ARCHITECTURES`: compute capability times 10, or ``GFX942``.
        paths: which forms of the kernels; ``"gluon"`` exists for 16-bit types on 90 only.
        cases: what to compile.

    Yields:
        One record per kernel: ``triton`` (its version), ``kernel, path, dtype, head_dim, head_dim_v, group, features,
        registers, spill_bytes, scalar_spills, shared_bytes, wgmma, tcgen05, mma, mfma, setmaxnreg, race_free,
        prefetch, instructions_per_logit, overlap, tile, seconds, problems``. ``race_free`` is ``None`` where all warps
        do alike, ``prefetch`` where some of them only load, and for AMD, whose loops load ahead to registers.
        ``prefetch`` has an item per loop with products, ``instructions_per_logit`` one per loop and group of warps:
        what a thread executes for each of its logits; ``overlap`` one per end of all products: the exponentials that
        began while any of them was under way. ``scalar_spills`` and ``mfma`` are AMD's.
    """
    import triton

    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # hundreds of megabytes otherwise stay
        for case in cases:
            for path in paths:
                for launch in _launches(case, path, arch):
                    yield _record(case, path, launch, arch)


def _record(case: Case, path: str, launch: Launch, arch: int) -> dict[str, Any]:
    import triton

    start = time.perf_counter()
    report = compile_launch(launch, arch)
    name, config = launch.kernel.__name__, launch.config
    lanes = 64 if arch == GFX942 else 32
    threads = lanes * (config.warps if path == "plain" else _MULTIPLYING_WARPS)
    logits = config.block_m * config.block_n / threads
    return {
        "triton": triton.__version__,
        "kernel": name,
        "path": path,
        "dtype": str(case.dtype).removeprefix("torch."),
        "head_dim": case.head_dim,
        "head_dim_v": case.value_dim,
        "group": case.group,
        "features": list(case.features),
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "scalar_spills": report.scalar_spills,
        "shared_bytes": report.shared_bytes,
        "wgmma": report.wgmma,
        "tcgen05": report.tcgen05,
        "mma": report.mma,
        "mfma": report.mfma,
        "setmaxnreg": report.setmaxnreg,
        "race_free": None if report.races is None else not report.races,
        "prefetch": None if report.prefetch is None else list(report.prefetch),
        "instructions_per_logit": [round(number / logits, 1) for number in report.loop_instructions],
        "overlap": list(report.overlap),
        "tile": f"{config.block_m}x{config.block_n} w{config.warps} s{config.stages}",
        "seconds": round(time.perf_counter() - start, 2),
        "problems": problems(report, case.dtype, name, path, arch),
    }


def problems(report: CompileReport, dtype: torch.dtype, kernel: str, path: str, arch: int) -> list[str]:
    """Return the violated bounds, in words; empty if none is."""
    found = []
    if report.spill_bytes > _SPILL_LIMIT[dtype]:
        found.append(f"spills {report.spill_bytes} bytes, at most {_SPILL_LIMIT[dtype]} are allowed")
    if report.scalar_spills > _SCALAR_SPILL_LIMIT:
        found.append(f"spills {report.scalar_spills} scalar registers, at most {_SCALAR_SPILL_LIMIT} are allowed")
    if report.shared_bytes > SHARED_MEMORY[arch]:
        found.append(f"needs {report.shared_bytes} bytes of shared memory, the device has {SHARED_MEMORY[arch]}")
    if report.setmaxnreg != (specialised := path != "plain" and kernel not in _WITHOUT_PRODUCTS):
        found.append("is not warp-specialised" if specialised else "is warp-specialised")
    found += report.races or ()
    if specialised and sum(number > _OF_ROWS for number in report.overlap) < _GLUON_LOOPS:
        found.append("a loop computes no exponentials while it multiplies")
    if 0 in (report.prefetch or ()):
        found.append("a loop loads nothing ahead: it waits for every tile")
    if kernel in _WITHOUT_PRODUCTS or dtype == torch.float32:  # float32 is right first, and fast where it may be
        return found
    if arch == 90:
        if not report.wgmma or report.mma:
            found.append(f"must multiply by warpgroups only, got {report.wgmma} wgmma and {report.mma} mma.sync")
        found += [f"serialises its products ({warning})" for warning in report.warnings]
    elif not (report.tcgen05 if arch == 100 else report.mfma if arch == GFX942 else report.mma):
        found.append("has no matrix instruction")
    return found


def has_form(case: Case, path: str, arch: int) -> bool:
    """Return whether a case has a form of the kernels on compute capability ``arch / 10``."""
    return path == "plain" or form_refusal(_attention(case, path, arch), divmod(arch, 10)) is None


def _launches(case: Case, path: str, arch: int) -> Iterator[Launch]:
    if not has_form(case, path, arch):
        return
    attention = _attention(case, path, arch)
    sources, values = attention.with_values(_sources(attention))
    inputs = attention.inputs
    heads, row = inputs.q.shape[1], torch.empty(1, inputs.q.shape[1], _TOKENS)
    out, wide = (_heads(heads, case.value_dim, dtype) for dtype in (case.dtype, torch.float32))
    dq, wide_dq = inputs.q, _heads(heads, case.head_dim, torch.float32)
    prologue, of_keys, of_queries = attention.prologue(out, out, row, values)
    for number, source in enumerate(sources):  # the last one goes on from what the others have left
        last, before = number == len(sources) - 1, number > 0
        launches = [
            attention.forward(source, out if last else wide, row, (wide, row) if before else None),
            attention.backward_keys(source, of_keys, inputs.k, inputs.v),
            attention.backward_queries(source, of_queries, dq if last else wide_dq, wide_dq if before else None),
        ]
        yield from launches
        if not case.features and case.group == 1:
            yield from (after for launch in launches for after in launch.after if after.kernel.__name__ in _REPAIRS)
    if one_pass_fits(attention.problem("backward_once")):
        attention = replace(attention, once=True)
        prologue, of_keys, _ = attention.prologue(out, out, row, values)
        yield attention.backward_keys(sources[0], of_keys, inputs.k, inputs.v)
    yield from values[:1]
    if values or (not case.features and case.group == 1):
        yield prologue
    if path == "plain" and not case.features and case.group == 1:
        config = attention.config("backward_keys")
        work = attention.blocks(sources[0], config).key_programs
        parts = [torch.empty(len(work.order), 2, config.block_n, x.shape[-1]) for x in (inputs.k, inputs.v)]
        yield launch_sums(work, config, parts, (inputs.k, inputs.v))
        if attention.once:
            yield launch_finish(of_keys["SumsQ"], inputs.q, attention.code.factor, _KV_HEADS)


def _attention(case: Case, path: str, arch: int) -> Attention:
    query_heads = case.group * _KV_HEADS
    q = _heads(query_heads, case.head_dim, case.dtype)
    k, v = _heads(_KV_HEADS, case.head_dim, case.dtype), _heads(_KV_HEADS, case.value_dim, case.dtype)
    ends = torch.full((_TOKENS,), _TOKENS, dtype=torch.int32)
    outside = Boundary(k, v, torch.zeros_like(ends), ends) if "boundary" in case.features else None
    score, buffers = _score(case, query_heads, _TOKENS if outside is None else 2 * _TOKENS)
    sinks = torch.zeros(query_heads) if "sinks" in case.features else None
    inputs = Inputs(q, k, v, ends, buffers, sinks, outside)
    return Attention(inputs, score, path, shared_limit=usable_shared_memory(arch))


def _sources(attention: Attention) -> list[KeySource]:
    """Return the keys of an attention: with a boundary, its pool alone if plain, else both."""
    sources = attention.sources()
    if attention.path != "plain" or len(sources) == 1:
        return sources
    return [replace(sources[0], rows=torch.arange(_TOKENS, dtype=torch.int32))]


def _heads(heads: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(1, _TOKENS, heads, width, dtype=dtype).transpose(1, 2)


def _score(case: Case, heads: int, tokens: int) -> tuple[Score, list[Tensor]]:
    """Return the score of a case with buffers of all tokens, 0: depth, 1: slopes, 2: bias."""
    names = case.features
    score = make_score(
        scale=0.125,
        depth=0,
        window=64 if "window" in names else None,
        softcap=20.0 if "softcap" in names else None,
        alibi=1 if "alibi" in names else None,
    )
    value, visible = score.value, score.visible
    if "bias" in names:
        value = ("add", value, ("load", 2, ("head",), ("q",), ("k",)))
    if "chunked" in names:
        sides: list[Expr] = [("floordiv", ("load", 0, (side,)), ("const", 64)) for side in ("q", "k")]
        visible = ("eq", *sides)
    return Score(value, visible), [
        torch.arange(tokens, dtype=torch.int32),
        torch.zeros(heads),
        torch.empty(heads, tokens, tokens, dtype=case.dtype),
    ]
