"""Plan and run trees larger than memory: costs of parts, cuts, execution, views.

In: a forest, a compiled model and a limit. Out: a ``Plan``, and loss and gradients of the forest that runs by it.

Order of imports, each only of what stands before an arrow::

    cost -> search -> execution -> views
"""
