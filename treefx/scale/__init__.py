"""One step over many processes: which rows of a forest run on which rank.

In: a forest, or the lengths and fingerprints of rows that lie on many machines, and what tokens cost. Out: a forest per
rank (``assign``) whose losses add up to the whole's, row numbers per rank (``assign_rows``), a rank's tokens of one
forest that all run together (``context``), a row that ranks can divide (``even_row``), or what a step would cost
(``predict_step``).

Order of imports, each only of what stands before an arrow::

    outline, agreement -> price -> ranges -> packing -> split, rivals, pieces -> assign, context, even -> step
    -> __init__
"""

from treefx.scale.assign import Assignment, assign, assign_rows
from treefx.scale.context import context
from treefx.scale.even import even_row
from treefx.scale.outline import Outline, fingerprint
from treefx.scale.pieces import TokenSplit, split_tokens
from treefx.scale.split import Split
from treefx.scale.step import Step, predict_step

__all__ = [
    "Assignment", "Outline", "Split", "Step", "TokenSplit", "assign", "assign_rows", "context", "even_row",
    "fingerprint", "predict_step", "split_tokens",
]  # fmt: skip
