"""Rewrite graphs over distinct tokens: one file per pass, in the order of ``pipeline``.

In: the graph that Dynamo captured. Out: a graph over distinct tokens, and its facts for the run time.
Passes use ``treefx.kernels`` and ``treefx.inputs``, and know no trainer, no forest and no call.

Order of imports, each only of what stands before an arrow::

    layers, ranks -> trace -> labels -> scores, causal, regions -> packing -> cuts -> overlap ->
    runner -> analysis -> pipeline
"""
