"""Forests: the prefix trees over the rows of a step, in packed order.

In: sequences, padded batches, arrays, or nodes and their parents (``branches``). Out: an immutable ``Forest`` with
depth, subtree ends, edges and weights (``forest``), selections of edges or rows (``subset``), one rank's share of a
step (``share``), the trie behind it (``trie``), numbers of prefixes that hold across batches (``paths``), the forest
that is in use (``context``). Knows no graph.
"""
