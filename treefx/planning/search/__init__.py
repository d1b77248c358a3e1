"""Plan: choose the tokens of each part, its kept values, and the order of parts.

In: a forest, a cost model and a limit. Out: a ``Plan`` whose predicted peak is below it, or an error that names a limit
    that fits.
"""
