"""TRL's trainers as they ship: every one of them, in the ways users set it up.

In: names of runs. Out: what each found to share, and what a whole run took without a compiler, with inductor, with
treefx.

Order of imports, each only of what stands before an arrow::

    cases -> build -> run
"""
