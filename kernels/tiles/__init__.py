"""Find the tiles of a tree's mask: groups of queries, shared keys, masked keys.

In: ``subtree_end``, ``depth`` and a score. Out: rectangles for the CPU (``rectangles``) and lists of blocks for kernels
(``tree_blocks``), kept as long as the forest lives. Nothing here multiplies a query by a key.
"""
