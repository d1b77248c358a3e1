"""Measure whole training steps: treefx, inductor on padded and packed rows, the bound.

A model of 28 layers compiles for minutes and runs for a fraction of a second. Models therefore compile side by side;
when all have compiled, one process at a time takes the device and measures. Each batch is reported right after its
measurement.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import treefx
from treefx.data import Batch
from treefx.forests.forest import Forest
from treefx.kernels import tree_attention
from treefx.planning.cost.memory import track_peak
from treefx.tools.bench.gpu.batches import FRESH, SHARING, Rows, make_batch, shortened, tree_of, varied
from treefx.tools.bench.gpu.packed_rows import FLEX, VARLEN, attend_packed_rows, pack_rows
from treefx.tools.bench.gpu.scale import Heads, Scale, draw
from treefx.tools.bench.gpu.turns import Turn, patiently
from treefx.tools.bench.job.models import make_config, make_model, require_transformers

__all__ = ["FIRST", "OURS", "ROWS", "STEP", "Run", "chosen", "first_step", "rehearsed", "step"]

_VOCABULARY = 151_936
_QWEN3 = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_REPEATS = 5
_KERNELS = 12
"""Of the slowest kernels of a step, how many are named."""
OURS = ("treefx", "treefx, CUDA graphs", "treefx, regions", "treefx, converted")
"""By default; in the mode "reduce-overhead"; with equal layers compiled once; converted, with compiled blocks."""
ROWS = ("padded rows", "packed rows", "packed rows, flex")
"""The baselines, compiled by inductor: padded rows; packed rows with FlashAttention, and with FlexAttention."""
_DETAILED = "overlap 60 %"
"""The batch whose slowest kernels are named."""


@dataclass(frozen=True)
class Run:
    """One model one way.

    Attributes:
        model: "0.6B" or "4B", the sizes of Qwen3; "tiny" in rehearsal.
        checkpointing: whether activations are computed again in the backward.
        way: one of treefx's, or of rows.
        sharing: the batches. Rows are compiled for one shape, which all batches of a run have.
    """

    model: str
    checkpointing: bool
    way: str
    sharing: tuple[str, ...]

    @property
    def name(self) -> str:
        """As a table shows it."""
        batches = self.sharing[0] if len(self.sharing) == 1 else f"{len(self.sharing)} batches from {self.sharing[0]}"
        return f"{self.of_model}, {self.way}, {batches}"

    @property
    def of_model(self) -> str:
        """The model, in words."""
        return f"Qwen3 {self.model}{', checkpointing' if self.checkpointing else ''}"


def _ways(model: str, checkpointing: bool, *sharing: str, ours: Sequence[str] = OURS[:1]) -> list[Run]:
    """Make runs of all ways; treefx takes batches that share, and the others apart."""
    shared = tuple(name for name in sharing if name != _UNSHARED)
    runs = [Run(model, checkpointing, way, shared) for way in ours]
    runs += [Run(model, checkpointing, OURS[0], (_UNSHARED,))] if _UNSHARED in sharing else []
    return runs + [Run(model, checkpointing, way, group) for group in _by_shape(sharing) for way in ROWS]


def _by_shape(sharing: Sequence[str]) -> list[tuple[str, ...]]:
    """The batches grouped by the lengths of their rows: a group is compiled once."""
    groups: dict[Any, list[str]] = {}
    for name in sharing:
        lengths = tuple(sum(tokens for _, tokens in row) for row in SHARING[name])
        groups.setdefault(lengths, []).append(name)
    return [tuple(group) for group in groups.values()]


_UNSHARED, _CHECKPOINTED = "overlap 0 %", "GRPO 8 x 8"
_SMALL = tuple(name for name in SHARING if name != _CHECKPOINTED)
STEP = (
    *sorted(_ways("0.6B", False, *_SMALL, ours=OURS), key=lambda run: run.way not in OURS),  # they compile longest
    *_ways("0.6B", True, _CHECKPOINTED),
    *_ways("4B", True, "tau-bench, 8 turns", _CHECKPOINTED),
)
"""A batch that shares nothing runs the ordinary graph, which is compiled apart."""
FIRST = tuple(Run("0.6B", False, way, (_DETAILED,)) for way in (OURS[2], OURS[0], OURS[3], ROWS[0]))
"""First steps: one process at a time, empty caches."""


def rehearsed(run: Run) -> Run:
    """Return the run with a tiny model; its batches get a hundredth of their tokens."""
    return replace(run, model="tiny")


def chosen(run: Run, batches: Sequence[str]) -> Run | None:
    """Return the run with those of its batches that are named, or None if there is none."""
    kept = tuple(name for name in run.sharing if name in batches)
    return replace(run, sharing=kept) if kept else None


def step(scale: Scale, run: Run) -> dict[str, Any]:
    """Time forward and backward of the run's batches, and measure their peaks.

    Reports one record per batch right after its measurement: ``model``, ``way``, ``batch``, and what `_measure`
    returns.

    Returns:
        ``wrong``; ``graphs`` that were compiled, and ``compile_s``, seconds until the first of them ran.
    """
    torch._dynamo.reset()
    if run.way in OURS and run.way != OURS[3]:
        patiently(lambda: _compile_kernels(scale, run))
    began = time.perf_counter()
    model = patiently(lambda: _make_model(scale, run))
    turn = Turn(scale.turn, model, scale.together, scale.compiled_by)
    wrong: list[str] = []
    with turn.taken_when_compiled(), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        called = _compiled(scale, run, model)
        for sharing in run.sharing:
            scale.report(sharing)
            record = {"model": run.of_model, "way": run.way, "batch": sharing, "wrong": []}
            try:
                record |= patiently(partial(_measure, scale, run, sharing, model, called, turn), turn.give)
            except torch.OutOfMemoryError:
                record["problem"] = "does not fit the device"
                record["wrong"] = [f"treefx must fit the device, and does not: {sharing}"] if run.way in OURS else []
            wrong += record["wrong"]
            scale.report(record)
    turn.give()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compile_s = round((turn.compiled_at or time.perf_counter()) - began, 1)
    return {"graphs": graphs, "compile_s": compile_s, "wrong": wrong}


def first_step(scale: Scale, run: Run) -> dict[str, Any]:
    """Time the first step of a process that finds nothing compiled, and a later step.

    Returns:
        ``first_s`` and ``later_s``: seconds of the first step, compilers included, and of the fifth.
    """
    torch._dynamo.reset()
    model = _make_model(scale, run)
    inputs = _inputs(scale, run, model, run.sharing[0], 0)
    called = _compiled(scale, run, model)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        _once(scale, model, called, inputs)
        seconds.append(time.perf_counter() - began)
    return {"first_s": round(seconds[0], 2), "later_s": round(seconds[-1], 4), "wrong": []}


def _make_model(scale: Scale, run: Run) -> Any:
    """The model with random weights that are the same for every way, on the device."""
    with torch.device(scale.device):  # random weights of this vocabulary take a processor half a minute
        model: Any = make_model(_config(scale, run), dtype=scale.dtype)
    if run.checkpointing:
        model.gradient_checkpointing_enable()
    return model.to(scale.device)


def _compile_kernels(scale: Scale, run: Run) -> None:
    """Call the attention of the model's layers once on every tree, while others compile."""
    config = _config(scale, run)
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim)
    for sharing in run.sharing:
        ends, (q, k, v), grad = draw(scale, tree_of(_rows(run, sharing)), heads)
        torch.autograd.grad(tree_attention(q, k, v, ends), (q, k, v), grad)


def _inputs(scale: Scale, run: Run, model: Any, sharing: str, number: int) -> dict[str, Any]:
    """The arguments of the model for fresh batch ``number`` of this kind."""
    batch = _batch(scale, run, model, sharing, number)
    return pack_rows(batch) if run.way in ROWS[1:] else dict(batch.model_inputs())


def _batch(scale: Scale, run: Run, model: Any, sharing: str, number: int) -> Batch:
    return make_batch(scale, varied(_rows(run, sharing), number), model.config.vocab_size, number)


def _once(scale: Scale, model: Any, called: Callable[..., Any], inputs: dict[str, Any]) -> tuple[float, float]:
    """Forward and backward: the loss, and the seconds until the host has launched all."""
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    loss = called(**inputs, use_cache=False).loss
    loss.backward()
    host = time.perf_counter() - began
    value = float(loss.detach())
    scale.synchronize()
    return value, host


def _measure(scale: Scale, run: Run, sharing: str, model: Any, called: Any, turn: Turn) -> dict[str, Any]:
    """Measure one kind of batch.

    Returns:
        ``raw_tokens`` and ``tokens``; ``seconds`` of a step on one batch again and again, ``fresh_seconds`` on batches
        that no step has seen, ``loop_seconds`` on those where no loss is read between them; ``host_ms``,
        ``device_ms``, ``launches``, ``peak_mib``, ``loss``, ``norms`` of gradients by parameter, and the slowest
        ``kernels``.
    """
    batches = [_inputs(scale, run, model, sharing, number) for number in range(1 + FRESH)]
    once = partial(_once, scale, model, called)
    turn.take_again()
    once(batches[0])  # compiles
    turn.take()
    once(batches[0])
    timed = _repeated(once, batches[0])
    found = {**_tokens(_batch(scale, run, model, sharing, 0)), **timed, **_fresh(scale, model, called, batches[1:])}
    with track_peak(scale.device) as peak:
        once(batches[0])
    device_s, launches, kernels = _on_device(scale, lambda: once(batches[0]))
    loss, _ = once(batches[0])
    found |= {"peak_mib": round(peak.bytes / 2**20, 1), "device_ms": round(1000 * device_s, 3)}
    found |= {"launches": launches, "loss": loss}
    return {**found, "norms": _norms(model), **({"kernels": kernels} if sharing == _DETAILED else {})}


def _repeated(once: Callable[[dict[str, Any]], tuple[float, float]], inputs: dict[str, Any]) -> dict[str, Any]:
    seconds, hosts = [], []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        hosts.append(once(inputs)[1])
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds), "host_ms": round(1000 * statistics.median(hosts), 3)}


def _fresh(scale: Scale, model: Any, called: Any, batches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Run steps on batches with separate forests; time the second half without reading a loss."""
    half = len(batches) // 2
    seconds = []
    for inputs in batches[:half]:
        began = time.perf_counter()
        _once(scale, model, called, inputs)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    for inputs in batches[half:]:
        model.zero_grad(set_to_none=True)
        called(**inputs, use_cache=False).loss.backward()
    scale.synchronize()
    loop = (time.perf_counter() - began) / (len(batches) - half)
    return {"fresh_seconds": statistics.median(seconds), "loop_seconds": loop}


def _tokens(batch: Batch) -> dict[str, int]:
    distinct = Forest.from_padded(batch.input_ids.cpu(), batch.attention_mask.cpu()).num_tokens
    return {"raw_tokens": batch.raw_tokens, "tokens": distinct}


def _norms(model: torch.nn.Module) -> dict[str, float]:
    norms = {name: weight.grad.float().norm() for name, weight in model.named_parameters() if weight.grad is not None}
    return {name: float(norm) for name, norm in norms.items()}


def _on_device(scale: Scale, call: Callable[[], object]) -> tuple[float, int, list[tuple[str, float, int]]]:
    """Return seconds and number of kernels in a call, and the slowest of them."""
    kind = ProfilerActivity.CPU if scale.rehearsal else ProfilerActivity.CUDA
    with profile(activities=[kind]) as trace:
        call()
    name = "self_cpu_time_total" if scale.rehearsal else "self_device_time_total"
    events = sorted(trace.key_averages(), key=lambda event: -getattr(event, name))
    slowest = [(event.key[:80], round(getattr(event, name) / 1e3, 3), event.count) for event in events[:_KERNELS]]
    launches = sum(event.count for event in events if getattr(event, name))
    return float(sum(getattr(event, name) for event in events)) / 1e6, launches, slowest


def _rows(run: Run, sharing: str) -> Rows:
    return shortened(SHARING[sharing]) if run.model == "tiny" else SHARING[sharing]


def _compiled(scale: Scale, run: Run, model: Any) -> Callable[..., Any]:
    """The model compiled the run's way.

    In rehearsal treefx generates nothing, but rows are compiled by inductor: whether their backward is compiled before
    the device is taken shows on the CPU too.
    """
    if run.way in ROWS[1:]:
        lengths = _batch(scale, run, model, run.sharing[0], 0).attention_mask.sum(1).tolist()
        attend_packed_rows(model, lengths, FLEX if run.way == ROWS[2] else VARLEN)
    if run.way in ROWS:
        return torch.compile(model, backend="inductor", dynamic=False)
    inner = "aot_eager" if scale.rehearsal else "inductor"
    if run.way == OURS[3]:
        treefx.convert(model, pack_lm_head=True)
        for block in model.model.layers:
            block.compile(backend=inner, dynamic=True)
        return model  # type: ignore[no-any-return]
    options: dict[str, Any] = {"inner": inner, "regions": True if run.way == OURS[2] else "auto"}
    graphs = run.way == OURS[1] and not scale.rehearsal
    options |= {"mode": "reduce-overhead", "regions": False} if graphs else {}
    return torch.compile(model, backend="treefx", options=options, dynamic=True if len(run.sharing) > 1 else None)


def _config(scale: Scale, run: Run) -> Any:
    if run.model == "tiny":
        return make_config("qwen3", vocab_size=512, hidden_size=64, layers=1)
    same = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": _VOCABULARY, "max_position_embeddings": 40_960}
    fields = {**_QWEN3[run.model], **same, "tie_word_embeddings": True, "use_cache": False}
    fields |= {} if scale.layers is None else {"num_hidden_layers": scale.layers}
    return require_transformers().AutoConfig.for_model("qwen3", **fields)
