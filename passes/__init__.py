"""The passes of the treefx backend: one file each, applied in the order that ``treefx.passes.pipeline`` states.

In comes the graph that Dynamo captured; out goes a graph over distinct tokens, and what the run time has to know of it.
Passes use ``treefx.kernels`` and know no trainer, no forest and no call.

Order of imports, each only of what stands before an arrow::

    layers, ranks, inputs -> trace -> labels -> scores, causal, regions -> packing -> cuts -> overlap ->
    runner -> analysis -> pipeline
"""
