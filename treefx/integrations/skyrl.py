"""SkyRL: the models of its FSDP2 and Megatron workers run once per distinct token.

Written for skyrl 0.4.0. Its workers build a model and shard it at once, so ``treefx run`` hooks the two places where a
model is built: ``HFModelWrapper``, of which policy, reference and critic are made, and ``make_megatron_module``. Micro-
batches keep the order of rows, in which the samples of a prompt are neighbours. Other models stay as they are, and a
warning says why.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

from treefx.errors import ConfigError, UnsupportedError
from treefx.reason_codes import with_code
from treefx.refusal_codes import TRAINER
from treefx.runtime.converted.convert import convert

__all__ = ["convert_megatron_workers", "convert_wrappers"]

_log = logging.getLogger("treefx")


def convert_wrappers(wrappers: Any, *, min_sharing: float = 1.15) -> None:
    """Convert wrapped models with `treefx.convert`.

    Not under Ulysses, whose ranks hold slices of rows.

    Args:
        wrappers: ``skyrl.backends.skyrl_train.workers.model_wrapper.HFModelWrapper``.
        min_sharing: as of `treefx.convert`.
    """
    make = wrappers.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        try:
            if self.sequence_parallel_size > 1:
                raise UnsupportedError(_SLICES.format(self.sequence_parallel_size))
            convert(self.model, min_sharing=min_sharing)
        except (ConfigError, UnsupportedError) as reason:
            _log.warning("SkyRL runs without treefx: %s", with_code(str(reason), TRAINER))

    wrappers.__init__ = init


def convert_megatron_workers(workers: Any, *, min_sharing: float = 1.15) -> None:
    """Convert the model chunks of Megatron workers.

    See `treefx.integrations.megatron.convert`.

    Args:
        workers: ``skyrl.backends.skyrl_train.workers.megatron.megatron_worker.MegatronWorker``.
        min_sharing: as of `treefx.convert`.
    """
    build = workers.make_megatron_module
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def make_megatron_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunks = build(self, *args, **kwargs)
        try:
            return import_module("treefx.integrations.megatron").convert(chunks, min_sharing=min_sharing)
        except (ConfigError, UnsupportedError) as reason:
            _log.warning("SkyRL runs without treefx: %s", with_code(str(reason), TRAINER))
            return chunks

    workers.make_megatron_module = make_megatron_module


_SLICES = (
    "treefx expects whole rows, got sequence_parallel_size={}; shared prefixes make rows shorter: try "
    "trainer.policy.sequence_parallel_size=1"
)
