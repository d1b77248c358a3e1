"""Equal layers of a rewritten graph, compiled once and called for each of them.

In: a graph over distinct tokens. Out: the same with one subgraph per kind of layer, and the way back. The corrections
    of inductor's graphs, which assume that results of subgraphs own their memory, are here too.

Order of imports, each only of what stands before an arrow::

    find_regions -> make_regions -> own_results, loadable
"""
