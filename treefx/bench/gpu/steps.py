"""The stage of whole training steps: treefx against inductor on the same padded rows, and the bound of their tokens."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treefx.bench.gpu.scale import Scale
from treefx.bench.job.models import make_config, make_model, require_transformers
from treefx.data import Batch
from treefx.forests.forest import Forest
from treefx.planning.cost.memory import track_peak

__all__ = ["STEP", "Step", "rehearsed", "step"]

_VOCABULARY = 151_936
_QWEN3 = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_REPEATS = 3
_CLOSE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""How far the losses of two ways may be apart, relative."""


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
    """Time forward and backward of the same batch with treefx and with inductor, and measure their peaks."""
    batch = _batch(scale, case)
    forest = Forest.from_padded(batch.input_ids.cpu(), batch.attention_mask.cpu())
    ways = {name: _measure(scale, case, batch, name) for name in ("inductor", "treefx")}
    losses = [found["loss"] for found in ways.values()]
    apart = abs(losses[0] - losses[1]) / abs(losses[0])
    record: dict[str, Any] = {
        "raw_tokens": batch.raw_tokens,
        "tokens": forest.num_tokens,
        "loss_apart": apart,
        "packed_rows": "not measured: rows packed for flash attention are no part of this stage yet",
    }
    if not apart <= _CLOSE[scale.dtype]:  # NaN too
        return {**record, "wrong": [f"losses must be {_CLOSE[scale.dtype]:.0e} apart at most, got {apart:.1e}"]}
    bound = batch.raw_tokens / forest.num_tokens
    speed_up = ways["inductor"]["seconds"] / ways["treefx"]["seconds"]
    for name, found in ways.items():
        record |= {
            f"{name}_raw_tokens_per_s": round(batch.raw_tokens / found["seconds"]),
            f"{name}_seconds": found["seconds"],
            f"{name}_peak_mib": found["peak_mib"],
            f"{name}_first_step_s": found["first_step_s"],
        }
    more = {"speed_up": round(speed_up, 3), "token_bound": round(bound, 3), "of_bound": round(speed_up / bound, 3)}
    return {**record, **more, "wrong": []}


def _measure(scale: Scale, case: Step, batch: Batch, backend: str) -> dict[str, float]:
    """Seconds (the median of some), peak, and the loss before any update; the first step compiles."""
    torch._dynamo.reset()
    model = make_model(_config(case), dtype=scale.dtype).to(scale.device)
    if case.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    compiled = torch.compile(model, **_compiler(scale, backend))

    def run() -> float:
        loss = compiled(**batch.model_inputs(), use_cache=False).loss
        loss.backward()
        value = float(loss.detach())
        scale.synchronize()
        model.zero_grad(set_to_none=True)
        return value

    began = time.perf_counter()
    run()
    first, seconds = time.perf_counter() - began, []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    with track_peak(scale.device) as peak:
        loss = run()
    found = {"seconds": statistics.median(seconds), "first_step_s": round(first, 1), "loss": loss}
    return {**found, "peak_mib": round(peak.bytes / 2**20, 1)}


def _compiler(scale: Scale, backend: str) -> dict[str, Any]:
    """In rehearsal nothing is generated: what inductor makes of a graph on the CPU is of no interest here."""
    if not scale.rehearsal:
        return {"backend": backend}
    return (
        {"backend": "aot_eager"} if backend == "inductor" else {"backend": backend, "options": {"inner": "aot_eager"}}
    )


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
