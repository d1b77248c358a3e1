"""One law per operator: how the labels of its result follow from those of its operands.

In: a ``Call``, an operator on labelled operands. Out: the ``Fact`` of its result, or ``NoLaw`` and the reason. The
docstring of a law is one sentence of mathematics. A law for a new operator goes into the file of its family.
"""
