"""What treefx did with a model, for people: reports, graphs and their differences, kernels, a page.

In: a compiled model that was called. Out: text, numbers, HTML. Reads the run time's record; nothing reads it back.
"""
