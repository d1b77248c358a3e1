"""Run torchtitan's decoders on distinct tokens, with its blocks, checkpoints and sharding.

Written for torchtitan 0.3.0, which compiles block by block (``apply_compile`` in ``distributed/compile.py``), so that a
backend never sees token ids. Here the decoder itself is converted (`convert`): its batch of documents becomes the
packed row of distinct tokens, and its inner attentions read the tree in place of their mask. ``treefx run -- COMMAND``
does that in every process; so do `install()` in a configuration module and ``--compile.enable --compile.backend
treefx``. ``loader`` feeds rows that share prefixes.

In: modules of torchtitan, which nothing here imports but ``loader`` and `install`. Out: the same ones, hooked.

Order of imports, each only of what stands before an arrow::

    attention -> masks -> conversion -> training, loader
"""

from importlib import import_module
from typing import Any

__all__ = ["convert", "install"]


def install() -> None:
    """Hook torchtitan in this process, once.

    For ``--compile.backend treefx`` without ``treefx run``.
    """
    training = import_module("treefx.integrations.torchtitan.training")
    for name, hook in training.HOOKS.items():
        hook(import_module(name))


def __getattr__(name: str) -> Any:
    if name == "convert":
        return import_module("treefx.integrations.torchtitan.conversion").convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
