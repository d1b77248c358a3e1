"""Time tree attention on a GPU against FlexAttention, SDPA on rows, and a product.

FlexAttention runs on its Triton kernels and, where flash-attn-4 is installed, on the kernels of that package
(``FLASH``): two separate baselines.

The numbers come first: out, dq, dk and dv of sampled tokens are compared with the dense reference in float64, and may
be off by no more than 1.5 times what SDPA on separate rows is off in the same type. Where they are, no time is
reported. Times are those of the device: the queue is filled behind a pause, so that no method waits for Python.
"""

import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch._functorch.config
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from treefx.errors import UnsupportedError
from treefx.kernels import tree_attention
from treefx.kernels.common import Inputs
from treefx.kernels.gpu import flex
from treefx.kernels.memory import send
from treefx.output import make_table
from treefx.tools.bench.attention.sample import Attend, Sample, causal, rounded
from treefx.tools.bench.attention.settings import FLASH, FLEX_VARIANTS, SETTINGS, Setting
from treefx.tools.bench.job.processes import Note

__all__ = ["device_ms", "make_summary", "run"]

Timer = Callable[[Callable[[], object]], float]
_OURS, _OTHERS = 1.5, 4.0
"""How many times the error of SDPA on separate rows a method may be off."""
_FLASH_CHECKS = 5
"""How often the results of flash-attn-4 are compared: its versions of 2026 had wrong gradients for some shapes in every
call, and for others in one launch of a few hundred."""
_LARGEST_ROWS = 6e9
"""Bytes of padded queries above which the separate rows are not timed."""
_PAUSE_CYCLES = 10_000_000
_CEILING = 8192
_COPIED = 2**30
"""Bytes that the copy reads, and writes as well."""


def make_summary(records: Sequence[dict[str, Any]]) -> Table:
    """Return the records as a table: milliseconds, TFLOP/s, and quotients of the others."""
    has_flash = any("flash_over_tree_forward" in record for record in records)
    others = {name: f"{name}_over_tree_{{}}" for name in ("flex", *(["flash"] if has_flash else []), "rows")}
    names = ("tree_{}_ms", "tree_{}_tflops", *others.values())
    fields = [name.format(way) for way in ("forward", "backward") for name in names]
    rows = [
        (record["case"], record.get("tokens", "-"), *(record.get(field, "-") for field in fields), _verdict(record))
        for record in records
    ]
    short = ("ms", "TFLOP/s", *(f"{name} x" for name in others))
    headers = [f"{way} {name}" for way in ("fwd", "bwd") for name in short]
    best = next((record for record in records if "matmul_tflops" in record), None)
    title = "Tree attention"
    if best:
        title += f"; a plain product reaches {best['matmul_tflops']} TFLOP/s, a copy {best['copy_tb_per_s']} TB/s"
    return make_table(title, ("case", "tokens", *headers, "verdict"), rows)


def _verdict(record: dict[str, Any]) -> str:
    return "; ".join([*record["wrong"], *record.get("warnings", ())]) or "exact"


def run(
    settings: Sequence[Setting] = SETTINGS,
    *,
    minutes: float = 7.5,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer | None = None,
    with_flex: bool = True,
    note: Note = lambda step: None,
) -> Iterator[dict[str, Any]]:
    """Measure the settings in turn until the time is up.

    Kernels are tuned (``TREEFX_TUNE=1``) unless the environment says otherwise.

    Args:
        settings: what to measure.
        minutes: no new setting starts after this time.
        device: where.
        dtype: of q, k and v.
        timer: milliseconds of a call on the device; by default measured there.
        with_flex: whether FlexAttention runs as well; on flash-attn-4 too where that is installed.
        note: is told what begins.

    Yields:
        One record per setting: ``case, tokens, raw_tokens``, errors and failures in ``wrong``; without any,
        milliseconds and TFLOP/s (on visible pairs) of each method, forward and backward, and the quotients; how many
        kernels were ``compiled`` for it, the slowest of them, and how many for the same forest with three tokens less.

    Raises:
        UnsupportedError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("this benchmark must run on a CUDA device, and there is none: use --device cpu")
    os.environ.setdefault("TREEFX_TUNE", "1")
    start, timer = time.perf_counter(), timer or device_ms
    ceilings = _ceilings(timer) if device == "cuda" else {}
    for setting in settings:
        if time.perf_counter() - start > 60 * minutes:
            yield {"case": setting.name, "wrong": [f"not measured: the {minutes:g} minutes are up"]}
            continue
        # AOTAutograd may reuse a backward's inputs only if it runs once; every length of a case is a recompilation.
        with (
            torch._functorch.config.patch(donated_buffer=False),
            torch._dynamo.config.patch(recompile_limit=256),
        ):
            case = partial(_Case, setting, torch.device(device), dtype, timer, note)
            record = _measured(setting.name, case, _chosen(setting.variants) if with_flex else ())
        yield {**record, **ceilings, "total_s": round(time.perf_counter() - start, 1)}
        if device == "cuda":
            torch.cuda.empty_cache()


def _chosen(variants: Sequence[str]) -> list[str]:
    """List the variants of FlexAttention here; ``FLASH`` only with flash-attn-4."""
    try:
        is_there = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # of the package around it
        is_there = False
    return [name for name in variants if is_there or name != FLASH]


def _measured(name: str, make: Callable[[], "_Case"], variants: Sequence[str]) -> dict[str, Any]:
    try:
        return make().measure(variants)
    except Exception as reason:  # of many types, of the device too: the other settings are worth having
        return {"case": name, "wrong": [f"{type(reason).__name__}: {str(reason)[:300]}"]}


@contextmanager
def _compilations() -> Iterator[list[float]]:
    """Collect the seconds of every kernel that Triton compiles; cache hits do not count."""
    seconds: list[float] = []
    if importlib.util.find_spec("triton") is None:
        yield seconds
        return
    import triton

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds.append(times.total / 1e6)

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listen
    try:
        yield seconds
    finally:
        triton.knobs.compilation.listener = before


class _Case:
    """The tensors of one setting and the methods on them."""

    def __init__(self, setting: Setting, device: torch.device, dtype: torch.dtype, timer: Timer, note: Note) -> None:
        self.setting, self.device, self.timer, self.note = setting, device, timer, note
        self.ends = send(setting.tree.subtree_end(), device, keep=True)
        self.rows = [row.to(device) for row in setting.tree.rows()]
        generator = torch.Generator(device).manual_seed(0)

        def heads(count: int) -> Tensor:
            shape = 1, len(self.ends), count, setting.head_dim
            return torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2)

        self.leaves = [heads(count).requires_grad_() for count in (setting.heads, setting.kv_heads, setting.kv_heads)]
        self.grad = heads(setting.heads)

    def measure(self, variants: Sequence[str]) -> dict[str, Any]:
        tokens = len(self.ends)
        pairs = int((self.ends.long() - torch.arange(tokens, device=self.device)).sum())
        record: dict[str, Any] = {
            "case": self.setting.name,
            "tokens": tokens,
            "raw_tokens": sum(map(len, self.rows)),
            "visible_pairs": pairs,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }
        self.note("the first call of tree attention")
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught, _compilations() as seconds:
            warnings.simplefilter("always")
            torch.autograd.grad(self.tree(*self.leaves), self.leaves, self.grad)
            self.synchronize()
        record["tree_first_call_s"] = round(time.perf_counter() - began, 2)
        record |= {"compiled": len(seconds), "slowest_compilation_s": round(max(seconds, default=0.0), 2)}
        self.note("the check of tree attention")
        record["warnings"] = [str(warning.message) for warning in caught if "treefx" in str(warning.message)]
        sample = Sample(self.ends, self.rows, self.leaves, self.grad)
        limits = sample.errors_of_rows()
        record |= {"rows_errors": rounded(limits), "wrong": sample.judge("tree", self.tree, limits, _OURS, record)}
        if record["wrong"]:
            return record
        record["compiled_for_another_length"] = self.compiled_for_another_length()
        self.note("the times of tree attention")
        flops = 4.0 * pairs * self.setting.head_dim * self.setting.heads
        record |= _figures("tree", self.times(self.tree), flops)
        record["tree_host_ms"] = self.host_ms()
        record |= self.flex_figures(variants, sample, limits, flops)
        self.note("the rows")
        try:
            record |= self.row_figures()
        except torch.OutOfMemoryError:
            record["rows"] = "not measured: the padded rows do not fit the device"
        return record | _ratios(record)

    def tree(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tree_attention(q, k, v, self.ends, impl=self.impl)

    def compiled_for_another_length(self) -> int:
        """Count the kernels that a shorter forest compiles: none, as no length is a constant."""
        tokens = len(self.ends) - 3
        ends = self.ends[:tokens].clamp(max=tokens)
        q, k, v = leaves = [tensor.detach()[:, :, :tokens].requires_grad_() for tensor in self.leaves]
        with _compilations() as seconds:
            out = tree_attention(q, k, v, ends, impl=self.impl)
            torch.autograd.grad(out, leaves, self.grad[:, :, :tokens])
            self.synchronize()
        return len(seconds)

    @property
    def impl(self) -> str:
        """Not "auto" on a device, which could be FlexAttention."""
        return "triton" if self.device.type == "cuda" else "auto"

    def times(self, attend: Attend) -> tuple[float, float]:
        """Return the milliseconds of the forward and of the backward."""
        out = attend(*self.leaves)
        forward = self.timer(lambda: attend(*self.leaves))
        backward = self.timer(lambda: torch.autograd.grad(out, self.leaves, self.grad, retain_graph=True))
        return forward, backward

    def host_ms(self) -> float:
        """Return what a forward costs in Python, while the device has enough to do."""
        self.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            self.tree(*self.leaves)
        taken = time.perf_counter() - began
        self.synchronize()
        return round(taken * 100, 3)

    def flex_figures(
        self, variants: Sequence[str], sample: "Sample", limits: dict[str, float], flops: float
    ) -> dict[str, Any]:
        """Return times of FlexAttention's fastest variant and of ``FLASH``, and other outcomes."""
        found: dict[str, tuple[float, float]] = {}
        record: dict[str, Any] = {}
        for name in variants:
            self.note(f"flex {name}")
            try:
                attend = self.flex(name)
                problem = self.problem_of(name, attend, sample, limits, record)
                if not problem:
                    found[name] = self.times(attend)
            except Exception as reason:  # of many types: options that do not fit, a compiler that fails
                problem = f"{type(reason).__name__}: {str(reason)[:120]}"
            record[f"flex {name}"] = f"not measured: {problem}" if problem else [round(ms, 4) for ms in found[name]]
        if FLASH in found:
            record |= _figures("flash", found.pop(FLASH), flops)
        if found:
            best = min(forward for forward, _ in found.values()), min(backward for _, backward in found.values())
            record |= _figures("flex", best, flops)
        return record

    def problem_of(
        self, name: str, attend: Attend, sample: "Sample", limits: dict[str, float], record: dict[str, Any]
    ) -> str:
        """Return the errors of a variant's results or gradients, or ""; wrong ones are not timed."""
        for _ in range(_FLASH_CHECKS if name == FLASH else 1):
            wrong = sample.judge(f"flex {name}", attend, limits, _OTHERS, record)
            if wrong:
                return "; ".join(wrong)
        return ""

    def flex(self, variant: str) -> Attend:
        block, options = (self.flash_block, {"BACKEND": FLASH}) if variant == FLASH else FLEX_VARIANTS[variant]
        ends, given = self.ends, cast(Any, dict(options))

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < ends[k])

        q, k, v = self.leaves
        blocks = flex.block_mask(Inputs(q, k, v, ends), visible, block=block)
        # The kernels of flash-attn-4 are written for numbers; the others serve every length.
        compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False if variant == FLASH else None)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = self.setting.heads != self.setting.kv_heads
            out: Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=grouped, kernel_options=given)
            return out

        return attend

    @property
    def flash_block(self) -> tuple[int, int]:
        """Return queries and keys of a block of flash-attn-4; on Blackwell two query tiles."""
        on_device = self.device.type == "cuda"
        return (256, 128) if on_device and torch.cuda.get_device_capability(self.device)[0] >= 10 else (128, 128)

    def row_figures(self) -> dict[str, Any]:
        """Return the times of SDPA on rows in a trainer's form: one batch, padded on the right."""
        length = max(map(len, self.rows))
        q, k, v = self.leaves
        if len(self.rows) * length * q.shape[1] * q.shape[-1] * q.element_size() > _LARGEST_ROWS:
            return {"rows": "not measured: the padded rows are too large"}
        index = torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in self.rows])
        alone = [tensor.detach()[0].transpose(0, 1)[index].transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
        grad = self.grad[0].transpose(0, 1)[index].transpose(1, 2)
        out = causal(*alone)
        forward = self.timer(lambda: causal(*alone))
        backward = self.timer(lambda: torch.autograd.grad(out, alone, grad, retain_graph=True))
        return {"rows_forward_ms": round(forward, 4), "rows_backward_ms": round(backward, 4)}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _figures(method: str, times: tuple[float, float], flops: float) -> dict[str, float]:
    """Return milliseconds and TFLOP/s; a backward has 5 products where a forward has 2."""
    found: dict[str, float] = {}
    for way, ms, work in zip(("forward", "backward"), times, (flops, 2.5 * flops), strict=True):
        found |= {f"{method}_{way}_ms": round(ms, 4), f"{method}_{way}_tflops": round(work / ms / 1e9, 1)}
    return found


def _ratios(record: dict[str, Any]) -> dict[str, Any]:
    """How many times as long as tree attention the others take, where they were measured."""
    measured = [(other, way) for other in ("flex", "flash", "rows") for way in ("forward", "backward")]
    return {
        f"{other}_over_tree_{way}": round(record[f"{other}_{way}_ms"] / record[f"tree_{way}_ms"], 2)
        for other, way in measured
        if f"{other}_{way}_ms" in record
    }


def _ceilings(timer: Timer) -> dict[str, float]:
    """Return rates of a product of random bfloat16 matrices, and of a copy, both ways."""
    a, b = torch.randn(2, _CEILING, _CEILING, device="cuda").to(torch.bfloat16)
    source, target = torch.empty(2, _COPIED, dtype=torch.uint8, device="cuda")
    return {
        "matmul_tflops": round(2 * _CEILING**3 / timer(lambda: a @ b) / 1e9, 1),
        "copy_tb_per_s": round(2 * _COPIED / timer(lambda: target.copy_(source)) / 1e9, 2),
    }


def device_ms(call: Callable[[], object]) -> float:
    """Return the median device time of a call, from events behind a pause that hides Python."""
    call()
    rough = _timed(call, 1)[0]
    pause = _PAUSE_CYCLES if rough < 100 else 0
    return statistics.median(_timed(call, max(3, min(30, int(300 / rough))), pause))


def _timed(call: Callable[[], object], repeats: int, pause: int = _PAUSE_CYCLES) -> list[float]:
    cuda: Any = torch.cuda
    events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        if pause:
            cuda._sleep(pause)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
