"""Run backbones on distinct tokens in Python: eager, sharded, or compiled by block.

In: a model of transformers. Out: the same model; hooks at the module that takes the ids pass it the packed row of a
    call, and attention reads the tree. Its output is rows to its callers and stays packed (``packed_rows``): LM head
    and log-probabilities run on distinct tokens (``row_laws``, ``row_views``), and all other readers get rows.
    Exactness is proved on a copy without weights (``skeleton``), as the backend proves it: rows are traced and
    labelled, and masks lifted (``planner``, ``frame``, ``sizes``).
    Modules with recurrences run on rows of the tree (``paths``).

Order of imports, each only of what stands before an arrow::

    seam, branches, sizes, packed_rows, sequence_parallel, readers, kept_values -> positions, skeleton, own_function,
    variants, written, row_laws, paths -> attentions, frame, row_views -> planner -> hooks -> convert
"""
