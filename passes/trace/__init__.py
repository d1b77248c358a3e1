"""Trace Dynamo's graph to one program of functional ATen operators.

In: a torch-level graph and its example inputs. Out: an ATen graph in which attention is one operator, bodies of
higher-order operators are inlined, and recomputed parts are marked; and a text that says whether two graphs are the
same.
"""
