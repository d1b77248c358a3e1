"""Pass keys, values, inputs of convolutions and states of recurrences across the cuts of a forest.

In: a packed graph. Out: the same graph with a boundary: as inputs, with the outgoing tokens' keys and values as outputs
(``boundary_kv``, for parts one after the other), or sent by the ranks that all run at once (``exchange_kv``), which
share the heads of recurrences (``exchange_scans``).
"""
