"""Run tree attention on the CPU: ATen's flash attention by rectangles, merged by lse.

In: q, k, v, a score and the tiles. Out: the output, the log-sum-exp, and their gradients (``attention``); ``boundary``
adds keys from outside of a part, ``one_call`` takes forests that are a single tile.
"""
