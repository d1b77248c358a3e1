"""What measures, attacks and predicts treefx; the library never imports it.

``kernels`` compiles generated kernels for GPUs that need not be there and reads what came out; ``simulate`` predicts
what overlapping communication is worth; ``bench`` measures, with the zoo of models; ``fuzz`` searches for programs
that break the promise. Their libraries are in the extra ``[tools]``.

Order of imports, each only of what stands before an arrow::

    kernels, simulate -> bench -> fuzz
"""
