"""Time the planner, and count tokens of plans and batches, on a step's forests."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.data import TreeBatchSampler, distinct_tokens, first_fit_batches
from treefx.forests.forest import Forest
from treefx.output import watch
from treefx.planning.cost.model import Bytes, CostModel, Seconds
from treefx.planning.search.blocks import Counts
from treefx.planning.search.infeasible import smallest_requirement
from treefx.planning.search.planner import plan
from treefx.planning.search.policies import compare_policies

__all__ = ["agent_rollouts", "forked_rollouts", "group_rollouts", "run", "token_cost"]

Rows = list[npt.NDArray[np.int64]]

_LIMITS = (16_384, 32_768, 65_536)
_REPEATS = 3
_FEW_ROWS = 1000
"""Rows up to which first-fit, quadratic in them, is run for comparison."""


def run(json: bool = False) -> list[dict[str, Any]]:
    """Plan every forest under limits that are numbers of tokens.

    Args:
        json: a program reads the result, so no progress bar is shown.

    Returns:
        One record per forest and limit: `case`, `limit_tokens`, `plan_ms` (planning alone, CPU time, best of three),
        `parts`, `tokens` (distinct), and tokens that run forward: `planned`, `micro_batches` (prefixes again in every
        batch of whole rows), `one_branch` (inner nodes twice), `separate_rows`; `sampler` and `first_fit`: distinct
        tokens per batch, summed, of `TreeBatchSampler` and of first-fit in arrival order (where the limit holds every
        row; first-fit where rows are few enough for it).
    """
    cases = list(_cases())
    shown = watch(cases, "planning", quiet=json)
    return [_measure(name, rows, limit) for name, rows, limit in shown]


def token_cost() -> CostModel:
    """Return a cost of a byte per token, a hundredth for K/V: limits are token numbers."""
    per_token = Bytes([[0.0, 1.0]])
    return CostModel(
        resident_bytes=0.0,
        saved=per_token,
        forward=per_token,
        backward=per_token,
        kv=Bytes([[0.0, 0.1]]),
        kv_bytes_per_token=0.01,
        kv_grad_bytes_per_token=0.01,
        forward_seconds=Seconds(1e-2, 1e-5, 1e-9),
        backward_seconds=Seconds(2e-2, 2e-5, 2.5e-9),
        kv_seconds=Seconds(1e-2, 1e-5, 1e-9),
    )


def group_rollouts(random: np.random.Generator) -> Rows:
    """Make GRPO rows: 8 prompts of 2,048 tokens, 8 answers of 6,144 each; shuffled."""
    return _tree_rows(random, [(8, 2048), (8, 6144)])


def agent_rollouts(random: np.random.Generator) -> Rows:
    """Make agents' rows: a system prompt, 8 tasks, 8 trials of 3,584 tokens; shuffled."""
    return _tree_rows(random, [(1, 1024), (8, 512), (8, 3584)])


def forked_rollouts(random: np.random.Generator, prompts: int, forks: int) -> Rows:
    """Make prompts of 200 to 460 tokens, with rows that fork off by 50 to 300 tokens."""
    rows: Rows = []
    used = 0
    for _ in range(prompts):
        family: Rows = []
        for _ in range(forks):
            above = family[int(random.integers(len(family)))] if family else np.zeros(0, dtype=np.int64)
            kept = above[: int(random.integers(1, len(above) + 1))] if family else above
            added = int(random.integers(50, 300) if family else random.integers(200, 460))
            family.append(np.concatenate([kept, np.arange(used, used + added)]))
            used += added
        rows += family
    return [rows[i] for i in random.permutation(len(rows))]


def _cases() -> Iterator[tuple[str, Rows, int]]:
    """Rows and limits; 0 is the least that any plan of theirs needs."""
    random = np.random.default_rng(0)
    for limit in _LIMITS:
        yield "GRPO 8 x 8", group_rollouts(random), limit
        yield "agents, three levels", agent_rollouts(random), limit
    yield "10,000 rollouts", _tree_rows(random, [(10, 1000), (10, 200), (100, 50)]), _LIMITS[0]
    forked = forked_rollouts(random, 100, 100)
    yield "10,000 that fork anywhere", forked, 2000
    yield "10,000 that fork anywhere", forked, 100_000
    yield "10,000 that fork anywhere, least memory", forked, 0
    yield "100,000 nodes", _tree_rows(random, [(10, 20), (10, 20), (10, 20), (10, 10), (9, 5)]), _LIMITS[0]


def _tree_rows(random: np.random.Generator, levels: Sequence[tuple[int, int]]) -> Rows:
    """Make rows of a regular tree in random order, by children and tokens per level."""
    rows: Rows = [np.zeros(0, dtype=np.int64)]
    used = 0
    for children, tokens in levels:
        grown = []
        for row in rows:
            for _ in range(children):
                grown.append(np.concatenate([row, np.arange(used, used + tokens)]))
                used += tokens
        rows = grown
    return [rows[i] for i in random.permutation(len(rows))]


def _measure(name: str, rows: Rows, limit: int) -> dict[str, Any]:
    forest = Forest.from_sequences(rows)
    limit = limit or smallest_requirement(Counts(forest), token_cost()).limit_bytes
    seconds = float("inf")
    for _ in range(_REPEATS):
        started = time.process_time()
        found = plan(forest, token_cost(), limit)
        seconds = min(seconds, time.process_time() - started)
    policies = {item.policy: item.forward_tokens for item in compare_policies(found)}
    fits, is_small = max(map(len, rows)) <= limit, len(rows) <= _FEW_ROWS
    return {
        "case": name,
        "limit_tokens": limit,
        "plan_ms": round(seconds * 1e3, 1),
        "nodes": len(forest.nodes),
        "parts": len(found.parts),
        "tokens": forest.num_tokens,
        "planned": policies["treefx"],
        "one_branch": policies["one branch"],
        "micro_batches": policies["micro-batches"],
        "separate_rows": policies["separate rows"],
        "sampler": distinct_tokens(forest, list(TreeBatchSampler(rows, limit))) if fits else None,
        "first_fit": distinct_tokens(forest, first_fit_batches(forest, limit)) if fits and is_small else None,
    }
