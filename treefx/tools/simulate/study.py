"""Compare T3 on all sub-layers of the paper with the best chunks in software."""

from collections.abc import Callable
from dataclasses import dataclass

from treefx.tools.simulate.chunks import Link, best_chunks, run_chunks, wire_bytes
from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.models import MODELS, Model, sublayers
from treefx.tools.simulate.sublayer import Outcome, simulate

__all__ = ["LAUNCH_SECONDS", "Split", "run_study", "software"]

LAUNCH_SECONDS = 5e-6
"""What a chunk adds on a GPU: the launch of a kernel and of its collective (assumed)."""


@dataclass(frozen=True)
class Split:
    """Pair compute units lent to the collective with its slowdown (T3, section 3.2)."""

    units: int
    slower: float


SPLITS = (Split(0, 1.0), Split(8, 1.41), Split(16, 1.07))
"""None, as with copy engines; and the two splits of the paper."""


def run_study(
    machine: Machine, models: tuple[Model, ...] = MODELS, advance: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Simulate every sub-layer of ``models``; ``advance`` is called after each."""
    outcomes = []
    for sublayer in sublayers(models):
        outcomes.append(simulate(sublayer, machine))
        advance(outcomes[-1])
    return outcomes


def software(outcome: Outcome, machine: Machine, split: Split = SPLITS[0]) -> tuple[int, float]:
    """Return the best number of chunks for a product and its reduce-scatter, and the speed-up.

    The all-gather follows, as with T3. A chunk's collective takes its part of the time of the whole one alone; that
    both share the memory is left out.
    """
    ranks = outcome.sublayer.ranks
    size = wire_bytes("reduce_scatter", outcome.output_bytes, ranks)
    latency = (ranks - 1) * machine.link_latency_seconds
    link = Link(
        bytes_per_second=size / (outcome.rs.seconds - latency) / split.slower,
        latency_seconds=latency,
        chunk_seconds=LAUNCH_SECONDS,
        compute_taken=split.units / machine.compute_units,
    )
    chunks = best_chunks(outcome.gemm.seconds, size, link)
    if chunks == 1:
        return 1, 1.0
    seconds = run_chunks(outcome.gemm.seconds, size, link, chunks).seconds
    return chunks, outcome.sequential / (seconds + outcome.ag.seconds)
