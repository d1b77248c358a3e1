"""Read the inputs of a call: sizes by name, and facts that values prove, before a graph is labelled.

In: the tensors of a call. Out: a ``Pattern`` of sizes and ``InputValues``; an analysis holds for later calls with the
same. Knows no graph.

Order of imports, each only of what stands before an arrow::

    fakes, token_count, values -> sizes
"""
