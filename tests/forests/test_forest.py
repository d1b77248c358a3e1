"""Forests against the brute-force trie, the round trip, and everything that is refused."""

import pickle
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treefx
from tests.strategies import Rows, SlowTrie, row_batches, weighted_row_batches
from treefx import Forest, ForestError
from treefx.forests.context import ran_on_forest

many = settings(max_examples=150)


def prefixes_of(forest: Forest) -> list[tuple[int, ...]]:
    """The path of every packed token, followed through `parent`."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(forest.tokens.tolist(), forest.parent.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


def as_lists(rows: list[torch.Tensor]) -> Rows:
    return [row.tolist() for row in rows]


@many
@given(row_batches())
def test_packed_order_against_the_definition(rows: Rows) -> None:
    forest, slow = Forest.from_sequences(rows).validate(), SlowTrie(rows)
    paths = prefixes_of(forest)
    assert sorted(paths) == sorted(slow.through)
    assert forest.depth.tolist() == [len(path) - 1 for path in paths]
    assert forest.multiplicity.tolist() == [len(slow.through[path]) for path in paths]
    assert forest.raw_tokens == sum(map(len, rows)) and forest.num_tokens == len(paths)
    assert forest.sharing_ratio == pytest.approx(forest.raw_tokens / forest.num_tokens)
    assert forest.overlap_ratio == pytest.approx(1 - 1 / forest.sharing_ratio)
    for q, query in enumerate(paths):
        for k, key in enumerate(paths):
            assert (k <= q < forest.subtree_end[k]) == (query[: len(key)] == key)


@many
@given(row_batches())
def test_round_trip_in_the_callers_order(rows: Rows) -> None:
    forest = Forest.from_sequences(rows)
    assert as_lists(forest.sequences()) == rows
    assert [forest.tokens[index].tolist() for index in forest.token_of] == rows
    assert len(forest) == len(rows) and forest.row_lengths.tolist() == list(map(len, rows))


@many
@given(weighted_row_batches())
def test_edges_against_the_definition(batch: tuple[Rows, list[list[float]]]) -> None:
    rows, weights = batch
    forest, slow = Forest.from_sequences(rows, weights), SlowTrie(rows)
    edges, paths = forest.edges, prefixes_of(forest)
    expected = slow.edge_weights(weights)
    targets = [paths[target] for target in edges.target]
    assert sorted(targets) == sorted(expected)
    assert [paths[source] for source in edges.source] == [target[:-1] for target in targets]
    assert edges.token.tolist() == [target[-1] for target in targets]
    assert edges.weight.tolist() == pytest.approx([expected[target] for target in targets], abs=1e-14)
    flat_weights = [weight for row in weights for weight in row]
    for e, target in enumerate(targets):
        entries = slice(int(edges.row_offsets[e]), int(edges.row_offsets[e + 1]))
        through = edges.row_index[entries].tolist()
        assert sorted(through) == slow.through[target]
        assert edges.row_weight[entries].tolist() == [weights[row][len(target) - 1] for row in through]
        assert [flat_weights[i] for i in edges.raw_index[entries]] == edges.row_weight[entries].tolist()
        assert (edges.edge_of_entry[entries] == e).all()
    assert torch.allclose(edges.sum_entries(edges.row_weight), edges.weight, atol=1e-14)
    assert forest.row_weight.tolist() == pytest.approx([sum(row[1:]) for row in weights])


@many
@given(row_batches(), st.randoms(use_true_random=False))
def test_padded_batches_give_the_same_forest(rows: Rows, random: Any) -> None:
    width = max(map(len, rows)) + random.randint(0, 3)
    ids, mask = np.full((len(rows), width), -100), np.zeros((len(rows), width), dtype=int)
    weights = np.full((len(rows), width), np.nan)
    starts = [random.choice([0, width - len(row)]) for row in rows]
    for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
        part = slice(start, start + len(row))
        ids[b, part], mask[b, part], weights[b, part] = row, 1, np.arange(len(row)) + b
    padded = Forest.from_padded(torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(weights))
    plain = Forest.from_sequences(rows, [np.arange(len(row)) + b for b, row in enumerate(rows)])
    for name in ("tokens", "depth", "subtree_end", "parent", "flat_token_of", "token_weight", "multiplicity"):
        assert torch.equal(getattr(padded, name), getattr(plain, name)), name
    token_of = padded.padded_token_of()
    assert token_of.shape == (len(rows), width)
    assert torch.equal(token_of >= 0, torch.from_numpy(mask) == 1)
    assert torch.equal(padded.tokens[token_of[token_of >= 0]], torch.from_numpy(ids[mask == 1]))


@many
@given(row_batches())
def test_nodes_are_maximal_runs_with_one_row_set(rows: Rows) -> None:
    forest, slow = Forest.from_sequences(rows), SlowTrie(rows)
    paths, nodes = prefixes_of(forest), forest.nodes
    row_sets = [slow.through[path] for path in paths]
    assert nodes.start[0] == 0 and nodes.stop[-1] == len(paths)
    assert torch.equal(nodes.start[1:], nodes.stop[:-1])
    for start, stop, above in zip(nodes.start, nodes.stop, nodes.parent, strict=True):
        assert all(row_sets[k] == row_sets[start] for k in range(start, stop))
        assert all(paths[k][:-1] == paths[k - 1] for k in range(start + 1, stop))
        if above >= 0:
            last = int(nodes.stop[above]) - 1
            assert forest.parent[start] == last and row_sets[last] != row_sets[start]
        else:
            assert forest.parent[start] == -1


@given(row_batches())
def test_networkx_has_the_nodes_with_their_rows(rows: Rows) -> None:
    forest, slow = Forest.from_sequences(rows), SlowTrie(rows)
    graph, paths = forest.to_networkx(), prefixes_of(forest)
    assert sum(data["tokens"] for _, data in graph.nodes(data=True)) == forest.num_tokens
    assert sum(data["tokens"] * data["multiplicity"] for _, data in graph.nodes(data=True)) == forest.raw_tokens
    for node, data in graph.nodes(data=True):
        assert data["rows"] == slow.through[paths[data["start"]]]
        assert data["depth"] == len(paths[data["start"]]) - 1 and data["tokens"] == data["stop"] - data["start"]
        assert graph.in_degree(node) == (0 if data["depth"] == 0 else 1)


def test_accepted_row_types() -> None:
    expected = [[1, 2, 3], [1, 2, 4]]
    for rows in (
        expected,
        tuple(map(tuple, expected)),
        np.array(expected, dtype=np.int16),
        torch.tensor(expected, dtype=torch.int32),
        [torch.tensor(row) for row in expected],
        [np.array(row, dtype=np.uint8) for row in expected],
        [[np.int64(token) for token in row] for row in expected],
        (row for row in expected),
    ):
        forest = Forest.from_sequences(rows)
        assert as_lists(forest.sequences()) == expected and forest.num_tokens == 4
    assert as_lists(Forest.from_sequences([range(3)]).sequences()) == [[0, 1, 2]]


def test_per_row_and_per_token_weights_mix() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 2]]
    forest = Forest.from_sequences(rows, [2, [9.0, 0.5, 0.25], torch.tensor(True)])
    assert forest.edges.weight.tolist() == [2 + 0.5 + 1, 2, 0.25]
    assert Forest.from_sequences(rows, torch.tensor([1.0, 2.0, 3.0])).edges.weight.tolist() == [6, 1, 2]
    # The weight of a first token is never used, so even NaN there does no harm.
    assert Forest.from_sequences([[1, 2]], [[float("nan"), 3.0]]).edges.weight.tolist() == [3]


def test_default_weight_is_the_multiplicity_of_the_target() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [1, 2, 4]])
    assert forest.edges.weight.tolist() == forest.multiplicity[1:].tolist() == [3, 1, 2]


def test_two_thousand_nested_prefixes() -> None:
    forest = Forest.from_sequences([torch.arange(length) for length in range(2000, 0, -1)]).validate()
    assert forest.num_tokens == 2000 and len(forest.nodes) == 2000
    assert forest.to_networkx().number_of_edges() == 1999


def test_model_inputs_are_the_packed_row() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4, 5]])
    inputs = forest.model_inputs()
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 2, 3]]
    assert all(t.dtype == torch.int64 for t in inputs.values())


def test_forests_of_other_sizes_compile_nothing() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(lambda input_ids, position_ids: input_ids * 2 + position_ids, backend=count)
    for length in (3, 5, 9, 40):
        compiled(**Forest.from_sequences([list(range(length)), [0, 1, 7]]).model_inputs())
    assert graphs == 1


def test_repr_says_what_is_shared() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    text = repr(forest)
    assert repr(forest.edges) == "Edges(3 edges, 4 raw predictions)"
    assert "2 rows" in text and "6 raw tokens -> 4 distinct" in text and "1.50" in text and "3 nodes" in text


def test_forests_are_immutable_and_can_be_pickled_and_moved() -> None:
    forest = Forest.from_sequences([[1, 2], [1, 3]])
    with pytest.raises(FrozenInstanceError):
        forest.tokens = torch.zeros(3)  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(forest))
    assert as_lists(copy.sequences()) == [[1, 2], [1, 3]]
    moved = forest.to("meta")
    assert moved.tokens.device.type == moved.raw_weight.device.type == "meta" and forest.device.type == "cpu"


@pytest.mark.parametrize("rows", [[[1]], [[1, 2, 3], [1, 2, 4]], [[n] * (n + 1) + [99] for n in range(60)]])
def test_draw_writes_a_picture(rows: Rows, tmp_path: Path) -> None:
    path = tmp_path / "forest.png"
    Forest.from_sequences(rows).draw(path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 4000


@pytest.mark.parametrize(
    ("name", "index", "value", "words"),
    [
        ("tokens", 0, -1, "token ids"),
        ("parent", 1, 3, "parent stands before"),
        ("depth", 2, 7, "depth"),
        ("subtree_end", 3, 3, "ends after its token"),
        ("subtree_end", 1, 5, "parent's subtree"),
        ("subtree_end", 2, 4, "only descendants"),
        ("flat_token_of", 0, 9, "within the forest"),
        ("flat_token_of", 2, 5, "parent to child"),
        ("multiplicity", 0, 5, "multiplicity"),
        ("token_weight", 2, 5.0, "token_weight"),
    ],
)
def test_validate_finds_what_is_broken(name: str, index: int, value: float, words: str) -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [6, 7]])
    assert forest.subtree_end.tolist() == [4, 4, 3, 4, 6, 6]
    broken = getattr(forest, name).clone()
    broken[index] = value
    with pytest.raises(ForestError, match=words):
        replace(forest, **{name: broken}).validate()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "empty"),
        ([[1, 2], []], "row 1 is empty"),
        ([[1, 2.0]], "got float 2.0 at position 1"),
        ([[1.0, 2.0]], "got float"),
        ([["a", "b"]], "got str"),
        (["ab"], "tokenise"),
        ("ab", "one entry per row"),
        ([[1, None]], "got NoneType None at position 1"),
        ([None], "got NoneType"),
        (None, "one entry per row"),
        ([[1, [2, 3]]], "got list"),
        ([1, 2, 3], "wrap a single row"),
        ([[1, True]], "got bool True at position 1"),
        ([[1, -100]], "at least 0, got -100 at position 1"),
        ([[1, 2**70]], "64 bits"),
        ([torch.tensor([1.0, 2.0])], "torch.float32"),
        ([torch.tensor([True])], "torch.bool"),
        ([torch.tensor([[1, 2]])], r"shape \[1, 2\]"),
        (torch.tensor(3), "wrap it in a list"),
        (torch.tensor([1, 2]), r"shape \[\]"),
        ([np.array([1, None], dtype=object)], "object"),
        ({"input_ids": [[1]]}, "one entry per row"),
        ([torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64, device="meta")], "one device"),
    ],
)
def test_unfit_rows_are_refused(rows: Any, words: str) -> None:
    with pytest.raises(ForestError, match=words):
        Forest.from_sequences(rows)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0], "one entry per row: expected 2, got 1"),
        ([1.0, [1.0, 1.0]], r"as long as the row \(3\)"),
        ([1.0, [1.0, float("nan"), 1.0]], "row 1: expected finite"),
        ([float("inf"), 1.0], "row 0: expected finite"),
        ([1.0, "1.0"], "expected numbers"),
        ([1.0, None], "expected numbers"),
        ([1.0, [[1.0], [1.0, 2.0]]], "ragged"),
        (2.0, "one entry per row"),
        ([1.0, torch.ones(3, requires_grad=True)], "detach"),
        ([1.0, torch.ones(3, dtype=torch.complex64)], "real numbers"),
    ],
)
def test_unfit_weights_are_refused(weights: Any, words: str) -> None:
    with pytest.raises(ForestError, match=words):
        Forest.from_sequences([[1, 2], [1, 2, 3]], weights)


ids = torch.tensor([[1, 2, 3], [1, 2, 4]])


@pytest.mark.parametrize(
    ("input_ids", "attention_mask", "weights", "words"),
    [
        (ids, torch.tensor([[1, 0, 1], [1, 1, 1]]), None, "row 0 has a hole"),
        (ids, torch.tensor([[1, 1, 1], [0, 0, 0]]), None, "all of row 1"),
        (ids, torch.tensor([[1, 1, 2], [1, 1, 1]]), None, "only 0 and 1"),
        (ids, torch.ones(2, 4), None, r"\[2, 3\], got \[2, 4\]"),
        (ids, torch.ones(2, 1, 3, 3), None, "padding mask"),
        (ids.float(), None, None, "torch.float32"),
        (ids[0], None, None, r"shape \[3\]"),
        (ids[:, :0], None, None, "is empty"),
        (ids.tolist(), None, None, "from_sequences"),
        (ids - 3, None, None, "at least 0"),
        (ids, None, torch.ones(3, 2), "shape of input_ids"),
        (ids, None, torch.tensor([1.0, float("nan")]), "row 1: expected finite"),
        (ids, torch.ones(2, 3, device="meta"), None, "one device, got cpu, meta"),
    ],
)
def test_unfit_padded_batches_are_refused(input_ids: Any, attention_mask: Any, weights: Any, words: str) -> None:
    with pytest.raises(ForestError, match=words):
        Forest.from_padded(input_ids, attention_mask, weights)


def test_mask_dtypes_and_per_row_weights() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    for dtype in (torch.bool, torch.int64, torch.float32, torch.bfloat16):
        forest = Forest.from_padded(ids, mask.to(dtype), torch.tensor([1.0, 5.0]))
        assert as_lists(forest.sequences()) == [[1, 2, 3], [2, 4]]
        assert forest.row_start.tolist() == [0, 1] and forest.edges.weight.tolist() == [1, 1, 5]


def test_building_a_forest_loads_no_kernel_and_no_drawing() -> None:
    heavy = ["matplotlib", "transformers", "treefx.kernels.ops", "treefx.inspection.inspector", "treefx.backend"]
    program = (
        "import sys, treefx\n"
        "treefx.Forest.from_sequences([[1, 2]]).edges\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_found_lazily() -> None:
    assert treefx.kernels.__name__ == "treefx.kernels"
    with pytest.raises(AttributeError, match="no attribute 'forrest'"):
        _ = treefx.forrest


def test_use_nests_and_restores() -> None:
    first, second = Forest.from_sequences([[1]]), Forest.from_sequences([[2]])
    assert treefx.current_forest() is None
    with treefx.use(first) as entered:
        assert entered is first
        with pytest.raises(RuntimeError, match="inside"), treefx.use(second):
            assert treefx.current_forest() is second
            raise RuntimeError("inside")  # which the context passes on, though nothing ran in it
        assert treefx.current_forest() is first
        ran_on_forest()
    assert treefx.current_forest() is None


def test_threads_do_not_see_each_others_forest() -> None:
    seen: list[Forest | None] = []
    with treefx.use(Forest.from_sequences([[1]])):
        thread = threading.Thread(target=lambda: seen.append(treefx.current_forest()))
        thread.start()
        thread.join()
        ran_on_forest()
    assert seen == [None]


def test_a_context_without_a_run_is_an_error() -> None:
    """Also where another context, inside or around, has seen one; and logits made in it are refused."""
    first, second = Forest.from_sequences([[1, 2], [1, 3]]), Forest.from_sequences([[1, 2], [1, 4]])
    logits = torch.zeros(first.num_tokens, 5)
    treefx.edge_logprobs(logits, first)  # of a forest that was never in use the logits may come from anywhere
    with pytest.raises(treefx.UnsupportedError, match="none did.*model.compile"), treefx.use(first):
        with pytest.raises(treefx.UnsupportedError, match="no compiled model has run"):
            treefx.edge_logprobs(logits, first)
        with treefx.use(second):
            ran_on_forest()
    for read in (treefx.edge_logprobs, treefx.edge_entropy):
        with pytest.raises(treefx.UnsupportedError, match="no compiled model has run"):
            read(logits, first)
    treefx.edge_logprobs(logits, second)
    with treefx.use(first):
        ran_on_forest()
    treefx.edge_logprobs(logits, first)


def test_use_refuses_what_is_no_forest() -> None:
    with pytest.raises(ForestError, match="got list"), treefx.use([[1, 2]]):  # type: ignore[arg-type]
        pass
