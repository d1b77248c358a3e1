"""Prove which operators read the past only, and run mixers along the tree.

In: values that mix positions. Out: a proof that position t reads positions up to t, so that results are packed again
    (``contract``), or a recurrence or convolution that runs along the tree (``tree_mixers``, ``tree_scans``); and
    which padding in front of a row leaves these as they start (``blanks``).
"""
