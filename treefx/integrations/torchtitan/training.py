"""torchtitan's trainer: decoders converted when it is made, sharing among its metrics."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from treefx.errors import InputError, UnsupportedError
from treefx.inspection.inspector import inspect
from treefx.integrations.metrics import metrics_of
from treefx.integrations.torchtitan.attention import read_trees
from treefx.integrations.torchtitan.conversion import ONLY_DATA, convert, other_parallelism
from treefx.reason_codes import marked
from treefx.refusal_codes import TRAINER

__all__ = ["HOOKS", "compile_blocks", "convert_by_name", "convert_policies", "convert_trainers"]

_NAME = "treefx"
_log = logging.getLogger("treefx")


def compile_blocks(module: Any) -> None:
    """Compile blocks with inductor under ``--compile.backend treefx``; sharing is around them.

    Args:
        module: ``torchtitan.distributed.compile``.
    """
    choose = module._maybe_regional_inductor_backend

    @functools.wraps(choose)
    def chosen(model: Any, backend: str) -> Any:
        return choose(model, "inductor" if backend == _NAME else backend)

    if not hasattr(choose, "__wrapped__"):
        module._maybe_regional_inductor_backend = chosen


def convert_by_name(module: Any) -> None:
    """Convert the models of trainers that name the backend.

    Args:
        module: ``torchtitan.trainer``.
    """
    convert_trainers(module, by_default=False)


def convert_trainers(module: Any, *, by_default: bool, options: Mapping[str, Any] | None = None) -> None:
    """Convert the models of trainers, in this process from now on.

    Args:
        module: ``torchtitan.trainer``.
        by_default: also where the configuration does not name the backend.
        options: fields of `treefx.Config`; ``min_sharing`` is the one that matters here.
    """
    _convert_after_init(module.Trainer, lambda made: made.config.compile, _log_sharing, by_default, options)


def convert_policies(module: Any, *, by_default: bool, options: Mapping[str, Any] | None = None) -> None:
    """Convert the models of policy trainers (reinforcement learning), in this process from now on.

    Args:
        module: ``torchtitan.experiments.rl.actors.trainer``.
        by_default, options: as of `convert_trainers`.
    """
    _convert_after_init(module.PolicyTrainer, lambda made: made.compile_config, _return_sharing, by_default, options)


def _convert_after_init(
    trainers: Any,
    compiling_of: Callable[[Any], Any],
    report: Callable[[Any], None],
    by_default: bool,
    options: Mapping[str, Any] | None,
) -> None:
    make = trainers.__init__
    if hasattr(make, "treefx"):
        return
    chosen = {name: value for name, value in (options or {}).items() if name == "min_sharing"}

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        compiling = compiling_of(self)
        named = bool(compiling.enable and compiling.backend == _NAME)
        reason = other_parallelism(self.parallel_dims)
        if reason is None and (named or by_default):
            for part in self.model_parts:
                convert(part, **chosen)
            report(self)
        elif named:
            raise UnsupportedError(ONLY_DATA.format(reason))
        elif by_default:
            text = "treefx shares nothing: prefixes are shared under data parallelism alone, got %s %s"
            _log.warning(text, reason, marked(TRAINER))

    setattr(init, "treefx", True)
    trainers.__init__ = init


def _log_sharing(trainer: Any) -> None:
    processor, model = trainer.metrics_processor, trainer.model_parts[0]
    log = processor.log

    @functools.wraps(log)
    def with_sharing(*args: Any, extra_metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        return log(*args, extra_metrics={**(extra_metrics or {}), **_metrics(model)}, **kwargs)

    processor.log = with_sharing


def _return_sharing(trainer: Any) -> None:
    """Add this rank's sharing to the metrics that a forward and backward return."""
    reduce, model = trainer.reduce_forward_backward_metrics, trainer.model_parts[0]

    @functools.wraps(reduce)
    def with_sharing(**kwargs: Any) -> dict[str, float]:
        return {**reduce(**kwargs), **_metrics(model)}

    trainer.reduce_forward_backward_metrics = with_sharing


def _metrics(model: Any) -> dict[str, float]:
    try:
        return metrics_of(inspect(model).stats)
    except InputError:  # nothing has run
        return {}


HOOKS: dict[str, Callable[[Any], None]] = {
    "torchtitan.models.common.attention": read_trees,
    "torchtitan.distributed.compile": compile_blocks,
    "torchtitan.trainer": convert_by_name,
}
"""Module of torchtitan -> its hook, for users of `install`."""
