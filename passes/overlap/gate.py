"""Choose the number of chunks of a product and its collective, by measured rates.

With g the product's and c the collective's seconds, k chunks take k (g/k + o) + k (c/k + l) one after the other, where
a chunk adds o to the product and l to the collective; of that, (k - 1) times the shorter of the two overlaps with the
longer, as far as the machine does both at once.

All ranks of a group have to decide alike, or they wait for each other for ever. So only shapes and rates enter, the
rates are those that all ranks agreed on, and a size that is a symbol is never taken from the batch that happened to
come first. The widths of a product are those of a rank's share of the weights: shares are expected to be equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch import fx

from treefx.errors import ConfigError
from treefx.passes.overlap.elements import shape_of
from treefx.passes.overlap.producers import KINDS, Site, left_place

__all__ = ["CANDIDATES", "Rates"]

CANDIDATES = (1, 2, 4, 8)
_SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often a ring sends each byte of the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Hold rates of products and collectives of a machine; equal on all ranks.

    ``measure_rates`` finds them.

    Raises:
        ConfigError: A rate is not above 0, a time or the gain is negative, or ``hidden`` is not a share.
    """

    flops_per_second: float
    """FLOPs of a product per second."""
    bytes_per_second: float
    """Bytes of a tensor that go once around the ranks; an all-reduce is twice around."""
    product_seconds: float = 0.0
    """Seconds that each chunk adds to a product that is cut."""
    latency_seconds: float = 0.0
    """Latency of each collective in seconds."""
    hidden: float = 1.0
    """Which share of the shorter of a product and a collective is hidden where both run at once."""
    gain: float = 0.02
    """Share of the time that cutting has to save."""
    symbolic_rows: int | None = None
    """The number of rows that stands for one that is a symbol. None: products of such rows are left alone."""

    def __post_init__(self) -> None:
        fine = self.flops_per_second > 0.0 and self.bytes_per_second > 0.0 and 0.0 <= self.hidden <= 1.0
        if not fine or not min(self.product_seconds, self.latency_seconds, self.gain) >= 0.0:
            raise ConfigError(
                "expected rates above 0, seconds and a gain of 0 or more and a hidden share from 0 to 1; "
                f"got {asdict(self)}"
            )

    def seconds(self, flops: float, size: float, chunks: int) -> float:
        """Return the seconds of a product and its collective, cut into chunks.

        Args:
            flops: FLOPs of the product.
            size: Bytes of the whole tensor times how often they go around the ranks.
            chunks: Number of chunks.
        """
        product = flops / self.flops_per_second / chunks + (self.product_seconds if chunks > 1 else 0.0)
        collective = size / self.bytes_per_second / chunks + self.latency_seconds
        return chunks * (product + collective) - self.hidden * (chunks - 1) * min(product, collective)

    def best(self, flops: float, size: float) -> int:
        """Return the fastest number of chunks among ``CANDIDATES``; 1 where cutting does not pay.

        Args:
            flops: FLOPs of the product.
            size: Bytes of the whole tensor times how often they go around the ranks.
        """
        seconds = {chunks: self.seconds(flops, size, chunks) for chunks in CANDIDATES}
        best = min(seconds, key=lambda chunks: (seconds[chunks], chunks))
        return best if seconds[best] < (1.0 - self.gain) * seconds[1] else 1

    def chunks(self, site: Site) -> int:
        """For a place that was found in a graph."""
        size, flops = self.size_of(site.collective), sum(map(self.flops_of, site.products))
        return self.best(flops, size) if size and flops else 1

    def flops_of(self, product: fx.Node) -> float:
        """Return the FLOPs of ``mm`` or ``addmm``; 0 for rows of an unknown symbol."""
        return 2.0 * self._count(shape_of(product)) * self._depth(product)

    def size_of(self, collective: fx.Node) -> float:
        """Bytes of the whole tensor times how often a ring sends each of them; 0 as above."""
        kind = KINDS[collective.target]
        whole = collective if kind == "all_gather" else collective.args[0]
        assert isinstance(whole, fx.Node)
        return float(self._count(shape_of(whole)) * whole.meta["val"].dtype.itemsize * _SENT[kind])

    def _count(self, shape: Any) -> int:
        """Elements of a shape; 0 where nothing stands for a symbol in it."""
        return prod(size if isinstance(size, int) else self.symbolic_rows or 0 for size in shape)

    def _depth(self, product: fx.Node) -> int:
        rows = product.args[left_place(product)]
        assert isinstance(rows, fx.Node)
        depth: int = shape_of(rows)[1]
        return depth
