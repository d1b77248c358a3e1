"""The planner: which tokens make a part, what each part keeps, in which order they run.

In: a forest, a cost model and a limit. Out: a ``Plan`` whose predicted peak is below it, or an error that
says what would fit.
"""
