"""Run a call: unchanged, or packed, from rows or from a forest.

In: an analysed shape and the inputs of a call. Out: its outputs. ``rows`` and ``native`` build the trie, ``packed``
    runs a variant on it, ``outputs`` expands its results; ``ordinary`` is the graph of the inner compiler alone.
"""
