"""Which operators read the past only: a domain of dependences, one law per operator, and the mixers that run along a
tree.

In: values that mix positions. Out: a proof that position t reads positions up to t, so that results are packed again
(``contract``), or a recurrence or convolution that runs along the tree (``tree_mixers``, ``tree_scans``).
"""
