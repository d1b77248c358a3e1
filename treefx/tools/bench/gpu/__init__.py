"""Test and measure the kernels on a new GPU, in stages: ``treefx bench gpu``.

In: the name of a stage. Out: one record per case, as they come; a stage that a device cannot run is rehearsed on the
CPU. Cases run in a process of their own, each stage in less than eight minutes; where compiling takes most of them,
side by side.

Order of imports, each only of what stands before an arrow::

    scale, packed_rows, turns -> batches, kernels, launches -> steps -> comparison -> stages
"""
