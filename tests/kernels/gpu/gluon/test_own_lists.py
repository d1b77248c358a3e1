"""The first use of a form on the lists of the forest at hand: Gluon by hand in float64, against the reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.gluon.by_hand import run_by_hand
from tests.kernels.gpu.interpreted_cases import SCORES, Case, assert_equal, draw, expected, forest
from treefx.kernels import checks, reference
from treefx.kernels.gpu.triton_tree import attention, own_lists, paths
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.launch import Attention, KeySource, Launch
from treefx.kernels.score import Score
from treefx.kernels.tiles.tree_blocks import TileLists, TreeBlocks

pytestmark = pytest.mark.usefixtures("fresh_caches")
FOREST = forest([[*range(64)], [*range(40), 64, 65, 66], [*range(20), *range(67, 90)]])
FIRST_TOKENS = 32
"""Of which the form is compared with the plain one."""
NAMES = ["forward", "backward"]
COMPARED = ["plain", "gluon", "gluon"]
"""Both on the first tokens, and Gluon on all of them."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the order in which they run; Gluon's launches are carried out by hand, with so many bits as it keeps."""
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "gluon")
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(paths, "_CHECKED_TOKENS", FIRST_TOKENS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("treefx.kernels.gpu.triton_tree.launch.processors", lambda device: 3)
    monkeypatch.setattr(checks, "_TOLERANCE", {torch.float64: 1e-5})
    monkeypatch.setattr(Launch, "run", run_by_hand)
    return []


def results(used: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of a pass in the path that is set: the reference stands for the plain form."""
    inputs, score = used.inputs, used.score
    if used.path == "plain" and not tensors:
        return list(reference.forward(inputs, score))
    if used.path == "plain":
        grad, out, _ = tensors
        dq, dk, dv, rest = reference.backward(*tensors[:1], inputs, *tensors[1:], score, [False] * len(inputs.buffers))
        return [(grad * out).sum(-1), dq, dk, dv, *rest[: 2 * (inputs.boundary is not None)]]
    return attention.results_of(used, tensors)


def called(name: str, case: Case, taken: list[str], score: Score = SCORES["plain"]) -> list[Tensor]:
    """Return what a call gets on the best path."""

    def run(used: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
        taken.append(used.path)
        return results(used, tensors)

    chosen = Attention(case.wide, score, choose=lambda problem: Config(32, 32, 4, 2))
    out, lse = reference.forward(case.wide, score)
    return paths.checked(name, chosen, [] if name == "forward" else [case.grad, out.contiguous(), lse], run)


def assert_right(name: str, got: list[Tensor], case: Case, score: Score = SCORES["plain"]) -> None:
    out, lse, *grads = expected(case, score)
    wanted = [out, lse] if name == "forward" else [(case.grad * out).sum(-1), *grads]
    assert_equal(got, wanted[: len(got)], 1e-5)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[TreeBlocks], TreeBlocks]) -> None:
    """Change lists of forests that have more tokens than are compared with the plain form."""
    blocks = Attention.blocks

    def wrong(self: Attention, source: KeySource, config: Config) -> TreeBlocks:
        found = blocks(self, source, config)
        return change(found) if self.inputs.q.shape[2] > FIRST_TOKENS else found

    monkeypatch.setattr(Attention, "blocks", wrong)


def twice(lists: TileLists) -> TileLists:
    """Visit the first tile of the longest list a second time, instead of the one after it."""
    first = int(lists.start[int(lists.order[0])])
    tiles = lists.tiles.clone()
    tiles[first + 1] = tiles[first]
    return replace(lists, tiles=tiles)


WRONG: dict[str, Callable[[TreeBlocks], TreeBlocks]] = {
    "forward": lambda found: replace(found, by_query=twice(found.by_query)),
    "backward": lambda found: replace(found, by_key=twice(found.by_key)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NAMES)
def test_right_lists_are_found_right_once(name: str, taken: list[str]) -> None:
    """With sinks, of several heads and elements of the batch; numbers that are not finite decide nothing."""
    case = draw(*FOREST, heads=(4, 2), batch=2, outside=30, sinks=True)
    case.wide.k[1, 1, 70], case.wide.v[0, 0, 66] = torch.nan, torch.inf
    called(name, case, taken)
    assert taken == [*COMPARED, "gluon"] and [*paths._verdicts.values()] == [True]
    fine = draw(*FOREST, heads=(4, 2), batch=2, outside=30, sinks=True)
    assert_right(name, called(name, fine, taken), fine)
    assert taken == [*COMPARED, "gluon", "gluon"], "the form is known"


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_list_is_found_before_it_is_used(name: str, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the form is right on the first tokens, which alone would let it run."""
    case = draw(*FOREST)
    plant(monkeypatch, WRONG[name])
    with pytest.warns(RuntimeWarning, match=f"the Gluon {name} kernel is switched off.*this forest's lists.* by "):
        got = called(name, case, taken)
    assert taken == [*COMPARED, "plain"]
    assert_right(name, got, case)
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(paths, "own_list_errors", lambda *_: {})
    with pytest.raises(AssertionError):
        assert_right(name, called(name, case, taken), case)


@pytest.mark.parametrize("name", NAMES)
def test_longer_forests_are_compared_again(name: str, taken: list[str]) -> None:
    """Their lists are longer, however few of the tokens are compared with the plain form."""
    for rows in (40, 62, 70):
        called(name, draw(*forest([[*range(rows)]])), taken)
    assert taken == [*COMPARED, "gluon", "gluon", *COMPARED, "gluon"]


def test_the_reference_has_a_bound(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the first heads of the batch's first element, and at most 64 queries."""
    seen = list[tuple[int, ...]]()
    errors = own_lists.forward_errors
    monkeypatch.setattr(own_lists, "_ENTRIES", 2 * len(FOREST[0]) * 16 + 1)
    monkeypatch.setattr(
        own_lists,
        "forward_errors",
        lambda few, *given: (seen.append((*few.q.shape, len(given[-1]))), errors(few, *given))[1],
    )
    called("forward", draw(*FOREST, heads=(3, 3), batch=2), taken)
    assert seen == [(1, 2, len(FOREST[0]), 16, 64)]
