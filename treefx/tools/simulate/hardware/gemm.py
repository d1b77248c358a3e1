"""Model a tiled matrix product: waves of workgroups, and reads behind a cache."""

from dataclasses import dataclass
from math import ceil, exp

from treefx.tools.simulate.hardware.machine import Machine

__all__ = ["Gemm", "Waves", "hit_rate", "plan_waves"]


@dataclass(frozen=True)
class Gemm:
    """The product of [rows, inner] and [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Operations, a multiply-add counting as two."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Waves:
    """Describe a product on a machine: ``tiles``, ``per_wave`` at once, ``seconds`` each.

    ``reads`` and ``output`` are bytes of the whole product.
    """

    tiles: int
    per_wave: int
    seconds: float
    reads: float
    output: float
    fetched_ahead: float
    """Part of its reads that a wave requests before it needs them: one step along the inner dimension."""

    @property
    def count(self) -> int:
        """Number of waves; the last may be partly filled."""
        return ceil(self.tiles / self.per_wave)

    def tiles_of(self, wave: int) -> int:
        """Tiles of a wave."""
        return min(self.per_wave, self.tiles - wave * self.per_wave)

    def demand(self) -> float:
        """Bytes per second that a full wave moves if the memory does not hold it up."""
        return (self.reads + self.output) * self.per_wave / self.tiles / self.seconds


def hit_rate(distance: float, capacity: float, ways: int) -> float:
    """How likely a line is still in a cache after ``distance`` other bytes were touched.

    A set keeps its ``ways`` lines that were used last. Sets are hashed, so the number of the other lines that fell
    into the line's own set is Poisson with mean ``ways * distance / capacity`` (A. J. Smith, A Comparative Study of
    Set Associative Memory Mapping Algorithms, 1978); the line stays if there are fewer than ``ways``.
    """
    mean = ways * distance / capacity
    if mean > 30.0 * ways:
        return 0.0
    term = total = exp(-mean)
    for others in range(1, ways):
        term *= mean / others
        total += term
    return total


def plan_waves(gemm: Gemm, machine: Machine, *, stores_cached: bool) -> Waves:
    """Cut a product into waves on a machine.

    ``stores_cached``: the output passes through the cache, and displaces inputs there; T3 stores past it.
    """
    rows, columns = ceil(gemm.rows / machine.tile_rows), ceil(gemm.columns / machine.tile_columns)
    flops = 2.0 * machine.tile_rows * machine.tile_columns * gemm.inner
    return Waves(
        tiles=rows * columns,
        per_wave=machine.compute_units,
        seconds=flops * machine.compute_units / machine.flops,
        reads=_reads(gemm, machine, stores_cached),
        fetched_ahead=min(1.0, machine.tile_inner / gemm.inner),
        output=float(gemm.rows * gemm.columns * machine.bytes_per_number),
    )


def _reads(gemm: Gemm, machine: Machine, stores_cached: bool) -> float:
    """Return the bytes read from memory.

    The operand along which tiles go is used again for every panel of the other one; the panel of the other one is used
    again by every wave that its tiles fill.
    """
    sides = [(gemm.rows, machine.tile_rows), (gemm.columns, machine.tile_columns)]
    (fast, fast_tile), (slow, slow_tile) = sides if machine.rows_first else reversed(sides)
    strips, panels = ceil(fast / fast_tile), ceil(slow / slow_tile)
    row = gemm.inner * machine.bytes_per_number
    tile = fast_tile * slow_tile * machine.bytes_per_number if stores_cached else 0
    wave = machine.compute_units

    again = max(strips, wave)  # tiles from one use of a strip to the next
    kept = _hits(fast * row + ceil(again / strips) * slow_tile * row + again * tile, machine)
    passes = max(1.0, strips * panels / again)
    fast_reads = fast * row * (1.0 + (passes - 1.0) * (1.0 - kept))

    kept = _hits((min(wave, strips) * fast_tile + slow_tile) * row + wave * tile, machine)
    uses = max(1.0, strips / wave)
    return fast_reads + slow * row * (1.0 + (uses - 1.0) * (1.0 - kept))


def _hits(distance: float, machine: Machine) -> float:
    return hit_rate(distance, machine.cache_bytes, machine.cache_ways)
