"""Cut products and their collectives into chunks, to hide communication: T3 as a pass.

T3: arXiv 2401.16677.

In: a graph of ATen as AOTAutograd makes it of a model under ``parallelize_module``, forward or backward, and a number
    of chunks or measured rates of the machine. Out: the same graph with each product that feeds a collective, or is fed
by one, in k pieces of its rows; the collective of a piece is issued as soon as its product is, and waited for at the
first reader. A graph without collectives stays unchanged. Predictions by rates, before and after, are drawn as time
lines (``OverlapCollectives.to_html``).

Order of imports, each only of what stands before an arrow::

    cut_rows, elements -> producers -> emit -> open_sums, send_chunks, gather_chunks, gate -> time_line -> page
    -> overlap_collectives -> measure_rates
"""

from treefx.passes.overlap.gate import Rates
from treefx.passes.overlap.measure_rates import measure_rates
from treefx.passes.overlap.overlap_collectives import OverlapCollectives, overlap_collectives

__all__ = ["OverlapCollectives", "Rates", "measure_rates", "overlap_collectives"]
