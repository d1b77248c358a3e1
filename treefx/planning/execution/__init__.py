"""Parts at work: the row of a part, what crosses its cuts, loss and gradients; and steps that are run to be measured.

In: a plan and a compiled model. Out: gradients (``backward``), or the measured profile of a model (``profile``).
"""
