"""Compile a torchtune recipe's whole decoder with treefx, under ``treefx run``.

The recipe says ``compile: True``.

Written for torchtune 0.6.1, which compiles layer by layer with the backend in ``TORCH_COMPILE_BACKEND``; a backend
then never sees token ids. On one device the decoder is one graph with its head, as treefx needs it, though the loss
wants logits in chunks; recipes that shard (``*_distributed``) shard their layers before or after, and share nothing. A
backend that the environment names stays.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from treefx.reason_codes import marked
from treefx.refusal_codes import OTHER_BACKEND

__all__ = ["compile_whole"]

_NAME = "treefx"
_log = logging.getLogger("treefx")
_OTHER = marked(OTHER_BACKEND)


def compile_whole(module: Any, options: Mapping[str, Any] | None = None) -> None:
    """Let ``compile_model`` compile the decoder and not its layers.

    Args:
        module: ``torchtune.training._compile``.
        options: fields of `treefx.Config`.
    """
    layers = module.compile_model
    if hasattr(layers, "__wrapped__"):
        return

    @functools.wraps(layers)
    def compile_model(model: Any, verbose: bool = True) -> None:
        decoder = model.decoder if isinstance(model, module.DeepFusionModel) else model
        named = os.environ.get("TORCH_COMPILE_BACKEND", _NAME)
        if named != _NAME:
            _log.warning("this program compiles with the backend it names, %s, not with treefx %s", named, _OTHER)
        elif not isinstance(decoder, module.TransformerDecoder):
            text = "treefx shares nothing: %s is compiled by layers, which get no ids %s"
            _log.warning(text, type(model).__name__, _OTHER)
        if named != _NAME or not isinstance(decoder, module.TransformerDecoder):
            layers(model, verbose)
            return
        decoder.chunked_output = MethodType(_chunked_output, decoder)
        decoder.compile(backend=_NAME, dynamic=True, options=dict(options or {}))
        decoder._compiled_call_impl = _cutting(decoder, decoder._compiled_call_impl)

    module.compile_model = compile_model


def _chunked_output(decoder: Any, last_hidden_state: Tensor) -> Tensor | list[Tensor]:
    """Return all logits inside of a graph, which `_cutting` splits.

    torchtune's own function breaks the graph in front of the head.

    A graph that cuts them holds for one length of rows alone.
    """
    logits: Tensor = decoder.output(last_hidden_state)
    return logits if torch.compiler.is_compiling() else _cut(decoder, logits)


def _cut(decoder: Any, logits: Tensor) -> list[Tensor]:
    return list(logits.chunk(decoder.num_output_chunks, dim=1))


def _cutting(decoder: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the compiled call of a decoder to return logits in the chunks of torchtune's loss.

    Args:
        decoder: returns logits [B, L, vocabulary], or a list of hidden states with these behind them.
        run: its compiled call.
    """

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        if not decoder.num_output_chunks:
            return found
        if isinstance(found, Tensor):
            return _cut(decoder, found)
        # Else they are in chunks: the call was not compiled after all.
        whole = decoder.output_hidden_states and isinstance(found[-1], Tensor)
        return [*found[:-1], _cut(decoder, found[-1])] if whole else found

    return call
