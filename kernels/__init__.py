"""Tree attention: one operator, a dense reference, and an implementation for each device.

The contract is ``api`` (checked arguments) and ``ops`` (the operators that graphs hold); the truth is ``reference``;
``score`` is the language of scores. Rooms: ``tiles`` says which tiles of the mask exist, ``cpu`` and ``gpu`` compute
them, ``recurrence`` runs linear recurrences and convolutions along a tree. ``head_loss`` computes LM head and loss,
``sparse`` attention to keys that each query has chosen.
``expand`` reads packed values on rows, and sums gradients of rows. ``first_derivatives`` refuses second ones.
This package knows no FX graph and no trainer.

Order of imports, each only of what stands before an arrow::

    memory, expand, cuda_graphs, dumps, code_files, score, common, first_derivatives
    -> masked_products, expression_text, own_products -> reference -> checks -> tiles -> cpu, gpu, recurrence
    -> head_loss, sparse, ops -> api
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treefx.kernels.api import tree_attention

__all__ = ["tree_attention"]


def __getattr__(name: str) -> Any:
    # Lazily: other libraries look for a package named "kernels" and may import this folder under that name,
    # which must not load torch or register the operator.
    if name == "tree_attention":
        from treefx.kernels.api import tree_attention

        return tree_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
