"""Trainers as they ship: one module each, which imports its trainer when it is imported itself, and nothing else does.

In: a trainer, or a class of trainers. Out: the same one, with rows that share prefixes in one call (``keep_groups``), a
backend it accepts by name (``accelerate``), sharing among its logged metrics (``transformers.SharingCallback``). What
is hooked is a method or a name of the trainer's own; every module names the versions it was written for.
``llama_factory`` hands checkpoints to the compiler in a form that it can trace, ``torchtitan`` converts decoders that
are compiled block by block, and ``torchtune`` compiles the whole of them; ``verl`` converts the models of its engine
and keeps groups on their way to it. ``megatron`` converts models of Megatron-Core, whatever engine calls them;
``skyrl`` and ``openrlhf`` convert models where their workers build them.
``moved_batches`` keeps what a trainer moves to a device readable on the host. ``observing`` counts what trainers' calls
share and changes nothing, and ``run_end`` writes what a process knows when it ends. ``startup`` is how ``treefx run``
reaches all processes of a command: it hooks them when they import a trainer.

Order of imports, each only of what stands before an arrow::

    startup, metrics, moved_batches, run_end -> observing, transformers, accelerate, llama_factory, megatron, openrlhf,
    skyrl, torchtitan,
    torchtune, verl -> trl -> axolotl
"""

from importlib import import_module
from typing import Any

__all__ = ["accelerate", "transformers", "trl"]


def __getattr__(name: str) -> Any:
    # Each imports its trainer.
    if name in __all__:
        return import_module(f"treefx.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
