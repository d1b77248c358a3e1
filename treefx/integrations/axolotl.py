"""axolotl: a line of its YAML, ``plugins: [treefx.integrations.axolotl.TreefxPlugin]``.

Written from axolotl's plugin interface as of August 2026: the result of ``get_training_args`` overrides the arguments
from the YAML, and ``post_trainer_create`` gets the trainer before it trains.
"""

from __future__ import annotations

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin

import treefx.integrations.accelerate  # noqa: F401  # opens its list of backends
from treefx.errors import InputError
from treefx.integrations import transformers, trl
from treefx.reason_codes import marked
from treefx.refusal_codes import BATCH_ORDER

__all__ = ["TreefxPlugin"]

_log = logging.getLogger("treefx")


class TreefxPlugin(BasePlugin):  # type: ignore[misc]
    """Compile with treefx, log sharing, and keep rows that share prefixes together.

    Packed samples stay in the order of their packs.
    """

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The backend by its name."""
        return {"torch_compile": True, "torch_compile_backend": "treefx"}

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Hook the trainer."""
        transformers.log_sharing(trainer)
        if cfg.sample_packing:
            return
        try:
            trl.keep_groups(trainer)
        except InputError as reason:
            _log.warning("rows come in the order of the dataset: %s %s", reason, marked(BATCH_ORDER))
