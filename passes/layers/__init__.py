"""Equal layers of a graph, and how a trace writes one of them as a copy of another.

In: a graph whose nodes know the module they are of, and the trace that runs it. Out: its layers, a key that is equal
    for equal computations, and copies. The trace decides how to use a layer.

Order of imports, each only of what stands before an arrow::

    find_layers -> copies
"""
