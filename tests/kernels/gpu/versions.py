"""What Triton 3.6, the oldest one that is supported, compiles otherwise than later ones do."""

from collections.abc import Sequence

from treefx.kernels.gpu.triton_tree.support import triton_version

__all__ = ["is_old", "specialises_keys"]


def is_old() -> bool:
    """Whether this Triton is older than 3.7."""
    return triton_version() < (3, 7)


def specialises_keys(features: Sequence[str]) -> bool:
    """Whether dk and dv have a warp-specialised form: not in 3.6 where a window and slopes take the same distance."""
    return not (is_old() and {"window", "alibi"} <= {*features})
