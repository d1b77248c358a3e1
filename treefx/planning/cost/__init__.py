"""Model bytes, FLOPs and seconds of a part by its tokens, boundary and visible pairs.

In: compiled graphs, or the dimensions of a model. Out: a ``CostModel`` (``model``), and the memory of this process.
"""
