"""Report the loss of calls on rows, and its reason.

In: Dynamo's records of graph breaks, and the token ids of a call that runs on rows. Out: the break and its line, the
number of distinct tokens, and one warning per compiled object.
"""
