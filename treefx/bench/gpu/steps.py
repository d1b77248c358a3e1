"""The stage of whole training steps: treefx against inductor on padded and on packed rows, and the bound of tokens.

A model of 28 layers compiles for minutes and runs for a fraction of a second: models compile side by side, and take
the device in turn.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from treefx.bench.gpu.batches import SHARING, Rows, make_batch, shortened, tree_of
from treefx.bench.gpu.packed_rows import attend_packed_rows, pack_rows
from treefx.bench.gpu.scale import Heads, Scale, draw
from treefx.bench.gpu.turns import Turn, patiently
from treefx.bench.job.models import make_config, make_model, require_transformers
from treefx.data import Batch
from treefx.forests.forest import Forest
from treefx.kernels import tree_attention
from treefx.planning.cost.memory import track_peak

__all__ = ["OURS", "ROWS", "STEP", "Run", "rehearsed", "step"]

_VOCABULARY = 151_936
_QWEN3 = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_REPEATS = 5
OURS = ("treefx", "treefx, regions")
ROWS = ("packed rows", "padded rows")
"""Rows in one with flash attention, and padded rows, both compiled by inductor: what treefx is held against."""


@dataclass(frozen=True)
class Run:
    """One model one way.

    Attributes:
        model: "0.6B" or "4B", the sizes of Qwen3; "tiny" in rehearsal.
        checkpointing: whether activations are computed again in the backward.
        way: one of treefx's, or of rows.
        sharing: the batches. Treefx takes them all as they come; inductor is compiled for the shape of one.
    """

    model: str
    checkpointing: bool
    way: str
    sharing: tuple[str, ...]

    @property
    def name(self) -> str:
        """As a table shows it."""
        batches = self.sharing[0] if len(self.sharing) == 1 else f"{len(self.sharing)} batches"
        return f"{self.of_model}, {self.way}, {batches}"

    @property
    def of_model(self) -> str:
        """The model, in words."""
        return f"Qwen3 {self.model}{', checkpointing' if self.checkpointing else ''}"


def _ways(model: str, checkpointing: bool, *sharing: str, ours: Sequence[str] = OURS) -> list[Run]:
    runs = [Run(model, checkpointing, way, sharing) for way in ours]
    return runs + [Run(model, checkpointing, way, (one,)) for one in sharing for way in ROWS]


_UNSHARED, _CHECKPOINTED = "overlap 0 %", "GRPO 8 x 8"
_SHARED = tuple(name for name in SHARING if name not in (_UNSHARED, _CHECKPOINTED))
_SMALL = (*_ways("0.6B", False, *_SHARED), *_ways("0.6B", False, _UNSHARED, ours=("treefx",)))
STEP = (
    *sorted(_SMALL, key=lambda run: run.way not in OURS),  # they compile longest
    *_ways("0.6B", True, _CHECKPOINTED, ours=("treefx",)),
    *_ways("4B", True, "tau-bench, 8 turns", _CHECKPOINTED, ours=("treefx",)),
)
"""What shares nothing runs the ordinary graph, which is compiled apart."""


def rehearsed(run: Run) -> Run:
    """Return the run with a tiny model; its batches get a hundredth of their tokens."""
    return replace(run, model="tiny")


def step(scale: Scale, run: Run) -> dict[str, Any]:
    """Time forward and backward of the run's batches, and measure their peaks.

    Returns:
        ``wrong``; ``graphs`` that were compiled; and in ``steps`` by batch what is compared: tokens, seconds of a step
        and of the kernels in it, peak, loss, and the norms of the gradients before any update.
    """
    torch._dynamo.reset()
    if run.way in OURS:
        patiently(lambda: _compile_kernels(scale, run))
    model = patiently(lambda: _make_model(scale, run))
    turn, steps, wrong = Turn(scale.turn, model), {}, []
    with turn.taken_when_compiled():
        for sharing in run.sharing:
            try:
                steps[sharing] = patiently(partial(_measure, scale, run, sharing, model, turn), turn.give)
            except torch.OutOfMemoryError:
                steps[sharing] = {"problem": "does not fit the device"}
                wrong += [f"treefx must fit the device, and does not: {sharing}"] if run.way in OURS else []
    turn.give()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"model": run.of_model, "way": run.way, "graphs": graphs, "steps": steps, "wrong": wrong}


def _make_model(scale: Scale, run: Run) -> Any:
    with torch.device(scale.device):
        model: Any = make_model(_config(run), dtype=scale.dtype)
    if run.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _compile_kernels(scale: Scale, run: Run) -> None:
    """Call the attention of the model's layers once on every tree, while others still compile too."""
    config = _config(run)
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim)
    for sharing in run.sharing:
        ends, (q, k, v), grad = draw(scale, tree_of(_rows(run, sharing)), heads)
        torch.autograd.grad(tree_attention(q, k, v, ends), (q, k, v), grad)


def _measure(scale: Scale, run: Run, sharing: str, model: Any, turn: Turn) -> dict[str, Any]:
    batch = make_batch(scale, _rows(run, sharing), model.config.vocab_size)
    inputs: dict[str, Any] = dict(batch.model_inputs())
    if run.way == "packed rows":
        attend_packed_rows(model, batch.attention_mask.sum(1).tolist())
        inputs = pack_rows(batch)
    compiled: Any = torch.compile(model, **_compiler(scale, run))

    def once() -> float:
        model.zero_grad(set_to_none=True)
        loss = compiled(**inputs, use_cache=False).loss
        loss.backward()
        value = float(loss.detach())
        scale.synchronize()
        return value

    turn.take_again()
    once()  # compiles
    turn.take()
    once()
    return {**_tokens(batch), **_timed(scale, once), "norms": _norms(model)}


def _timed(scale: Scale, once: Callable[[], float]) -> dict[str, Any]:
    """Seconds are the median of some; then the peak, and how long the device works."""
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    with track_peak(scale.device) as peak:
        once()
    found = {"seconds": statistics.median(seconds), "peak_mib": round(peak.bytes / 2**20, 1)}
    return {**found, "device_seconds": _device_seconds(scale, once), "loss": once()}


def _tokens(batch: Batch) -> dict[str, int]:
    distinct = Forest.from_padded(batch.input_ids.cpu(), batch.attention_mask.cpu()).num_tokens
    return {"raw_tokens": batch.raw_tokens, "tokens": distinct}


def _norms(model: torch.nn.Module) -> dict[str, float]:
    norms = {name: weight.grad.float().norm() for name, weight in model.named_parameters() if weight.grad is not None}
    return {name: float(norm) for name, norm in norms.items()}


def _device_seconds(scale: Scale, call: Callable[[], object]) -> float:
    """How long kernels run in a call, without what lies between them."""
    kind = ProfilerActivity.CPU if scale.rehearsal else ProfilerActivity.CUDA
    with profile(activities=[kind]) as trace:
        call()
    name = "self_cpu_time_total" if scale.rehearsal else "self_device_time_total"
    return float(sum(getattr(event, name) for event in trace.key_averages())) / 1e6


def _rows(run: Run, sharing: str) -> Rows:
    return shortened(SHARING[sharing]) if run.model == "tiny" else SHARING[sharing]


def _compiler(scale: Scale, run: Run) -> dict[str, Any]:
    """In rehearsal nothing is generated: what inductor makes of a graph on the CPU is of no interest here."""
    inner = "aot_eager" if scale.rehearsal else "inductor"
    if run.way not in OURS:
        return {"backend": inner}
    options = {"inner": inner, "regions": True if run.way == OURS[1] else "auto"}
    return {"backend": "treefx", "options": options, "dynamic": True if len(run.sharing) > 1 else None}


def _config(run: Run) -> Any:
    if run.model == "tiny":
        return make_config("qwen3", vocab_size=512, hidden_size=64, layers=1)
    same = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": _VOCABULARY, "max_position_embeddings": 40_960}
    fields = {**_QWEN3[run.model], **same, "tie_word_embeddings": True, "use_cache": False}
    return require_transformers().AutoConfig.for_model("qwen3", **fields)
