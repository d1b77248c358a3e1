"""Register the backend's name with accelerate and its users.

``TrainingArguments(torch_compile_backend="treefx")`` works then.

Written for accelerate 1.15, whose list of backends (``DynamoBackend``) is closed: importing this module extends it.
Accelerate then calls ``torch.compile(model, backend="treefx")`` itself, on the wrapped model, unless it is compiled
already; ``torch_compile_mode`` is passed on to inductor. Sizes are symbols from the first batch on (``dynamic=True``),
unless the program says otherwise: trainers pad each batch to its longest row, and a first graph for the lengths of one
batch would serve no other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from accelerate.utils.dataclasses import DynamoBackend, TorchDynamoPlugin

from treefx.config import Config
from treefx.reason_codes import marked
from treefx.refusal_codes import OTHER_BACKEND

__all__ = ["compile_with"]

_NAME = "TREEFX"
_log = logging.getLogger("treefx")


def compile_with(options: Mapping[str, Any] | None = None, *, by_default: bool = False) -> None:
    """Say how accelerate compiles with treefx, in this process from now on.

    Args:
        options: fields of `treefx.Config`, which no trainer has an argument for; options in the program's own
            ``TorchDynamoPlugin`` take precedence.
        by_default: compile with treefx even if the program names no backend.

    Raises:
        ConfigError: an unknown option.
    """
    Config.from_options(options)
    _chosen.update(options=dict(options or {}), by_default=by_default)


_chosen: dict[str, Any] = {"options": {}, "by_default": False}


def _open_the_list() -> None:
    """Add the member TREEFX, as if it stood in the class."""
    if _NAME in DynamoBackend.__members__:
        return
    member = str.__new__(DynamoBackend, _NAME)
    member._name_, member._value_ = _NAME, _NAME
    member.__objclass__, member._sort_order_ = DynamoBackend, len(DynamoBackend)
    DynamoBackend._member_names_.append(_NAME)
    DynamoBackend._member_map_[_NAME] = member
    DynamoBackend._value2member_map_[_NAME] = member
    type.__setattr__(DynamoBackend, _NAME, member)


def _pass_options_on() -> None:
    """Make treefx the plugin's default backend, and pass the options to ``torch.compile``."""
    choose, arguments = TorchDynamoPlugin.__post_init__, TorchDynamoPlugin.to_kwargs
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def post_init(self: Any) -> None:
        dynamic = self.dynamic
        choose(self)
        if _chosen["by_default"] and self.backend is DynamoBackend.NO:
            self.backend = DynamoBackend(_NAME)
        if self.backend.value == _NAME and dynamic is None and self.dynamic is False:
            # `accelerate launch` exports this default for programs that never set it; every length of a batch would
            # recompile.
            self.dynamic = None
        elif _chosen["by_default"] and self.backend.value != _NAME:
            text = "this program compiles with the backend it names, %s, not with treefx %s"
            _log.warning(text, self.backend.value, marked(OTHER_BACKEND))

    @functools.wraps(arguments)
    def to_kwargs(self: Any) -> dict[str, Any]:
        given: dict[str, Any] = arguments(self)
        if self.backend.value != _NAME:
            return given
        # torch.compile accepts either mode or options; a default mode of the plugin is dropped.
        mode = {} if self.mode in (None, "default") else {"mode": self.mode}
        options = {**_chosen["options"], **mode, **(self.options or {})}
        rest = {name: value for name, value in given.items() if name not in ("mode", "options", "backend")}
        dynamic = True if self.dynamic is None else self.dynamic
        return {"backend": "treefx", **rest, "dynamic": dynamic, **({"options": options} if options else {})}

    TorchDynamoPlugin.__post_init__ = post_init
    TorchDynamoPlugin.to_kwargs = to_kwargs


_open_the_list()
_pass_options_on()
