"""Label every value: invariant, prefix or row, and its token dimensions.

In: the ATen graph. Out: a ``Fact`` on every node (``facts``), by one sweep (``label_tokens``) with one law per operator
    (``laws``). An operator without a law stays on rows, by name. Nothing here changes the graph.

Order of imports, each only of what stands before an arrow::

    facts, purity -> segments, rows, uniformity, dims, corners, token_inputs -> body, constants -> laws
    -> label_tokens, images -> liveness, index_ranges, column_counts
"""
