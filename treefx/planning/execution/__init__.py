"""Run the parts of a plan and measure steps: rows, K/V at the cuts, loss, gradients.

In: a plan and a compiled model. Out: gradients (``backward``), or the measured profile of a model (``profile``).
"""
