"""The ways to run a call: as it is, or packed, from rows or from a forest.

In: an analysed shape and the inputs of a call. Out: its outputs. ``rows`` and ``native`` build the trie, ``packed``
runs a variant on it, ``outputs`` hands back what it gave; ``ordinary`` is the graph of the inner compiler alone.
"""
