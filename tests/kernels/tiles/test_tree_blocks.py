"""Tile lists against the dense mask: nothing visible is left out, nothing partial counts as full."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import treefx
from tests.strategies import Rows, row_batches
from treefx.kernels.score import Expr, evaluate
from treefx.kernels.tiles.key_programs import MOST_SLOTS, KeyPrograms, cut_lists
from treefx.kernels.tiles.tile_counts import Rates, TileCounts, count_tiles, predict_time
from treefx.kernels.tiles.tree_blocks import Keys, TileLists, TreeBlocks, build_blocks, find_blocks

DEPTH_Q, DEPTH_K = ("load", 0, ("q",)), ("load", 0, ("k",))
WINDOW: Expr = ("lt", ("sub", DEPTH_Q, DEPTH_K), ("const", 3))
CHUNKED: Expr = ("eq", ("floordiv", DEPTH_Q, ("const", 4)), ("floordiv", DEPTH_K, ("const", 4)))
CONDITIONS: dict[str, Expr | None] = {
    "tree": None,
    "window": WINDOW,
    "chunked": CHUNKED,
    "mixed": ("and", WINDOW, ("or", ("not", CHUNKED), ("ge", ("mod", ("k",), ("const", 5)), ("const", 2)))),
    "by head": ("ne", ("head",), ("const", 0)),
    "chosen": ("where", ("ne", DEPTH_K, ("const", 0)), ("gt", DEPTH_K, ("const", 2)), ("le", DEPTH_Q, ("const", 1))),
}


def dense_mask(low: Tensor, high: Tensor, queries: int, visible: Expr | None, depth: Tensor) -> Tensor:
    q, k = torch.arange(queries)[:, None], torch.arange(len(high))[None, :]
    mask = (low <= q) & (q < high)
    if visible is not None:
        zero = torch.zeros(1, dtype=torch.int64)
        mask = mask & evaluate(visible, dot=zero.float(), q=q, k=k, head=zero, batch=zero, buffers=[depth]).bool()
    return mask


def check_lists(
    lists: TileLists, mask: Tensor, rows: int, columns: int, *, exact: bool, whole: tuple[int, ...]
) -> None:
    """``mask`` with the listing side first; in dimensions ``whole`` no block of a full tile is ragged."""
    blocks = -(-mask.shape[0] // rows)
    assert sorted(lists.order.tolist()) == list(range(blocks))
    lengths = (lists.start[1:] - lists.start[:-1])[lists.order.long()]
    assert (lengths[1:] <= lengths[:-1]).all(), "longest first"
    for block in range(blocks):
        start, middle, stop = (int(x) for x in (lists.start[block], lists.middle[block], lists.start[block + 1]))
        full, partial = lists.tiles[start:middle].tolist(), lists.tiles[middle:stop].tolist()
        for other in range(-(-mask.shape[1] // columns)):
            tile = mask[block * rows : (block + 1) * rows, other * columns : (other + 1) * columns]
            fills = bool(tile.all()) and all(tile.shape[dim] == (rows, columns)[dim] for dim in whole)
            assert other not in full or fills
            assert bool(tile.any()) <= (other in full or other in partial)
            if exact:
                assert (other in full, other in partial) == (fills, bool(tile.any()) and not fills)


def check(blocks: TreeBlocks, mask: Tensor, *, exact: bool) -> None:
    check_lists(blocks.by_query, mask, blocks.query_block, blocks.key_block, exact=exact, whole=(1,))
    check_lists(blocks.by_key, mask.T, blocks.key_block, blocks.query_block, exact=exact, whole=(0, 1))


@given(
    row_batches(), st.sampled_from(sorted(CONDITIONS)), st.sampled_from([1, 2, 8, 64]), st.sampled_from([1, 4, 32]),
    st.integers(1, 9),
)  # fmt: skip
def test_lists_are_those_of_the_mask(rows: Rows, name: str, query_block: int, key_block: int, group: int) -> None:
    """Every query has a row for each head of its group; a tile may begin in the middle of a query."""
    forest = treefx.Forest.from_sequences(rows)
    ends, depth = forest.subtree_end.to(torch.int32), forest.depth
    blocks = build_blocks(Keys(ends), len(ends), query_block, key_block, CONDITIONS[name], [depth], group)
    mask = dense_mask(torch.arange(len(ends)), ends, len(ends), CONDITIONS[name], depth)
    check(blocks, mask.repeat_interleave(group, 0), exact=name == "tree")


@given(row_batches(), st.sampled_from([1, 2, 8, 64]), st.sampled_from([1, 4, 32]), st.integers(1, 5), st.booleans())
def test_tiles_are_counted_as_they_are_listed(rows: Rows, queries: int, keys: int, group: int, by_key: bool) -> None:
    ends = treefx.Forest.from_sequences(rows).subtree_end.to(torch.int32)
    blocks = build_blocks(Keys(ends), len(ends), queries, keys, group=group)
    lists = blocks.by_key if by_key else blocks.by_query
    counts = count_tiles(ends, queries, keys, group, by_key=by_key)
    assert counts.full.tolist() == (lists.middle - lists.start[:-1]).tolist()
    assert counts.partial.tolist() == (lists.start[1:] - lists.middle).tolist()


def test_a_launch_takes_as_long_as_its_longest_program_at_least() -> None:
    counts = TileCounts(torch.tensor([9, 0, 0]), torch.tensor([1, 1, 1]))
    rates = Rates(program=1.0, full=2.0, partial=3.0)
    assert predict_time(counts, rates, heads=4, processors=2, cut=False) == 4 * (22 + 4 + 4) / 2
    assert predict_time(counts, rates, heads=1, processors=100, cut=False) == 22.0
    assert predict_time(counts, rates, heads=1, processors=100, cut=True) == pytest.approx(0.3)


@pytest.mark.parametrize("group", range(1, 17))
def test_no_group_is_padded(group: int) -> None:
    """Pairs of the tiles over those that are visible: at most 1.02; a group of 5 that is padded to 8 takes 1.6."""
    prefix, leaf = 24 * 1024, 2048
    ends = torch.full((prefix + 4 * leaf,), prefix + 4 * leaf, dtype=torch.int32)
    ends[prefix:] = prefix + (torch.arange(4 * leaf, dtype=torch.int32) // leaf + 1) * leaf
    needed = group * int((ends - torch.arange(len(ends))).sum())
    for query_block, key_block in ((128, 64), (64, 128), (128, 128)):
        blocks = build_blocks(Keys(ends), len(ends), query_block, key_block, group=group)
        assert needed <= len(blocks.by_key.tiles) * query_block * key_block <= 1.02 * needed


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
def test_keys_from_outside(queries: int, keys: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randint(0, queries + 1, (keys,), generator=generator, dtype=torch.int32)
    high = torch.randint(0, queries + 1, (keys,), generator=generator, dtype=torch.int32)
    depth = torch.arange(keys + queries)
    blocks = build_blocks(Keys(high, low, 0, keys), queries, 8, 4)
    check(blocks, dense_mask(low, high, queries, None, depth), exact=False)


def test_a_window_leaves_tiles_out() -> None:
    tokens, depth = 4096, torch.arange(4096)
    ends = torch.full((tokens,), tokens, dtype=torch.int32)
    everything = build_blocks(Keys(ends), tokens, 64, 64)
    near = build_blocks(Keys(ends), tokens, 64, 64, ("lt", ("sub", DEPTH_Q, DEPTH_K), ("const", 200)), [depth])
    assert len(everything.by_query.tiles) == 64 * 65 // 2
    # Blocks 0 to 4 behind; the first three of them without gaps.
    assert len(near.by_query.tiles) == sum(min(block, 4) + 1 for block in range(64))
    assert int((near.by_query.middle - near.by_query.start[:-1]).max()) == 2


@pytest.mark.parametrize("leaves", [10_000, 200_000])
def test_many_one_token_leaves_take_linear_space(leaves: int) -> None:
    """A root with leaves, then leaves without a root: every block meets the root's block and its own."""
    ends = torch.arange(1, leaves + 1, dtype=torch.int32)
    ends[0] = leaves // 2
    blocks = build_blocks(Keys(ends), leaves, 64, 64)
    assert len(blocks.by_key.tiles) == len(blocks.by_query.tiles) <= 2 * (leaves // 64 + 1)


def visited(programs: KeyPrograms) -> dict[int, list[tuple[int, int, int, int]]]:
    """Return the (slot, start, middle, stop) of each block's programs, in the order of their slots."""
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    columns = (programs.order, programs.slot, programs.start, programs.middle, programs.stop)
    for block, *entry in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault(block, []).append(tuple(entry))
    return {block: sorted(entries) for block, entries in found.items()}


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=40))
def test_programs_visit_every_tile_once(lists: list[tuple[int, int]]) -> None:
    full, partial = torch.tensor(lists).T
    start = torch.cat([torch.zeros(1, dtype=torch.int64), (full + partial).cumsum(0)])
    programs = cut_lists(start, start[:-1] + full)
    lengths = programs.stop - programs.start
    assert (lengths[1:] <= lengths[:-1]).all(), "longest first"
    found, slots = visited(programs), []
    assert sorted(found) == list(range(len(lists)))
    for block, entries in found.items():
        assert entries[0][1] == start[block] and entries[-1][3] == start[block + 1]
        assert all(before[3] == after[1] for before, after in zip(entries[:-1], entries[1:], strict=True))
        assert sum(middle - first for _, first, middle, _ in entries) == full[block]
        assert all(first <= middle <= last for _, first, middle, last in entries)
        slots += [slot for slot, *_ in entries if slot >= 0]
    assert sorted(slots) == list(range(programs.slots)) and programs.slots <= MOST_SLOTS
    bounds = programs.bounds.tolist()
    assert bounds[0] == 0 and bounds[-1] == programs.slots
    for block, first, last in zip(programs.split.tolist(), bounds[:-1], bounds[1:], strict=True):
        assert [slot for slot, *_ in found[block]] == list(range(first, last))


def test_every_list_is_cut_by_its_own_length() -> None:
    """One list of 16 limits and 48 just above one: as many parts of each would be 784."""
    limit = 1000
    lengths = torch.tensor([16 * limit - 48, *[limit + 1] * 48])
    start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    programs = cut_lists(start, start[:-1])
    assert programs.slots == 16 + 2 * 48 <= MOST_SLOTS and len(programs.split) == 49
    assert int((programs.stop - programs.start).max()) <= limit


def test_lists_are_cut_where_a_few_would_take_longest() -> None:
    """A short prefix of many branches is; a long prefix, whose lists shorten evenly, and a small tree are not."""
    prefix, leaves = 512, 16
    ends = torch.full((prefix + leaves * 1024,), prefix + leaves * 1024, dtype=torch.int32)
    ends[prefix:] = prefix + (torch.arange(leaves * 1024, dtype=torch.int32) // 1024 + 1) * 1024
    found = build_blocks(Keys(ends), len(ends), 64, 128)
    assert sorted(found.key_programs.split.tolist()) == [0, 1, 2, 3] and found.key_programs.slots > 8
    longest = int((found.key_programs.stop - found.key_programs.start).max())
    assert longest <= 70 and int((found.by_key.start[1:] - found.by_key.start[:-1]).max()) == (512 + 16 * 1024) // 64
    for tokens in (1000, 100_000):
        whole = build_blocks(Keys(torch.full((tokens,), tokens, dtype=torch.int32)), tokens, 64, 128).key_programs
        assert not len(whole.split) and (whole.slot == -1).all()


def test_a_long_prefix_with_two_leaves() -> None:
    prefix, leaf = 100_000, 50
    ends = torch.full((prefix + 2 * leaf,), prefix + 2 * leaf, dtype=torch.int32)
    ends[prefix : prefix + leaf] = prefix + leaf
    blocks = build_blocks(Keys(ends), len(ends), 128, 128)
    last = blocks.by_query.start[-1] - blocks.by_query.start[-2]
    assert int(last) == -(-len(ends) // 128)
    assert int(blocks.by_query.order[0]) == len(blocks.by_query.order) - 1


def test_one_build_serves_all_layers() -> None:
    ends = torch.full((70,), 70, dtype=torch.int32)
    first = find_blocks(Keys(ends), 70, 16, 16)
    assert find_blocks(Keys(ends.clone()), 70, 16, 16) is first
    assert find_blocks(Keys(ends), 70, 16, 32) is not first
    assert find_blocks(Keys(ends), 70, 16, 16, WINDOW, [torch.arange(70)]) is not first
    ends[:3] = 3
    changed = find_blocks(Keys(ends), 70, 16, 16)
    assert changed is not first
    check(changed, dense_mask(torch.arange(70), ends, 70, None, ends), exact=True)


def test_the_condition_reads_the_buffers_of_the_call() -> None:
    ends = torch.full((64,), 64, dtype=torch.int32)
    near = find_blocks(Keys(ends), 64, 8, 8, WINDOW, [torch.arange(64)])
    far = find_blocks(Keys(ends), 64, 8, 8, WINDOW, [torch.zeros(64, dtype=torch.int64)])
    assert len(near.by_query.tiles) < len(far.by_query.tiles) == 36
