"""Planted mistakes: the search finds each of them, in the family that aims where it is.

One that the first programs find is searched for here; ``TREEFX_FUZZ_PLANTS=all`` searches for all. What the sources
themselves get wrong would be found in their place, so every find is judged again without the plant.
"""

import os
from dataclasses import replace

import pytest

from tests.tools.fuzz.plants import PLANTS, Plant, planted
from tests.tools.fuzz.test_grammar import PLAIN
from treefx.tools.fuzz.describe import describe
from treefx.tools.fuzz.grammar import generate
from treefx.tools.fuzz.program import Attention, Batch, Call
from treefx.tools.fuzz.truth import FAILURES, judge

PROGRAMS = 600
"""Every plant is found within as many programs of its family."""


SEARCHED = ("keys",)
"""Its family's first programs find it; some of the others take hundreds."""


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


@pytest.mark.parametrize("name", PLANTS if os.environ.get("TREEFX_FUZZ_PLANTS") == "all" else SEARCHED)
def test_a_planted_mistake_is_found(name: str) -> None:
    assert hunt(PLANTS[name], PROGRAMS) is not None


def test_dynamo_imports_the_module_of_a_program() -> None:
    """Else a converted model whose layers are the program's is never traced, and runs on rows whatever is planted."""
    program = replace(PLAIN, calls=(Call("converted, AppendsOutside, a mask"),))
    with planted(PLANTS["kept"]):
        assert judge(program).kind == "wrong"
    assert judge(program).kind not in FAILURES


ONE_ROW = Batch(((11, 11),), ((1, 1),))
LEFT = Batch(((0, 0, 0, 3, 4), (0, 3, 4, 9, 1)), ((0, 0, 0, 1, 1), (0, 1, 1, 1, 1)))


@pytest.mark.parametrize(("call", "batch"), [("a fault in a plan", ONE_ROW), ("converted, nn.Linear, positions", LEFT)])
def test_programs_ask_for_no_more_than_treefx_promises(call: str, batch: Batch) -> None:
    """A plan of one part calls its loss once; the hidden states of padding that sees no key are zero."""
    layers = (Attention(("causal",)),)
    program = replace(PLAIN, inner="aot_eager", output="logits", layers=layers, batches=(batch,), calls=(Call(call),))
    assert judge(program).kind not in FAILURES
