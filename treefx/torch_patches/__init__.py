"""Replace symbols of PyTorch and transformers while treefx is loaded, from one table.

Each patch acts only where treefx compiles; other backends see the original behaviour. ``table`` names every symbol, the
versions in which it is replaced, why, and the test that fails without it; ``treefx doctor`` prints it.

Order of imports, each only of what stands before an arrow::

    columns, compiling, functions, kept_graphs, patch -> backports -> dynamo, libraries, substitution, symbols
    -> batch_symbols -> table
"""
