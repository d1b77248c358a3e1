"""The stage of whole training steps: treefx against inductor on padded and on packed rows, and the bound of tokens."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treefx.bench.gpu.packed_rows import attend_packed_rows, pack_rows
from treefx.bench.gpu.scale import Scale
from treefx.bench.job.models import make_config, make_model, require_transformers
from treefx.data import Batch
from treefx.forests.forest import Forest
from treefx.planning.cost.memory import track_peak

__all__ = ["STEP", "WAYS", "Step", "rehearsed", "step"]

_VOCABULARY = 151_936
_QWEN3 = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_REPEATS = 3
WAYS = ("padded_rows", "packed_rows", "treefx")
"""Padded rows, rows in one with flash attention, both compiled by inductor, and what they are held against."""
_CLOSE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""How far losses and norms of gradients of two ways may be apart, relative."""


Rows = tuple[tuple[tuple[int, int], ...], ...]
"""Of every row its pieces: a number that names the piece among those that follow the same ones, and its tokens."""


@dataclass(frozen=True)
class Step:
    """One model on one batch.

    Attributes:
        model: "0.6B" or "4B", the sizes of Qwen3; "tiny" in rehearsal.
        sharing: which batch.
        rows: of every row its pieces.
        checkpointing: whether activations are computed again in the backward.
    """

    model: str
    sharing: str
    rows: Rows
    checkpointing: bool

    @property
    def name(self) -> str:
        """As a table shows it."""
        return f"Qwen3 {self.model}, {self.sharing}{', checkpointing' if self.checkpointing else ''}"


def _overlap(percent: int, length: int = 2048) -> Rows:
    prefix = length * percent // 100
    return tuple(((0, prefix), (row, length - prefix)) for row in range(8))


_SHARING: dict[str, Rows] = {
    "tau-bench, 8 turns": tuple(tuple((0, 400) for _ in range(turn)) for turn in range(2, 10)),
    "ToolBench, 4 x 2 branches": tuple(((0, 1200), (a, 500), (b, 300)) for a in range(4) for b in range(2)),
    "GRPO 8 x 8": tuple(((prompt, 512), (answer, 512)) for prompt in range(8) for answer in range(8)),
    **{f"overlap {percent} %": _overlap(percent) for percent in (92, 60, 20, 0)},
}
STEP = (
    *(Step("0.6B", name, rows, False) for name, rows in _SHARING.items()),
    Step("0.6B", "GRPO 8 x 8", _SHARING["GRPO 8 x 8"], True),
    Step("4B", "tau-bench, 8 turns", _SHARING["tau-bench, 8 turns"], True),
    Step("4B", "GRPO 8 x 8", _SHARING["GRPO 8 x 8"], True),
)


def rehearsed(case: Step) -> Step:
    """Return the case with a tiny model, and a tenth of a tenth of its tokens."""
    rows = tuple(tuple((number, max(1, length // 100)) for number, length in row) for row in case.rows)
    return Step("tiny", case.sharing, rows, case.checkpointing)


def step(scale: Scale, case: Step) -> dict[str, Any]:
    """Time forward and backward of the same rows with treefx and with inductor, and measure their peaks.

    With inductor twice: padded, and behind each other in one row with flash attention.
    """
    batch = _batch(scale, case)
    tokens = Forest.from_padded(batch.input_ids.cpu(), batch.attention_mask.cpu()).num_tokens
    record: dict[str, Any] = {"raw_tokens": batch.raw_tokens, "tokens": tokens, "wrong": []}
    ways: dict[str, dict[str, float]] = {}
    for way in WAYS:
        try:
            ways[way] = _measure(scale, case, batch, way)
        except torch.OutOfMemoryError:
            record[way] = "does not fit the device"
            if way == "treefx":
                return {**record, "wrong": ["treefx must fit the device, and does not"]}
    return record | _compared(ways, batch.raw_tokens, batch.raw_tokens / tokens, _CLOSE[scale.dtype])


def _compared(ways: dict[str, dict[str, float]], raw_tokens: int, bound: float, close: float) -> dict[str, Any]:
    """How far losses and norms are apart; if that is no more than allowed, the figures and how many times faster."""
    record: dict[str, Any] = {"token_bound": round(bound, 3)}
    ours, *others = reversed(ways.values())
    for value in ("loss", "norm"):
        apart = max((abs(ours[value] / other[value] - 1) for other in others), default=0.0)
        record[f"{value}_apart"] = apart
        if not apart <= close:  # NaN too
            return {**record, "wrong": [f"{value} must be {close:.0e} apart at most, got {apart:.1e}"]}
    for way, found in ways.items():
        record |= {f"{way}_{name}": found[name] for name in ("seconds", "peak_mib", "first_step_s")}
        record[f"{way}_raw_tokens_per_s"] = round(raw_tokens / found["seconds"])
    times = {way: ways[way]["seconds"] / ours["seconds"] for way in ways if way != "treefx"}
    record |= {f"speed_up_of_{way}": round(time, 3) for way, time in times.items()}
    return record | ({"of_bound": round(min(times.values()) / bound, 3)} if times else {})


def _measure(scale: Scale, case: Step, batch: Batch, way: str) -> dict[str, float]:
    """Seconds (the median of some), peak, and loss and norm of gradients before any update; the first step compiles."""
    torch._dynamo.reset()
    model: Any = make_model(_config(case), dtype=scale.dtype).to(scale.device)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    inputs: dict[str, Any] = dict(batch.model_inputs())
    if way == "packed_rows":
        attend_packed_rows(model, batch.attention_mask.sum(1).tolist())
        inputs = pack_rows(batch)
    compiled: Any = torch.compile(model, **_compiler(scale, way))

    def run() -> float:
        model.zero_grad(set_to_none=True)
        loss = compiled(**inputs, use_cache=False).loss
        loss.backward()
        value = float(loss.detach())
        scale.synchronize()
        return value

    seconds = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    with track_peak(scale.device) as peak:
        loss = run()
    norm = float(torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()]))
    found = {"seconds": statistics.median(seconds[1:]), "first_step_s": round(seconds[0], 1)}
    return {**found, "loss": loss, "norm": norm, "peak_mib": round(peak.bytes / 2**20, 1)}


def _compiler(scale: Scale, way: str) -> dict[str, Any]:
    """In rehearsal nothing is generated: what inductor makes of a graph on the CPU is of no interest here."""
    if way != "treefx":
        return {"backend": "aot_eager" if scale.rehearsal else "inductor"}
    return {"backend": way, "options": {"inner": "aot_eager"}} if scale.rehearsal else {"backend": way}


def _config(case: Step) -> Any:
    if case.model == "tiny":
        return make_config("qwen3", vocab_size=512, hidden_size=64, layers=1)
    same = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": _VOCABULARY, "max_position_embeddings": 40_960}
    fields = {**_QWEN3[case.model], **same, "tie_word_embeddings": True, "use_cache": False}
    return require_transformers().AutoConfig.for_model("qwen3", **fields)


def _batch(scale: Scale, case: Step) -> Batch:
    """Rows padded on the right; pieces with equal numbers behind equal pieces have equal tokens."""
    vocabulary = 512 if case.model == "tiny" else _VOCABULARY
    rows = [_tokens(row, vocabulary) for row in case.rows]
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = torch.from_numpy(row), 1
    ids, mask = ids.to(scale.device), mask.to(scale.device)
    return Batch(ids, mask, ids.masked_fill(mask == 0, -100))


def _tokens(row: tuple[tuple[int, int], ...], vocabulary: int) -> Any:
    pieces = []
    for place, (number, length) in enumerate(row):
        random = np.random.default_rng([*(known for known, _ in row[:place]), number])
        piece = random.integers(1, vocabulary, length)
        if length:
            piece[0] = 1 + number  # or pieces may begin alike by chance
        pieces.append(piece)
    return np.concatenate(pieces)
