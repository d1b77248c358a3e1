"""Train one tree far larger than a step's memory: peak, and tokens per second.

The same model, forward and backward, three ways: the tree in parts under the limit; the rows one by one through the
inner compiler alone; and the tree of the first rows uncut, to see what cutting costs. Losses of the first two are
compared before any time is reported.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import treefx
from treefx.errors import TreefxError
from treefx.forests.forest import Forest
from treefx.planning.cost.memory import install_allocator, track_peak
from treefx.tools.bench.job.models import make_config, make_model, require_transformers

__all__ = ["QWEN3_600M", "agent_tree", "run"]

QWEN3_600M = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "use_cache": False,
}
"""Sizes of Qwen3 0.6B."""
_BRANCHES = (1, 4, 4, 4)
_UNCUT_ROWS = 4
_PLENTY = 1e15
_CLOSE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""How far sums of losses may be apart, relative."""


def agent_tree(tokens: int, vocabulary: int, device: torch.device) -> Forest:
    """Make a prompt with 4 tasks, 4 trials, 4 endings: 64 rows, 256 spans, 85 distinct."""
    random = np.random.default_rng(0)
    rows: list[list[int]] = [[]]
    for children in _BRANCHES:
        rows = [row + random.integers(0, vocabulary, tokens).tolist() for row in rows for _ in range(children)]
    return Forest.from_sequences(rows).to(device)


def run(
    *, model: str | None, device: str, tokens: int, memory_limit_bytes: int | None, inner: str = "inductor"
) -> list[dict[str, Any]]:
    """Measure the three ways.

    Args:
        model: path of a ``config.json``; by default a model of the size of Qwen3 0.6B.
        device: "cuda" or "cpu"; bfloat16 on the former, float32 on the latter.
        tokens: of each span of the tree.
        memory_limit_bytes: of the plan; by default the device's free memory less a tenth.
        inner: what compiles the graphs of all three ways.

    Returns:
        One record per way: `way`, `raw_tokens`, `distinct_tokens`, `parts`, `limit_mib`, `predicted_mib`, `peak_mib`,
        `seconds` (of a second run), `raw_tokens_per_s`, `distinct_tokens_per_s`, `loss`.

    Raises:
        TreefxError: the losses of parts and rows are apart.
    """
    place = torch.device(device)
    if place.type == "cpu":
        install_allocator()  # before the model, whose gradients are counted when they are freed
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    config = _default_config() if model is None else make_config(model, vocab_size=1)
    network = make_model(config, dtype=dtype).to(place)
    forest = agent_tree(tokens, config.vocab_size, place)
    parts = _in_parts(network, forest, inner, memory_limit_bytes)
    rows = _row_by_row(network, forest, inner)
    apart = abs(parts["loss"] - rows["loss"]) / abs(rows["loss"])
    if apart > _CLOSE[dtype]:
        raise TreefxError(
            f"the loss in parts is {parts['loss']:.6g}, row by row {rows['loss']:.6g}: {apart:.1e} apart where "
            f"{_CLOSE[dtype]:.0e} is allowed, so no time is reported"
        )
    few = Forest.from_sequences(forest.sequences()[:_UNCUT_ROWS]).to(place)
    return [parts, rows, _in_parts(network, few, inner, _PLENTY)]


def _default_config() -> Any:
    return require_transformers().AutoConfig.for_model("qwen3", **QWEN3_600M)


def _in_parts(network: torch.nn.Module, forest: Forest, inner: str, limit: float | None) -> dict[str, Any]:
    compiled = torch.compile(network, backend="treefx", options={"inner": inner})
    profile = treefx.profile(compiled, forest)
    plan = treefx.plan(forest, profile, "auto" if limit is None else limit)

    def step() -> torch.Tensor:
        return treefx.backward(compiled, plan, treefx.losses.sft, progress=True)

    return {
        "way": "uncut, first rows" if limit == _PLENTY else "parts",
        "parts": len(plan.parts),
        "limit_mib": None if limit == _PLENTY else plan.memory_limit_bytes / 2**20,
        "predicted_mib": plan.peak_bytes / 2**20,
        **_measure(network, forest, step),
    }


def _row_by_row(network: torch.nn.Module, forest: Forest, inner: str) -> dict[str, Any]:
    """Every row alone: unpadded, no prefix shared, activations of one row held at a time."""
    compiled = torch.compile(network, backend=inner)
    sequences = forest.sequences()

    def step() -> torch.Tensor:
        total = torch.zeros((), device=forest.device)
        for row in sequences:
            logits = compiled(input_ids=row[None], use_cache=False).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    return {"way": "row by row", "parts": len(sequences), **_measure(network, forest, step)}


def _measure(network: torch.nn.Module, forest: Forest, step: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Peak and time of a second step; the first one compiles."""
    on_gpu = forest.device.type == "cuda"
    held = sum(x.numel() * x.element_size() for x in (*network.parameters(), *network.buffers()))
    step()
    network.zero_grad(set_to_none=True)
    with track_peak(forest.device) as peak:
        started = time.perf_counter()
        loss = float(step())  # waits for the device
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    network.zero_grad(set_to_none=True)
    return {
        "raw_tokens": forest.raw_tokens,
        "distinct_tokens": forest.num_tokens,
        "peak_mib": (peak.bytes + held) / 2**20,
        "seconds": seconds,
        "raw_tokens_per_s": forest.raw_tokens / seconds,
        "distinct_tokens_per_s": forest.num_tokens / seconds,
        "loss": loss,
    }
