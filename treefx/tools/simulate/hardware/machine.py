"""The simulated GPU and its ring: every parameter with its source."""

from dataclasses import dataclass

__all__ = ["SOURCES", "Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU of a ring. ``SOURCES`` says where each value is from."""

    compute_units: int = 80
    clock_hz: float = 1.4e9
    flops_per_clock: float = 1024.0
    """Half-precision operations of one compute unit, a multiply-add counting as two."""
    tile_rows: int = 128
    tile_columns: int = 256
    tile_inner: int = 32
    """Step along the inner dimension; the next one is fetched while one is computed."""
    rows_first: bool = True
    """Workgroups go down the rows (tokens) of the output before they go to the next columns."""
    bytes_per_number: int = 2
    cache_bytes: float = 16 * 2.0**20
    cache_ways: int = 24
    memory_bytes_per_second: float = 1e12
    channels: int = 32
    request_bytes: int = 64
    batch_stores: int = 24
    """Stores that a channel serves in one go, before it turns to reads again."""
    turn_cycles: int = 19
    """Cycles that a channel loses when it turns from reads to stores and back; a request takes one."""
    link_bytes_per_second: float = 150e9
    link_latency_seconds: float = 500e-9
    occupancies: tuple[tuple[float, int], ...] = ((0.75, 5), (0.5, 10), (0.25, 30), (0.0, 64))
    """Thresholds of T3-MCA: (a GEMM that uses at least this share of the memory, requests of communication that may
    wait in a channel)."""
    group_bytes: float = 2.0**18
    """Tiles are tracked, sent and simulated in groups of about this size."""

    @property
    def flops(self) -> float:
        """Operations per second of all compute units."""
        return self.compute_units * self.clock_hz * self.flops_per_clock

    @property
    def store_cost(self) -> float:
        """Time of a store, and of an op-and-store, among reads, as a multiple of a read."""
        return 1.0 + self.turn_cycles / self.batch_stores


SOURCES: dict[str, tuple[str, str]] = {
    "compute_units": ("published", "T3, section 5.1"),
    "clock_hz": ("published", "T3, section 5.1"),
    "flops_per_clock": ("assumed", "V100, the GPU of 80 units in Accel-Sim: 8 tensor cores of 64 multiply-adds each"),
    "tile_rows": (
        "calibrated",
        "cuBLAS on V100 has the tiles 256x128 and 128x256 (volta_fp16_s884gemm); this one is nearer to the published "
        "GEMM reads, 1.56 (1.44 against 1.37)",
    ),
    "tile_columns": ("calibrated", "see tile_rows"),
    "tile_inner": ("assumed", "CUTLASS's default on V100"),
    "rows_first": (
        "assumed",
        "CUTLASS's default order; with columns first, the large FC layers would hardly read, and T3, section 6.1.2 "
        "says that they do",
    ),
    "bytes_per_number": ("published", "T3, section 5.2: half precision"),
    "cache_bytes": ("published", "T3, section 5.1"),
    "cache_ways": ("read", "Accel-Sim, SM7_QV100: 24 ways, LRU, write-back, hashed sets; enlarged to 16 MB"),
    "memory_bytes_per_second": ("published", "T3, section 5.1: HBM2, taken as reached in full by reads"),
    "channels": ("read", "Accel-Sim, SM7_QV100"),
    "request_bytes": ("assumed", "two sectors of 32 bytes"),
    "batch_stores": ("read", "Accel-Sim, SM7_QV100: the queue of stores drains from 56 to 32"),
    "turn_cycles": (
        "derived",
        "Accel-Sim, SM7_QV100: CL 12, WL 2, CDLR 3, burst 1: CL + 1 + 2 - WL to turn to stores, WL + 1 + CDLR back. An "
        "op-and-store of twice CCDL (2) in 4 bank groups still fills the bus: 2 x 2 / 4 = 1 cycle",
    ),
    "link_bytes_per_second": (
        "calibrated",
        "T3, section 5.1: 150 GB/s, bidirectional; of the two readings, 150 or 75 GB/s each way, the one nearer to the "
        "published gain of near-memory reduction on 8 GPUs, 7 %",
    ),
    "link_latency_seconds": ("published", "T3, section 5.1"),
    "occupancies": (
        "assumed",
        "T3, section 4.5: the threshold follows the intensity of the first stage; 64 is a channel's whole queue. Any "
        "of the four for all changes no mean by more than 0.2 points",
    ),
    "group_bytes": ("resolution", "half or double changes no mean by more than 1 point"),
}
"""Parameter to (kind, source). Kinds: ``published`` by the paper, ``read`` in a public configuration, ``derived`` from
such, ``assumed``, ``calibrated`` on one figure that is named, ``resolution`` of the simulation."""
