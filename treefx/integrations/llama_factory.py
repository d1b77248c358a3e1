"""LLaMA-Factory, under ``treefx run``: models with checkpointed layers stay one graph.

Written for LLaMA-Factory 0.9.5. Its checkpoints (on by default) read the parameters of the called module, which Dynamo
cannot trace, and every layer breaks the graph: no graph then has both the token ids and an attention, and nothing is
shared. Only eager autograd needs the answer: whether a layer is trained, and that its input has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["trace_checkpoints"]


def trace_checkpoints(module: Any) -> None:
    """Let the layers of a compiled model be checkpointed without that question.

    Args:
        module: ``llamafactory.model.model_utils.checkpointing``.
    """
    make = module.get_custom_gradient_checkpointing_func
    names = (*functools.WRAPPER_ASSIGNMENTS, "__self__")

    @functools.wraps(make)
    def checkpointing(plain: Callable[..., Any]) -> Callable[..., Any]:
        asking = make(plain)

        @functools.wraps(asking, assigned=names)
        def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            checkpoint = plain if torch.compiler.is_compiling() else asking
            return checkpoint(layer, *args, **kwargs)

        return run

    module.get_custom_gradient_checkpointing_func = checkpointing
