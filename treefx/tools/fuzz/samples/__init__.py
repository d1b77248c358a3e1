"""Run PyTorch's samples of its operators and modules through the backend.

In: the tables of samples in PyTorch's wheel. Out: programs (``sample``) that call one operator or module on its samples
(``catalogue``), with inputs of several kinds (``inputs``), and what became of each (``verdict``): treefx must give what
eager gives, in values, gradients, changed inputs and aliases, wherever ``aot_eager`` does.

Order of imports, each only of what stands before an arrow::

    sample -> catalogue, inputs -> play -> verdict
"""
