"""Record treefx's work on a model as data, from which all views are drawn.

In: graphs, facts and counters that the run time keeps anyhow. Out: ``Report``, a tree of frozen records that becomes
JSON and comes back from it. Nothing here runs in a training step: sections are made when they are first read.

Order of imports, each only of what stands before an arrow::

    records, call_records, codec, sizes, lines, formulas -> material, costs -> operators, forest ->
    masks -> attention, calls, memory, model_explorer, modules, nodes, passes, restoration, verdict, traces -> why ->
    report -> diff
"""
