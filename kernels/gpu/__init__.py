"""Run tree attention on a device: checked Triton kernels, or FlexAttention.

In: q, k, v and a score. Out: the output, the log-sum-exp and their gradients. A path for a new device stands next to
    ``triton_tree`` and is chosen in ``dispatch``. ``workspace`` predicts the memory of launches. ``replays`` repeats
    launches with other tensors.

Order of imports, each only of what stands before an arrow::

    replays -> flex, triton_tree -> dispatch, workspace
"""
