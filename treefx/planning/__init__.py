"""Trees larger than memory: what parts cost, which parts to make, how they run, and how a plan is shown.

In: a forest, a compiled model and a limit. Out: a ``Plan``, and loss and gradients of the forest that runs by it.

Order of imports, each only of what stands before an arrow::

    cost -> search -> execution -> views
"""
