"""What treefx replaces in PyTorch and transformers while it is loaded: all of it, in one table.

Each patch acts only where treefx compiles; what other backends get stays as it was. ``table`` names every symbol, the
versions in which it is replaced, why, and the test that fails without it; ``treefx doctor`` prints it.

Order of imports, each only of what stands before an arrow::

    columns, compiling, patch -> backports -> dynamo, libraries, substitution, symbols -> batch_symbols -> table
"""
