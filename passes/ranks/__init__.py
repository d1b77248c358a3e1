"""Rewrite models with weights sharded over ranks to each rank's own graph.

In: Dynamo's graph with DTensors. Out: the same on plain tensors, the rank's share of each, with the sums and
gatherings over ranks as operators that have a derivative (``collectives``), so that all later passes see tokens.

Order of imports, each only of what stands before an arrow::

    collectives -> held -> products -> own_graph
"""
