"""What the values of a call's inputs prove: asked in every call, before anything is labelled.

In: the tensors of a call. Out: ``InputValues``, which an analysis is made with and which later calls must show again.

Order of imports, each only of what stands before an arrow::

    given_masks -> values
"""
