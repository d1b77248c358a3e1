"""Rows of a tree that comes as a tree: nodes with tokens, and the node above each of them.

A rollout server knows its branches: turns, compactions, sub-agents. A node is known by its number, so nothing is
searched for, and two nodes with the same tokens below one parent stay two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treefx.errors import ForestError
from treefx.forests.input import RowBatch, read_sequences

__all__ = ["read_nodes"]

IntArray = npt.NDArray[np.int64]


def read_nodes(
    nodes: Iterable[Any], parents: Iterable[int], weights: Iterable[Any] | None, ends: Iterable[int] | None
) -> tuple[RowBatch, list[IntArray]]:
    """Check the nodes and follow each path; `Forest.from_nodes` lists the accepted forms.

    Returns:
        The rows, and for each row the numbers of its tokens among those of all nodes.

    Raises:
        ForestError: a node without tokens, a parent that is no node, a cycle, an end that is no node, a node that no
            row passes, or weights that do not fit.
    """
    batch = _named(read_sequences, nodes, weights)
    above = _numbers(parents, "parents", len(batch.rows), lowest=-1, count=len(batch.rows))
    paths = _paths(above)
    stops = _leaves(above) if ends is None else _numbers(ends, "ends", len(batch.rows), lowest=0)
    _check_reached(paths, stops)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in batch.rows])))
    numbers = [np.arange(offsets[i], offsets[i + 1], dtype=np.int64) for i in range(len(batch.rows))]
    keys = [np.concatenate([numbers[node] for node in paths[stop]]) for stop in stops]
    tokens = np.concatenate(batch.rows)
    weight = _with_first_weights(weights, batch, offsets)
    raw_weight = np.concatenate([weight[key] for key in keys])
    raw_weight[np.cumsum([0, *map(len, keys[:-1])])] = 0.0
    start = np.zeros(len(keys), dtype=np.int64)
    return RowBatch([tokens[key] for key in keys], raw_weight, start, None, batch.device), keys


def _named(read: Any, nodes: Any, weights: Any) -> RowBatch:
    """Call ``read`` on nodes and replace "row" by "node" in its errors."""
    try:
        batch: RowBatch = read(nodes, weights)
    except ForestError as error:
        raise ForestError(f"nodes and weights of Forest.from_nodes, each node read as a row: {error}") from error
    return batch


def _with_first_weights(weights: Iterable[Any] | None, batch: RowBatch, offsets: IntArray) -> npt.NDArray[np.float64]:
    """Return the weights of all tokens of all nodes.

    A node's first token is predicted too, by the last token of the node above.
    """
    if weights is None:
        return np.ones(int(offsets[-1]))
    flat = batch.raw_weight.copy()
    for number, given in enumerate(weights):
        value = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
        flat[offsets[number]] = float(value.flat[0])
    if not np.isfinite(flat).all():
        number = int(np.searchsorted(offsets, (~np.isfinite(flat)).argmax(), side="right")) - 1
        raise ForestError(f"weights of node {number}: expected finite numbers, got NaN or infinity")
    return flat


def _numbers(values: Any, name: str, nodes: int, *, lowest: int, count: int | None = None) -> IntArray:
    given = values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else list(values)
    wrong = next((i for i, item in enumerate(given) if type(item) is bool or not isinstance(item, int)), None)
    if wrong is not None:
        raise ForestError(f"{name}: expected numbers of nodes, got {type(given[wrong]).__name__} at position {wrong}")
    if count is not None and len(given) != count:
        raise ForestError(f"{name} must have one entry per node: expected {count}, got {len(given)}")
    if not given:
        raise ForestError(f"{name} is empty: a forest needs at least one row")
    for i, item in enumerate(given):
        if not lowest <= item < nodes:
            root = ", or -1 at a root" if lowest < 0 else ""
            raise ForestError(f"{name}[{i}]: expected the number of a node below {nodes}{root}, got {item}")
    return np.array(given, dtype=np.int64)


def _paths(above: IntArray) -> list[list[int]]:
    """Per node the nodes from its root down to itself.

    Raises:
        ForestError: a cycle.
    """
    paths: dict[int, list[int]] = {-1: []}
    for node in range(len(above)):
        chain: dict[int, None] = {}
        while node not in paths:
            if node in chain:
                raise ForestError(f"parents form a cycle through the nodes {sorted(chain)[:8]}: a root has parent -1")
            chain[node] = None
            node = int(above[node])
        for item in reversed(chain):
            paths[item] = [*paths[int(above[item])], item]
    return [paths[node] for node in range(len(above))]


def _leaves(above: IntArray) -> IntArray:
    return np.setdiff1d(np.arange(len(above), dtype=np.int64), above)


def _check_reached(paths: Sequence[Sequence[int]], stops: IntArray) -> None:
    missing = set(range(len(paths))).difference(*[paths[stop] for stop in stops])
    if missing:
        raise ForestError(f"no row passes node {min(missing)}: name it or a node below it in ends, or leave it out")
