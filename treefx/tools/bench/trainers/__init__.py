"""Run trainers from their own command lines, in environments made for them.

In: a trainer's name. Out: cost and sharing of a run with treefx, and of the same run without it.

Order of imports, each only of what stands before an arrow::

    material, programs -> loops -> recipes -> environment -> run
"""
