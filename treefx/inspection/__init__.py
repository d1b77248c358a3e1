"""Show people the work of treefx on a model: reports, graphs, kernels, a page.

In: a compiled model that was called. Out: text, numbers, HTML. Reads the run time's record; nothing reads it back.

Order of imports, each only of what stands before an arrow::

    compiled_modules, given_up, graph_diff, images, inner_graphs, node_times, page, source_lines -> score_text -> report
    -> text -> html -> reported -> inspector -> explain, first_call -> observation
"""
