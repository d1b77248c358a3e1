"""OpenRLHF: the models of its actors run once per distinct token.

Written for OpenRLHF 0.11.2, in which policy, reference and SFT models are an ``Actor``, built before DeepSpeed wraps
them; ``treefx run`` hooks it. Dynamic batches keep the order of rows, in which the samples of a prompt are neighbours.
Other models stay as they are, and a warning says why.
"""

from __future__ import annotations

import functools
import logging
from inspect import signature
from typing import Any

from treefx.errors import ConfigError, UnsupportedError
from treefx.reason_codes import with_code
from treefx.refusal_codes import TRAINER
from treefx.runtime.converted.convert import convert, is_converted, unconvert

__all__ = ["convert_actors"]

_log = logging.getLogger("treefx")


def convert_actors(actors: Any, *, min_sharing: float = 1.15) -> None:
    """Convert the models of actors with `treefx.convert`.

    Not in ring attention, whose ranks hold slices of rows.

    Args:
        actors: ``openrlhf.models.actor.Actor``.
        min_sharing: as of `treefx.convert`.
    """
    make, run = actors.__init__, actors.forward
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        try:
            convert(self.model, min_sharing=min_sharing)
        except (ConfigError, UnsupportedError) as reason:
            _log.warning("OpenRLHF runs without treefx: %s", with_code(str(reason), TRAINER))

    @functools.wraps(run)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = signature(run).bind(self, *args, **kwargs).arguments.get("ring_attn_group")
        if group is not None and is_converted(self.model):
            unconvert(self.model)
            _log.warning("OpenRLHF runs without treefx: %s", with_code(_SLICES, TRAINER))
        return run(self, *args, **kwargs)

    actors.__init__, actors.forward = init, forward


_SLICES = (
    "treefx expects whole rows, got ring attention, which hands each rank a slice; shared prefixes make rows shorter: "
    "try a ring of 1"
)
