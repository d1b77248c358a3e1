"""Models whose blocks are compiled and sharded one by one: hooks hand each block the tree.

In: a model whose blocks are compiled. Out: the same model, whose blocks see packed hidden states marked ``on_tree``.
"""
