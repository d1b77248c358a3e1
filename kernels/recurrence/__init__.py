"""Run linear recurrences and causal convolutions along a tree, in chunks.

In: the values of distinct tokens and ``subtree_end``. Out: the results of every row, once per token.
"""
