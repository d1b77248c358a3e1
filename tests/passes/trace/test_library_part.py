"""Library kernels over the parts of a forest, states handed from part to part: equal to the uncut forest in float64."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import treefx
from tests import libraries
from tests.kernels.recurrence.test_part_scan import HEADS, KEY, VALUE, assert_equal, in_parts, operands_of
from tests.libraries import CALLS
from tests.planning.parts import weighted_forest
from treefx.kernels.recurrence.tree_chunks import Doors
from treefx.passes.trace import library_part, library_tree
from treefx.passes.trace.library_calls import Given, LibraryCall, register_call


def _delta(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> None: ...


def _state_space(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> None: ...


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


def call_of(name: str) -> LibraryCall:
    function = getattr(libraries, name)
    body, more = (_state_space, (4,)) if name.startswith("mamba") else (_delta, ())
    takes = frozenset(inspect.signature(function).parameters)
    given = (*(Given(number) for number in range(5)), *more)
    return register_call(LibraryCall(name, function, f"tests.{name}", body, given, (), takes))


def operands(name: str, forest: treefx.Forest) -> tuple[list[Tensor], list[Tensor]]:
    """Values of tokens, and A where there is one."""
    q, k, v, g, beta = (x.detach() for x in operands_of(forest, name == "chunk_kda", HEADS))
    found = [v, beta, k, q] if name.startswith("mamba") else [q, k, v, g, beta]
    rest = [-torch.rand(HEADS, dtype=torch.float64)] if name.startswith("mamba") else []
    return [x.requires_grad_() for x in found], [x.requires_grad_() for x in rest]


@pytest.mark.parametrize("form", ["levels", "chunks", "in turn"])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined"])
def test_parts_equal_the_forest(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each form, and where parts take turns: states have one layout."""
    held, turns = call_of(name), [0]
    if form == "chunks" and held.kind.read is None:
        pytest.skip("the recurrence runs by the library alone")

    def cost_less(*_: Any, **__: Any) -> bool:
        turns[0] += 1
        return form == "levels" or (form == "in turn" and turns[0] % 2 == 1)

    forest, _, _ = weighted_forest()
    of_tokens, rest = operands(name, forest)

    def tensors(values: list[Tensor]) -> list[Tensor]:
        return [*(x[None] for x in values[:2]), *rest, *(x[None] for x in values[2:])]

    wanted = library_tree.library_tree(tensors(of_tokens), forest.subtree_end, held.key)[0]
    monkeypatch.setattr(library_part, "levels_cost_less", cost_less)
    CALLS.clear()

    def run(values: list[Tensor], ends: Tensor, given: Tensor, doors: Doors) -> tuple[Tensor, Tensor]:
        assert library_part.state_of(tensors(values), held.key) == ((HEADS, KEY, VALUE), torch.float64)
        out, left = library_part.library_part(tensors(values), ends, held.key, given, *doors.vectors)
        return out[0], left

    got = in_parts(forest, 1, 0.2, of_tokens, run)
    assert (name in CALLS) == (form != "chunks")
    assert_equal(got, wanted, [*of_tokens, *rest])


def test_a_layout_of_the_library_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba's states are transposed: where heads are as wide as states, no shape would show it."""
    name, forest = "mamba_chunk_scan_combined", treefx.Forest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6]])
    held = call_of(name)
    of_tokens, (a,) = operands(name, forest)
    x, dt, b, c = of_tokens
    x = F.pad(x.detach(), (0, KEY - VALUE), value=0.5)
    ends, states = forest.subtree_end, torch.rand(2, HEADS, KEY, KEY, dtype=torch.float64)
    entry, exits = torch.zeros(forest.num_tokens, dtype=torch.int64), torch.tensor([forest.num_tokens - 1, -1])

    def run() -> Tensor:
        tensors = [x[None], dt[None], a, b[None], c[None]]
        out: Tensor = library_part.library_part(tensors, ends, held.key, states, entry, exits)[0]
        return out

    monkeypatch.setattr(library_part, "levels_cost_less", lambda *_, **__: False)
    wanted = run()
    monkeypatch.setattr(library_part, "levels_cost_less", lambda *_, **__: True)
    torch.testing.assert_close(run(), wanted, rtol=1e-10, atol=1e-11)
    states = states.mT.contiguous()
    assert not torch.allclose(run(), wanted, rtol=1e-3)
