"""Tree attention: one operator, a dense reference, a CPU implementation, and the place of the Triton one.

Dependencies point one way: this package knows no FX graph and no trainer.
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
