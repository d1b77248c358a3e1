"""Prove facts by the values of a call's inputs, before the graph is labelled.

In: the tensors of a call. Out: ``InputValues``; an analysis holds for later calls with the same.

Order of imports, each only of what stands before an arrow::

    given_masks -> values
"""
