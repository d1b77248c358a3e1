"""The simulated hardware: a GPU of a ring, event by event.

In: a product of matrices, the number of GPUs, a machine. Out: a ``Run``, its time and what it moved. A wave of
workgroups reads and computes (``gemm``), memory serves two streams (``memory``), links carry chunks (``wire``), and
the tracker fires a DMA when a group of tiles is complete (``tracker``).

Order of imports, each only of what stands before an arrow::

    clock, machine, tracker, traffic -> memory, wire, gemm -> ring -> fused
"""
