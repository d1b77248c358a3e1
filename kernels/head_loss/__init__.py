"""Compute LM head and loss without logits, a chunk of the vocabulary at a time.

In: hidden states and the LM head's weight, or logits; picks (row, vocabulary entry). Out: minus the log-probability of
each pick and the log-sum-exp of each row; gradients. ``problem`` describes the computation. ``eager`` computes it with
PyTorch's operators: on the CPU, in float64, and where ``fused`` is not right. ``fused`` launches the Triton kernels of
``device_code``. ``choose`` compares both once per kind and device.

Order of imports, each only of what stands before an arrow::

    device_code, problem -> eager, fused -> choose
"""
