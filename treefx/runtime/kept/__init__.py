"""Keep state across calls and invalidate it: inputs, buffers, process state.

In: the inputs, buffers and process state of a call. Out: copies or versions of them, and whether they are still the
same.
"""
