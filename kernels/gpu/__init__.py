"""Tree attention on a device: generated Triton kernels, checked against the reference, or FlexAttention.

In: q, k, v and a score. Out: the output, the log-sum-exp and their gradients. A path for a new device stands beside
``triton_tree`` and is chosen in ``dispatch``. ``workspace`` says what memory launches
take. ``replays`` runs again what was launched, with other tensors.

Order of imports, each only of what stands before an arrow::

    replays -> flex, triton_tree -> dispatch, workspace
"""
