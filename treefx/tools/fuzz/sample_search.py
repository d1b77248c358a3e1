"""The search over PyTorch's own samples: ``treefx fuzz --family torch``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from treefx.tools.fuzz.samples.catalogue import draw_samples
from treefx.tools.fuzz.samples.sample import FAMILY, Sample, describe_sample, sample_script
from treefx.tools.fuzz.search import Search, Settings

__all__ = ["SampleSearch"]


class SampleSearch(Search):
    """Run every operator and module of PyTorch's tables, or a seeded selection.

    Args:
        settings: Its ``programs`` may be more than there are; its families do not matter.
    """

    def __init__(self, settings: Settings) -> None:
        self._samples = draw_samples(settings.seed, settings.inner)
        super().__init__(replace(settings, programs=min(settings.programs, len(self._samples))))

    def _drawn_from(self) -> dict[str, Any]:
        return {**super()._drawn_from(), "families": [FAMILY]}

    def _program(self, number: int) -> Sample:
        return self._samples[number]

    def _described(self, program: Any) -> str:
        return describe_sample(program)

    def _script(self, program: Any, note: str) -> str:
        return sample_script(program, note)

    def _smaller(self, program: Any, fails: Callable[[Any], bool]) -> Any:
        return program  # one operator, or one module
