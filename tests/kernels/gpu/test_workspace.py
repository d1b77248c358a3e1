"""Allocations of launches equal the counts made before, by the stand-in that counts launches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.test_launches import SCORE, Recorder, device, poisoned_memory, storages  # noqa: F401
from tests.kernels.gpu.test_triton_host import LAUNCHED, compiled  # noqa: F401 - a fixture
from treefx.kernels import memory
from treefx.kernels.common import Boundary, Inputs
from treefx.kernels.gpu import workspace
from treefx.kernels.gpu.triton_tree import attention, paths
from treefx.kernels.gpu.triton_tree.configs import one_pass_fits
from treefx.kernels.gpu.triton_tree.launch import Attention, KeySource
from treefx.kernels.gpu.workspace import Lists, backward_bytes, forward_bytes, list_bytes, most_lists, value_bytes
from treefx.kernels.score import Score, make_score
from treefx.kernels.tiles import tree_blocks
from treefx.tools.bench.attention.trees import Tree

FORMS = {"two passes": "plain", "one pass": "plain", "Gluon": "gluon", "Gluon, one pass": "gluon_once"}
"""And the path of each."""
WINDOW = make_score(scale=0.125, window=50, depth=0)
IN_GLUON_ONCE = [(seed, "Gluon, one pass") for seed in (0, 2, 17)]
"""Parts with heads of 128: of long lists that are cut, of several heads per group, with keys from outside."""
ALIBI = make_score(scale=0.125, depth=0, alibi=1)


def part(seed: int, score: Score = SCORE) -> Inputs:
    """A forest, or with an odd seed a part of one, at random: its tree, its boundary, its heads."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    ends = known(random_tree(seed, long=seed % 5 == 0).subtree_end())
    tokens, group, kv_heads, width = len(ends), pick(1, 2, 3, 4, 7), pick(2, 3), pick(64, 80, 128)
    widths = width, width if seed % 3 else 64
    boundary = outside(seed, tokens, kv_heads, widths, generator) if seed % 2 else None
    total = tokens + (0 if boundary is None else boundary.k.shape[2])
    buffers = [torch.zeros(total, dtype=torch.int64)] if score is not SCORE else []
    buffers += [torch.ones(group * kv_heads)] if score is ALIBI else []
    shapes = (group * kv_heads, width), (kv_heads, width), (kv_heads, widths[1])
    return Inputs(*(heads(tokens, *shape) for shape in shapes), ends, buffers, None, boundary)


def outside(seed: int, tokens: int, kv_heads: int, widths: tuple[int, int], generator: Any) -> Boundary:
    """Keys that some queries see; every third part has two unseen keys, as parts without ancestors."""
    nobody = seed % 3 == 0
    count = 2 if nobody else int(torch.randint(3, 3000, (), generator=generator))
    lo = torch.randint(0, tokens, (count,), generator=generator, dtype=torch.int32) * (not nobody)
    hi = torch.full_like(lo, 0 if nobody else tokens)
    return Boundary(*(heads(count, kv_heads, width) for width in widths), known(lo), known(hi))


def known(host: Tensor) -> Tensor:
    """What the host has sent."""
    moved = host.clone()
    memory.remember(host, moved)
    return moved


def heads(tokens: int, count: int, width: int) -> Tensor:
    return torch.zeros(1, tokens, count, width, dtype=torch.bfloat16).transpose(1, 2)


def random_tree(seed: int, long: bool) -> Tree:
    """A path that turns back now and then; long ones have a short trunk of many branches, whose lists are cut."""
    generator = torch.Generator().manual_seed(seed)
    nodes, path = [(-1, 300)], [0]
    for node in range(1, 60 if long else 12):
        back = int(torch.randint(1, len(path) + 1, (), generator=generator))
        path = path[: 1 if long else back]
        nodes.append((path[-1], int(torch.randint(200, 400, (), generator=generator)) if long else 5 + 9 * back))
        path.append(node)
    return Tree("random", tuple(nodes))


def taken(inputs: Inputs, score: Score, *, first: bool = False) -> tuple[int, int, int]:
    """Bytes of the forward, of the backward, and of the lists that they leave, as the stand-in counts them.

    Of a layer after the first of a forest, or of a first one, which makes what a score reads of the forest.
    """
    for number in range(3):
        if first or number == 1:  # kernels were compiled, and forms compared; lists are made in the run that comes
            tree_blocks.forget_blocks()
        with Recorder() as forward:
            out, lse = attention.forward(inputs, score)
        grad = torch.zeros_like(out)
        if first:
            tree_blocks.forget_blocks()
        with Recorder() as backward:
            results = attention.backward(grad, inputs, out, lse, score, [False] * len(inputs.buffers))
    kept: dict[int, int] = {}
    for blocks in (entry.value for entry in tree_blocks._recent):
        if isinstance(blocks, tree_blocks.TreeBlocks):
            sides = [vars(side) for side in (blocks.by_query, blocks.by_key, blocks.key_programs)]
            made = storages([blocks.size, *([] if blocks.low is None else [blocks.low]), *sides])
            kept |= {storage._cdata: storage.nbytes() for storage in made}
    return forward.peak((out, lse)), backward.peak(results), sum(kept.values())


def runner(inputs: Inputs, score: Score, form: str) -> Attention:
    given = replace(attention.attention_of(inputs, score), path=FORMS[form].partition("_")[0])
    return replace(given, once=form.endswith("one pass") and one_pass_fits(given.problem("backward_once")))


def in_form(form: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """The inputs as they are given where all that runs takes one form."""
    monkeypatch.setenv("TREEFX_KERNEL_PATH", FORMS[form])
    monkeypatch.setattr(paths, "ONE_PASS_KEYS", 0)
    monkeypatch.setattr(paths, "GLUON_ONE_PASS_KEYS", 0)
    return replace(inputs, deterministic=form == "two passes")


def kernels(given: Attention) -> list[str]:
    return ["forward", given.of_keys, *([] if given.once else ["backward_queries"])]


def lists_of(given: Attention, kernel: str, seen: Sequence[KeySource]) -> list[Lists]:
    return [Lists.of(given.blocks(source, given.config(kernel))) for source in seen]


def counted_forward(given: Attention) -> int:
    """The bytes of the forward alone."""
    lists = lists_of(given, "forward", [source for source in given.sources() if given.is_seen(source)])
    return forward_bytes(given, given.inputs.q.shape[2], lists, carries=len(lists) > 1)


def counted(given: Attention) -> tuple[int, int, int]:
    """The same before anything runs, from the lengths of the lists."""
    sources = given.sources()
    seen = [source for source in sources if given.is_seen(source)]
    lists = {name: lists_of(given, name, seen) for name in kernels(given)}
    tokens, carries = given.inputs.q.shape[2], len(seen) > 1
    pairs = list(zip(lists[given.of_keys], lists[kernels(given)[-1]], strict=True))
    tiles = {(given.config(name).block_m, given.config(name).block_n): name for name in reversed(kernels(given))}
    left = {(tile, id(source)): (name, source) for tile, name in tiles.items() for source in seen}
    # Whether a boundary is seen, the lists of the forward say.
    left |= {((0, 0), id(source)): ("forward", source) for source in sources if not given.is_seen(source)}
    made = [Lists.of(given.blocks(source, given.config(name))) for name, source in left.values()]
    return counted_forward(given), backward_bytes(given, tokens, pairs, carries=carries), sum(map(list_bytes, made))


@pytest.mark.parametrize(
    ("seed", "form"), [(seed, [*FORMS][(seed + seed // 3) % 3]) for seed in range(20)] + IN_GLUON_ONCE
)
def test_launches_allocate_what_is_counted(
    seed: int,
    form: str,
    device: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = in_form(form, part(seed), monkeypatch)
    got, given = taken(inputs, SCORE), runner(inputs, SCORE, form)
    assert counted(given) == got
    assert ("backward_once" in LAUNCHED) == given.once != ("backward_queries" in LAUNCHED[-3:])


def test_the_parts_are_of_all_kinds(device: None) -> None:  # noqa: F811
    """Or the test above compares little: cut lists, boundaries that are seen or not, groups of one and more."""
    found = [runner(part(seed), SCORE, "two passes") for seed in range(20)]
    cut = [one.blocks(one.own_keys(), one.config("backward_keys")).key_programs.slots for one in found]
    seen = [one.is_seen(one.boundary_keys()) for one in found if one.inputs.boundary is not None]
    assert sum(slots > 0 for slots in cut) >= 2 and {True, False} == set(seen)
    assert min(one.group for one in found) == 1 and len({one.group for one in found}) > 2
    assert all(runner(part(seed), SCORE, form).once for seed, form in IN_GLUON_ONCE)


WRONG: dict[tuple[str, str], Callable[..., Any]] = {
    ("Gluon", "_padded"): lambda length: length,
    ("Gluon", "scratch_bytes"): lambda kernel, has_low: 0,
    ("one pass", "row_width"): lambda width, chunks: width // 2,
    ("one pass", "_padded"): lambda length: length,
}


@pytest.mark.parametrize(("form", "name"), WRONG)
def test_a_count_that_leaves_something_out_is_found(
    form: str,
    name: str,
    device: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = next(inputs for inputs in map(part, range(0, 20, 2)) if inputs.q.shape[1] > inputs.k.shape[1])
    inputs = in_form(form, inputs, monkeypatch)
    got, given = taken(inputs, SCORE), runner(inputs, SCORE, form)
    assert counted(given) == got
    monkeypatch.setattr(workspace, name, WRONG[form, name])
    assert counted(given)[:2] != got[:2]


@pytest.mark.parametrize("seed", range(0, 8, 2))
def test_values_of_a_score_are_never_counted_too_low(
    seed: int,
    device: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = in_form("Gluon", part(seed, WINDOW), monkeypatch)
    memory.remember(inputs.buffers[0].clone(), inputs.buffers[0])  # as a batch sends them: without copies to compare
    forward, backward, _ = taken(inputs, WINDOW, first=True)
    given = runner(inputs, WINDOW, "Gluon")
    kept = value_bytes(given, inputs.q.shape[2], len(inputs.intervals()[0]))
    values = [entry.value for entry in tree_blocks._recent if isinstance(entry.value, torch.Tensor)]
    assert values and sum(value.nbytes for value in values) <= kept
    least = counted(given)
    assert forward <= least[0] + kept <= 3 * forward and backward <= least[1] + kept <= 3 * backward


@pytest.mark.parametrize("seed", range(6))
def test_values_of_a_layer_are_never_counted_too_low(
    seed: int,
    device: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slopes and depths made on the device: launches compute their values, and no operator of torch does."""
    inputs = in_form("Gluon", part(seed, ALIBI), monkeypatch)
    forward, backward, _ = taken(inputs, ALIBI)
    given = runner(inputs, ALIBI, "Gluon")
    least = counted(given)
    # Counted are operators of torch that would make the same values; the forward holds little else.
    room = 0 if given.group == 1 else 3 * inputs.q.nbytes
    assert forward <= least[0] <= 4 * forward + room and backward <= least[1] <= 4 * backward
    monkeypatch.setattr(workspace, "_values", lambda *_: (0, 0))
    assert counted(given)[0] < forward and counted(given)[1] < backward


@pytest.mark.parametrize("seed", range(20))
def test_lists_of_no_forest_are_longer(seed: int, device: None) -> None:  # noqa: F811
    given = runner(part(seed), SCORE, "two passes")
    rows = given.inputs.q.shape[2] * given.group
    for source, name in [(source, name) for source in given.sources() for name in kernels(given)]:
        config, is_boundary = given.config(name), source.keys.low is not None
        found = Lists.of(given.blocks(source, config))
        tile = config.block_m, config.block_n
        most = most_lists(float(rows), float(len(source)), *tile, group=given.group, is_boundary=is_boundary)
        assert all(getattr(found, field) <= getattr(most, field) for field in vars(found))
        assert list_bytes(found) <= list_bytes(most)
