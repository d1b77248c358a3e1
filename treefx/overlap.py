"""Hide communication: cut products and their collectives into chunks, as a graph pass (``treefx.passes.overlap``)."""

from treefx.passes.overlap import OverlapCollectives, Rates, measure_rates, overlap_collectives

__all__ = ["OverlapCollectives", "Rates", "measure_rates", "overlap_collectives"]
