"""One step over many processes: which rows of a forest run on which rank.

In: a forest, or the lengths and fingerprints of rows that lie on many machines, and costs of tokens. Out: a forest per
rank (``shard_rows``), with losses that add up to the whole's, row numbers per rank (``assign_rows``), a rank's tokens
of one forest that all run together (``context_parallel``), a row that ranks can divide (``pad_row``), or the predicted
cost of a step (``predict_step``). ``assign``, ``context`` and ``even_row`` are the old names of three of them.

Order of imports, each only of what stands before an arrow::

    outline, agreement -> price -> ranges -> packing -> split, rivals, pieces -> assign, context, even -> step
    -> __init__
"""

from treefx.scale.assign import Assignment, assign_rows, shard_rows
from treefx.scale.context import context_parallel
from treefx.scale.even import pad_row
from treefx.scale.outline import Outline, fingerprint
from treefx.scale.pieces import TokenSplit, split_tokens
from treefx.scale.split import Split
from treefx.scale.step import Step, predict_step

__all__ = [
    "Assignment", "Outline", "Split", "Step", "TokenSplit", "assign", "assign_rows", "context", "context_parallel",
    "even_row", "fingerprint", "pad_row", "predict_step", "shard_rows", "split_tokens",
]  # fmt: skip

assign, context, even_row = shard_rows, context_parallel, pad_row
