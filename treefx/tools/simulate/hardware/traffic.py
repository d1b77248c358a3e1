"""What a simulated run took and moved."""

from dataclasses import dataclass, field

__all__ = ["Run", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of memory by what moved them, such as ``gemm reads`` or ``rs stores``."""

    bytes_of: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: "Traffic") -> "Traffic":
        names = {**self.bytes_of, **other.bytes_of}
        return Traffic({name: self.bytes_of.get(name, 0.0) + other.bytes_of.get(name, 0.0) for name in names})

    def total(self, *names: str) -> float:
        """Bytes of some movers, or of all."""
        return sum(self.bytes_of.get(name, 0.0) for name in names or self.bytes_of)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Hold one simulated run: its time, traffic, and the time each part worked at full rate."""

    seconds: float
    traffic: Traffic
    compute_seconds: float = 0.0
    memory_seconds: float = 0.0
    memory_peak: float = 0.0
    wire_bytes: float = 0.0
    wire_seconds: float = 0.0
    tracker_peak: int = 0
    """Most groups of tiles with an entry in the tracker at once."""
