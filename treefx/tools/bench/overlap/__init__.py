"""Measure chunked products and collectives on a given link: ``treefx bench overlap``.

In: sizes of an MLP. Out: records. Two processes share it, as ``parallelize_module`` does.

Order of imports, each only of what stands before an arrow::

    outbox -> link -> mlp -> rank -> run
"""
