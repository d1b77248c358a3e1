"""``treefx bench overlap``: what chunked products and collectives are worth on a link whose speed is given.

In: sizes of an MLP. Out: records. Two processes with gloo share it, as ``parallelize_module`` does.

Order of imports, each only of what stands before an arrow::

    link -> mlp -> rank -> run
"""
