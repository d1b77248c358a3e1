"""Attention of each query to its own list of keys, for models that choose their keys by an indexer.

In: queries, keys and values by head, and a list of key tokens per query. Out: the attention's output; gradients. Work
and reads are those of the listed pairs, ``N * K``, whatever the number of ancestors. ``problem`` describes the
computation. ``reference`` is its definition. ``chunks`` computes it with PyTorch's operators. ``fused`` launches the
Triton kernels of ``device_code``. ``choose`` compares both once per kind and device. ``ops`` has the operators.

Order of imports, each only of what stands before an arrow::

    device_code, problem -> reference, chunks, fused -> choose -> ops
"""
