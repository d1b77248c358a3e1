"""Simulate overlap in software: a product and its collective in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treefx.errors import InputError
from treefx.tools.simulate.hardware.clock import Clock
from treefx.tools.simulate.hardware.wire import Wire

__all__ = ["Link", "Timeline", "best_chunks", "run_chunks", "wire_bytes"]

CANDIDATES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a collective runs on: one after the other, in the order of issue.

    An emulated link, such as a thread that sleeps ``bytes / bytes_per_second`` for each collective it is handed, is
    ``Link(bytes_per_second=...)``, with what was measured of the rest; ``Link.as_slow_as`` states it by its ratio to
    the product.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    """From the issue of a collective to its end, without the bytes; the link is free for the next one meanwhile."""
    chunk_seconds: float = 0.0
    """What each chunk adds to the product once it is cut: a launch, and less work to fill the machine with."""
    compute_taken: float = 0.0
    """Share of the compute units that a collective takes while it runs: 0 for copy engines, T3 or a NIC."""

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0.0:
            raise InputError(f"expected a link of more than 0 bytes per second; got {self.bytes_per_second}")
        if not 0.0 <= self.compute_taken < 1.0:
            raise InputError(
                f"expected compute_taken, the share of the compute units that a collective takes, from 0 to below 1; "
                f"got {self.compute_taken}"
            )
        if not self.latency_seconds >= 0.0 or not self.chunk_seconds >= 0.0:
            raise InputError(
                f"expected times of 0 or more; got latency_seconds={self.latency_seconds}, "
                f"chunk_seconds={self.chunk_seconds}"
            )

    @classmethod
    def as_slow_as(
        cls, ratio: float, gemm_seconds: float, collective_bytes: float, *, chunk_seconds: float = 0.0
    ) -> "Link":
        """The link on which a collective takes ``ratio`` times as long as the product before it."""
        seconds = ratio * gemm_seconds
        if not seconds > 0.0:
            raise InputError(f"expected a ratio and a product of more than 0 seconds; got {ratio} and {gemm_seconds}")
        return cls(bytes_per_second=collective_bytes / seconds, chunk_seconds=chunk_seconds)


@dataclass
class Timeline:
    """Hold (start, end) seconds of every chunk's product and collective, from its issue."""

    seconds: float = 0.0
    gemms: list[tuple[float, float]] = field(default_factory=list)
    collectives: list[tuple[float, float]] = field(default_factory=list)


def wire_bytes(collective: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring.

    Args:
        collective: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        size: bytes of the whole tensor, before it is scattered or after it is gathered.
        ranks: GPUs of the ring.
    """
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    if collective not in passes:
        raise InputError(f"expected a collective among {', '.join(passes)}; got {collective!r}")
    return passes[collective] * (ranks - 1) / ranks * size


def best_chunks(
    gemm_seconds: float,
    collective_bytes: float,
    link: Link,
    *,
    candidates: Sequence[int] = CANDIDATES,
    gain: float = 0.02,
) -> int:
    """Into how many chunks to cut a product and the collective behind it; 1 leaves them alone.

    The answer depends on the arguments alone, so ranks that measured together decide alike. A gather in front of a
    product is the same in reverse, and takes as long.

    Args:
        gemm_seconds: the product uncut.
        collective_bytes: bytes that each rank sends, see ``wire_bytes``.
        link: what the collective runs on.
        candidates: numbers of chunks to choose among.
        gain: share of the time below which cutting is not worth it.
    """
    seconds = {chunks: run_chunks(gemm_seconds, collective_bytes, link, chunks).seconds for chunks in candidates}
    alone = run_chunks(gemm_seconds, collective_bytes, link, 1).seconds
    best = min(seconds, key=lambda chunks: (seconds[chunks], chunks), default=1)
    return best if best > 1 and seconds[best] < (1.0 - gain) * alone else 1


def run_chunks(gemm_seconds: float, collective_bytes: float, link: Link, chunks: int) -> Timeline:
    """Run a product in ``chunks`` parts; issue each part's collective when it is done."""
    if chunks < 1 or not gemm_seconds >= 0.0 or not collective_bytes >= 0.0:
        raise InputError(
            f"expected at least 1 chunk, and a product and a collective of 0 or more; got {chunks} chunks, "
            f"{gemm_seconds} s, {collective_bytes} bytes"
        )
    return _Chunked(gemm_seconds, collective_bytes, link, chunks).run()


class _Chunked:
    """Run a product at full speed, or slower while a collective takes compute units."""

    def __init__(self, gemm_seconds: float, collective_bytes: float, link: Link, chunks: int) -> None:
        self.clock = Clock()
        self.wire = Wire(self.clock, link.bytes_per_second, link.latency_seconds)
        self.link, self.chunks = link, chunks
        self.work = gemm_seconds / chunks + (link.chunk_seconds if chunks > 1 else 0.0)
        self.size = collective_bytes / chunks
        self.line = Timeline()
        self.running = 0
        self._event: int | None = None
        self.left = self.work
        self.since = self.started = 0.0
        self.speed = 1.0

    def run(self) -> Timeline:
        self._plan()
        self.line.seconds = self.clock.run()
        return self.line

    def _plan(self) -> None:
        """Note the progress of the chunk, and its end if nothing changes."""
        self.left -= (self.clock.now - self.since) * self.speed
        self.since = self.clock.now
        self.speed = 1.0 - self.link.compute_taken if self.running else 1.0
        self.clock.cancel(self._event)
        if len(self.line.gemms) < self.chunks:
            self._event = self.clock.after(max(0.0, self.left) / self.speed, self._end)

    def _end(self) -> None:
        issued = self.clock.now
        self.line.gemms.append((self.started, issued))
        self.started, self.since, self.left = issued, issued, self.work
        self.running += 1
        self.wire.send(self.size, lambda: self._arrive(issued))
        self._plan()

    def _arrive(self, issued: float) -> None:
        self.line.collectives.append((issued, self.clock.now))
        self.running -= 1
        self._plan()
