"""``treefx bench overlap``: what chunked products and collectives are worth on a link whose speed is given.

In: sizes of an MLP. Out: records. Two processes share it, as ``parallelize_module`` does.

Order of imports, each only of what stands before an arrow::

    outbox -> link -> mlp -> rank -> run
"""
