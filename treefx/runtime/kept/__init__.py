"""What one call leaves to the next, and what tells that it no longer holds.

In: the inputs, buffers and process state of a call. Out: copies or versions of them, and whether they are still the
same.
"""
