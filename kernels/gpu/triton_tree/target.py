"""Ask what a kernel is compiled for, while it is compiled."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
from triton.language import core

__all__ = ["takes_ptx"]


@core.builtin
def takes_ptx(_semantic=None):
    """Return whether the assembler of the target reads PTX: NVIDIA's does, AMD's does not.

    Triton's own ``target_info`` would return what runs in this process, not the target of a compilation.
    """
    return core.constexpr(_semantic.builder.options.backend_name == "cuda")
