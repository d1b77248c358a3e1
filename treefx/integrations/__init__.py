"""Adapt trainers as they ship: one module each, the only one that imports its trainer.

In: a trainer, or a class of trainers. Out: the same one, with rows that share prefixes in one call (``keep_groups``), a
backend it accepts by name (``accelerate``), sharing among its logged metrics (``transformers.SharingCallback``). Hooks
replace methods or names of the trainer; every module names the versions it was written for. ``llama_factory`` hands
checkpoints to the compiler in a form that it can trace, ``torchtitan`` converts decoders that are compiled block by
block, and ``torchtune`` compiles the whole of them; ``verl`` converts the models of its engine and keeps groups on
their way to it. ``megatron`` converts models of Megatron-Core, for any engine; ``skyrl`` and ``openrlhf`` convert
models where their workers build them, and ``async_grpo`` attends along the trees that TRL makes itself.
``moved_batches`` keeps host copies of batches that a trainer moves to a device. ``observing`` counts sharing in
trainers' calls and changes nothing, and ``run_end`` writes records when a process ends. ``startup`` is how
``treefx run`` reaches all processes of a command: it hooks them when they import a trainer.

Order of imports, each only of what stands before an arrow::

    startup, metrics, moved_batches, run_end -> observing, transformers, accelerate, async_grpo, llama_factory,
    megatron, openrlhf, skyrl, torchtitan, torchtune, verl -> trl -> axolotl
"""

from importlib import import_module
from typing import Any

__all__ = ["accelerate", "async_grpo", "transformers", "trl"]


def __getattr__(name: str) -> Any:
    # Each imports its trainer.
    if name in __all__:
        return import_module(f"treefx.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
