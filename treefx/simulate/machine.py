"""The simulated GPU and its ring: every parameter with its source."""

from dataclasses import dataclass
from math import inf

__all__ = ["SOURCES", "Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU of a ring. ``SOURCES`` says where each value is from."""

    compute_units: int = 80
    clock_hz: float = 1.4e9
    flops_per_clock: float = 1024.0
    """Half-precision operations of one compute unit, a multiply-add counting as two."""
    tile_rows: int = 256
    tile_columns: int = 128
    tile_inner: int = 32
    rows_first: bool = True
    """Workgroups go down the rows (tokens) of the output before they go to the next columns."""
    bytes_per_number: int = 2
    cache_bytes: float = 16 * 2.0**20
    cache_ways: int = 24
    memory_bytes_per_second: float = 1e12
    channels: int = 32
    request_bytes: int = 64
    update_cost: float = 1.0
    """Time of an op-and-store in memory, as a multiple of a store."""
    link_bytes_per_second: float = 150e9
    link_latency_seconds: float = 500e-9
    occupancies: tuple[tuple[float, float], ...] = ((0.75, 5.0), (0.5, 10.0), (0.25, 30.0), (0.0, inf))
    """Thresholds of T3-MCA: (a GEMM that uses at least this share of the memory, requests that may wait)."""
    least_share: float = 1.0 / 64.0
    """Share of the memory that communication gets in any case under T3-MCA."""
    group_bytes: float = 2.0**18
    """Tiles are tracked, sent and simulated in groups of about this size."""

    @property
    def flops(self) -> float:
        """Operations per second of all compute units."""
        return self.compute_units * self.clock_hz * self.flops_per_clock


SOURCES: dict[str, tuple[str, str]] = {
    "compute_units": ("published", "T3, section 5.1"),
    "clock_hz": ("published", "T3, section 5.1"),
    "cache_bytes": ("published", "T3, section 5.1"),
    "memory_bytes_per_second": ("published", "T3, section 5.1: HBM2"),
    "link_latency_seconds": ("published", "T3, section 5.1"),
    "link_bytes_per_second": (
        "calibrated",
        "T3, section 5.1: 150 GB/s, bidirectional; of the two readings, 150 or 75 GB/s each way, the one that gives "
        "the gain of near-memory reduction at 8 GPUs (7 %)",
    ),
    "bytes_per_number": ("published", "T3, section 5.2: half precision"),
    "flops_per_clock": ("assumed", "V100, the GPU with 80 units that Accel-Sim models: 8 tensor cores x 64 multiply-adds"),
    "tile_rows": ("assumed", "cuBLAS on V100: volta_fp16_s884gemm_fp16_256x128"),
    "tile_columns": ("assumed", "as tile_rows"),
    "rows_first": (
        "assumed",
        "the default order of CUTLASS; and with columns first no FC layer would be heavy on reads, as T3, section 6.1.2 "
        "says they are",
    ),
    "cache_ways": ("read", "Accel-Sim, SM7_QV100: S:32:128:24, LRU, write-back, hashed sets; the size scaled to 16 MB"),
    "update_cost": (
        "derived",
        "CCD 1, CCDL 2, 4 bank groups (Accel-Sim, SM7_QV100): an op-and-store of twice CCDL still fills the bus if "
        "consecutive updates go to different bank groups, 2 x CCDL / (4 x CCD) = 1",
    ),
    "occupancies": ("assumed", "T3, section 4.5 says that the threshold follows the intensity of the first stage"),
    "least_share": ("assumed", "T3, section 4.5 has a limit of starvation; its value is not in our sources"),
    "group_bytes": ("resolution", "halving or doubling it changes no speed-up by more than 0.5 %"),
}
"""Parameter to (kind, source). Kinds: ``published`` by the paper, ``read`` in a public configuration, ``derived`` from
such, ``assumed``, ``calibrated`` on one figure that is named, ``resolution`` of the simulation."""
