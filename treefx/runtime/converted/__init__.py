"""Models whose backbone runs on distinct tokens in Python: eager, sharded, or compiled block by block.

In: a model of transformers. Out: the same model; hooks at the module that takes the ids hand it the packed row of a
call and expand what it returns, and attention reads the tree. What may run so is proved on a copy without weights
(``skeleton``), as the backend proves it: rows are traced and labelled, and masks lifted (``proof``, ``planner``).

Order of imports, each only of what stands before an arrow::

    skeleton, seam, branches -> specs -> frame -> planner -> hooks -> convert
"""
