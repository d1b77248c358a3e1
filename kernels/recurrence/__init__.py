"""Linear recurrences and causal convolutions along a tree, in chunks that follow its branches.

In: the values of distinct tokens and ``subtree_end``. Out: what every row would have computed, once per token.
"""
