"""Equal layers of a graph, and how a trace writes one of them as a copy of another.

In: a graph whose nodes know the module they are of, and the trace that runs it. Out: its layers, a key that is equal
for those that compute the same, and copies. What is done with a layer in a trace is the business of the trace.

Order of imports, each only of what stands before an arrow::

    find_layers -> copies
"""
