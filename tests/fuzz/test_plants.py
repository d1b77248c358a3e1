"""Planted mistakes: the search finds each of them, in the family that aims where it is.

One of them, drawn anew with every change of the sources, is searched for here; ``TREEFX_FUZZ_PLANTS=all`` searches for
all. What the sources themselves get wrong would be found in their place, so every find is judged again without the
plant.
"""

import os
from random import Random

import pytest

from tests.fuzz.drawing import sources
from tests.fuzz.plants import PLANTS, Plant, planted
from treefx.fuzz.describe import describe
from treefx.fuzz.grammar import generate
from treefx.fuzz.truth import FAILURES, judge

PROGRAMS = 600
"""Every plant is found within as many programs of its family."""


def drawn() -> list[str]:
    if os.environ.get("TREEFX_FUZZ_PLANTS") == "all":
        return list(PLANTS)
    return Random(sources()).sample(list(PLANTS), 1)


def hunt(plant: Plant, programs: int, seed: int = 0) -> tuple[int, str] | None:
    """The number of the first program that the mistake makes fail, and what it is."""
    for number in range(programs):
        program = generate(seed, number, [plant.family], plant.inner)
        with planted(plant):
            found = judge(program)
        if found.kind in FAILURES and judge(program).kind not in FAILURES:
            return number, f"{found.kind}: {describe(program)}: {found.note}"
    return None


@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_has_its_place_in_the_sources(name: str) -> None:
    with planted(PLANTS[name]):
        pass


@pytest.mark.parametrize("name", drawn())
def test_a_planted_mistake_is_found(name: str) -> None:
    assert hunt(PLANTS[name], PROGRAMS) is not None
