"""Report sharing in observed calls, and a prediction: ``treefx.observed(model)``.

In: the sums that ``treefx.runtime.observed`` has counted. Out: ``Observation``, a frozen record that becomes JSON and
comes back from it, and its table. The prediction is a dry run (``treefx.explain``), made when it is asked for.

Order of imports, each only of what stands before an arrow::

    records -> scatter, table -> prediction -> observed
"""
