"""torchtune, under ``treefx run``: ``compile: True`` of a recipe compiles the whole decoder with treefx.

Written for torchtune 0.6.1, which compiles layer by layer with the backend in ``TORCH_COMPILE_BACKEND``; a backend
then never sees token ids. On one device the decoder is one graph, which is what treefx needs; recipes that shard
(``*_distributed``) shard their layers before or after, and share nothing. A backend that the environment names stays.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["compile_whole"]

_NAME = "treefx"
_log = logging.getLogger("treefx")


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
        named = os.environ.get("TORCH_COMPILE_BACKEND", _NAME)
        if named != _NAME:
            _log.warning("this program compiles with the backend it names, %s, not with treefx", named)
            layers(model, verbose)
            return
        decoder = model.decoder if isinstance(model, module.DeepFusionModel) else model
        decoder.compile(backend=_NAME, dynamic=True, options=dict(options or {}))

    module.compile_model = compile_model
