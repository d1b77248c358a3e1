"""The graph over distinct tokens: the surgery that follows the analysis.

In: a graph with facts. Out: a graph whose packed values are [N, ...], with expansions where rows differ, the chunked
loss over the vocabulary, restoration of gradients in the backward graph, and the inner compiler.
"""
