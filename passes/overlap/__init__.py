"""Products and their collectives in chunks, so that sending hides behind computing: T3 (arXiv 2401.16677) as a pass.

In: a graph of ATen as AOTAutograd makes it of a model under ``parallelize_module``, forward or backward, and a number
of chunks or what was measured of the machine. Out: the same graph with each product that feeds a collective, or is fed
by one, in k pieces of its rows; the collective of a piece is issued as soon as its product is, and waited for where
its result is first read. A graph without collectives is left as it is. What rates predict of a graph, before and after,
is drawn as time lines (``OverlapCollectives.to_html``).

Order of imports, each only of what stands before an arrow::

    cut_rows, elements -> producers -> emit -> open_sums, send_chunks, gather_chunks, gate -> time_line -> page
    -> overlap_collectives -> measure_rates
"""

from treefx.passes.overlap.gate import Rates
from treefx.passes.overlap.measure_rates import measure_rates
from treefx.passes.overlap.overlap_collectives import OverlapCollectives, overlap_collectives

__all__ = ["OverlapCollectives", "Rates", "measure_rates", "overlap_collectives"]
