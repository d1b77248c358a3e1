"""Measure peaks of a training step on the CPU: ``treefx bench memory``.

A step is forward and backward after a first one that compiled; its peak is counted above what was held when it began
(weights), so gradients are in it. ``python -m treefx.tools.bench.memory CASE`` measures one case, given as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treefx.errors import TreefxError
from treefx.output import watch
from treefx.tools.bench.job.failures import what_failed

__all__ = ["CASES", "MeasurementError", "MemoryCase", "measure", "run"]


class MeasurementError(TreefxError):
    """A process that measured one figure failed."""


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One model on one batch: ``rows`` rows of ``prefix`` shared and ``suffix`` own tokens."""

    name: str
    rows: int = 8
    prefix: int
    suffix: int
    backend: str = "treefx"
    """A backend of ``torch.compile``, or "none"."""
    checkpointing: bool = False
    logits: str = "unused"
    """"unused": the step reads the loss alone; "read": it looks at the logits too."""
    vocab_size: int = 512
    hidden_size: int = 128
    layers: int = 4


def _cases() -> Iterator[MemoryCase]:
    for prefix in (0, 146, 219, 247):
        yield MemoryCase(name="sharing", prefix=prefix, suffix=256 - prefix)
    for backend in ("inductor", "treefx"):
        for checkpointing in (False, True):
            name = "checkpointed" if checkpointing else "not checkpointed"
            yield MemoryCase(name=name, prefix=219, suffix=37, backend=backend, checkpointing=checkpointing)
    for logits in ("read", "unused"):
        yield MemoryCase(name=f"logits {logits}", logits=logits, prefix=448, suffix=64, vocab_size=32000, layers=1)
    yield MemoryCase(
        name="vocabulary 152k", rows=4, prefix=4096, suffix=1024, vocab_size=151936, hidden_size=64, layers=1
    )


CASES = tuple(_cases())


def run(*, json_output: bool = False, inner: str = "inductor", cases: Sequence[MemoryCase] = CASES) -> list[Any]:
    """Measure every case in a separate process.

    Args:
        json_output: A program reads the result, so no progress bar is shown.
        inner: Inner compiler of treefx; "aot_eager" compiles faster and holds more.
        cases: What to measure.

    Returns:
        One record per case: ``peak_mib``, ``bytes_per_token`` (peak over distinct tokens that ran; for another
        backend over all tokens), ``saved_bytes_per_token`` (held between forward and backward, likewise),
        ``logits_mib`` (what one float32 copy of the logits of these tokens would take), ``source`` of the
        measurement, ``raw_tokens``, ``tokens`` and ``sharing_ratio`` of the batch.

    Raises:
        MeasurementError: A process failed; the message ends with its error.
    """
    bar = watch(cases, "measuring, a process each", quiet=json_output)
    return [_measure_apart(case, inner) for case in bar]


def _measure_apart(case: MemoryCase, inner: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "treefx.tools.bench.memory", json.dumps({**asdict(case), "inner": inner})]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MeasurementError(f"measuring {case.name!r} in its own process failed:\n{what_failed(done.stderr)}")
    record: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return record


def measure(case: MemoryCase, inner: str) -> dict[str, Any]:
    """Measure one case in this process."""
    # Counting starts with the first tensor: the model must not exist yet.
    from treefx.planning.cost.memory import install_allocator, track_peak

    install_allocator()
    model, step, batch = _prepare(case, inner)

    def train() -> None:
        out = step(**batch.model_inputs(), use_cache=False)
        if case.logits == "read":
            out.logits.detach().sum()
        out.loss.backward()

    for _ in range(2):  # the second step settles the use of the outputs
        train()
        model.zero_grad()
    with track_peak() as peak:
        train()
    model.zero_grad()
    with track_peak(curve=True) as forward:
        loss = step(**batch.model_inputs(), use_cache=False).loss
    saved = forward.curve[-1][1]
    loss.backward()
    return {**_figures(case, batch.raw_tokens, peak.bytes, saved), "source": peak.source}


def _prepare(case: MemoryCase, inner: str) -> tuple[Any, Any, Any]:
    """Return the model, its callable, and its batch."""
    import torch

    from treefx.tools.bench.job.models import make_config, make_model
    from treefx.tools.bench.job.synthetic import shared_prefix_batch

    config = make_config(
        "llama", vocab_size=case.vocab_size, hidden_size=case.hidden_size, layers=case.layers,
        max_positions=case.prefix + case.suffix,
    )  # fmt: skip
    model: Any = make_model(config)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = shared_prefix_batch(case.rows, case.prefix, case.suffix, case.vocab_size)
    if case.backend == "none":
        return model, model, batch
    options: Any = {"inner": inner, "min_sharing": 1.0} if case.backend == "treefx" else None
    return model, torch.compile(model, backend=case.backend, options=options), batch


def _figures(case: MemoryCase, raw_tokens: int, peak_bytes: int, saved_bytes: int) -> dict[str, Any]:
    distinct = case.prefix + case.rows * case.suffix
    ran = distinct if case.backend == "treefx" else raw_tokens
    return {
        "case": case.name,
        "backend": case.backend,
        "raw_tokens": raw_tokens,
        "tokens": distinct,
        "sharing_ratio": raw_tokens / distinct,
        "peak_mib": peak_bytes / 2**20,
        "bytes_per_token": peak_bytes // ran,
        "saved_bytes_per_token": saved_bytes // ran,
        "logits_mib": ran * case.vocab_size * 4 / 2**20,
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    chosen = given.pop("inner")
    print(json.dumps(measure(MemoryCase(**given), chosen)))
