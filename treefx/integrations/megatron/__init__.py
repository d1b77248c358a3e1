"""Run a GPTModel of Megatron-Core once per distinct token, in its own layers and ranks.

Written for megatron-core 0.16 and 0.19. `convert` hooks a built model; its specs, checkpoints, DDP and optimizers stay
unchanged. Engines on Megatron (verl, slime, NeMo-RL, SkyRL, AReaL, ms-swift) call the model in one of two forms, and
both are read: rows ``[B, T]``, and packed rows ``[1, sum T]`` with ``PackedSeqParams``::

    import treefx.integrations.megatron
    model = treefx.integrations.megatron.convert(model)  # one GPTModel, a wrapper of it (DDP, Float16Module), or chunks

In verl's and SkyRL's Megatron engines ``treefx run`` does that. In slime the line goes behind ``get_model`` in
``setup_model_and_optimizer`` of ``slime/backends/megatron_utils/model.py``; in NeMo-RL, AReaL and ms-swift behind the
call that returns the list of model chunks. Rows that share prefixes have to be in one micro-batch.

In: a built GPTModel and its calls. Out: the same model with hooks, which returns rows. The tree travels through the
layers as ``attention_mask`` (`tree.Tree`), because Megatron hands that argument to every attention and saves it for
recomputation.

Order of imports, each only of what stands before an arrow::

    tree, rows, facts -> attention, head -> refusals, routers -> replay -> conversion
"""

from importlib import import_module
from typing import Any

__all__ = ["convert", "unconvert"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("treefx.integrations.megatron.conversion"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
