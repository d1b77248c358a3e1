"""Measure the assignment of forests to many ranks: balance, duplicates, seconds.

Forests are outlines, lengths and shared prefixes without tokens, drawn so that what sharing saves, the largest tree and
the longest row are near those of GRPO groups and of agents' tasks. The cost is that of an 8B model (`QWEN3_8B`).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from treefx.output import watch
from treefx.planning.cost.analytic import Dimensions, estimate_cost
from treefx.planning.cost.model import CostModel
from treefx.scale.outline import Outline
from treefx.scale.rivals import rival_balances
from treefx.scale.split import split

__all__ = ["CASES", "RANKS", "eight_billion", "forked_prompts", "run"]

RANKS = (8, 64, 512, 4096)
_REPEATS = 5
_LONGEST = 16_384
QWEN3_8B = Dimensions(
    layers=36,
    hidden=4096,
    intermediate=12_288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    parameters=8_190_735_360,
    active_parameters=8_190_735_360,
    bytes_per_number=2,
)


def eight_billion() -> CostModel:
    """An 8B model at 400 TFLOP/s."""
    return estimate_cost(QWEN3_8B, flops_per_second=4e14)


def run(json: bool = False) -> list[dict[str, Any]]:
    """Assign every forest to every number of ranks.

    Args:
        json: a program reads the result, so no progress bar is shown.

    Returns:
        One record per forest and ranks: `forest`, `rows`, `ranks`, `balance` (the busiest rank over the lower bound: an
        even share without duplicates, or the longest row), `duplicated` (tokens computed again per distinct token),
        `bound_by` ("share" or "row"), `idle` ranks, `ms` (best of five), and the balance of rivals.
    """
    cases = [(name, make(), ranks) for name, make in CASES.items() for ranks in RANKS]
    shown = watch(cases, "assigning", quiet=json)
    return [_measure(name, outline, ranks) for name, outline, ranks in shown]


def _measure(name: str, outline: Outline, ranks: int) -> dict[str, Any]:
    cost = eight_billion()
    seconds = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        found = split(outline, ranks, cost)
        seconds = min(seconds, time.perf_counter() - started)
    total = float(split(outline, 1, cost).cost.sum())
    return {
        "forest": name,
        "rows": len(outline),
        "ranks": ranks,
        "balance": round(found.balance, 4),
        "duplicated": round(found.duplicated, 4),
        "bound_by": "row" if found.lower_bound > 1.0001 * total / ranks else "share",
        "idle": sum(not len(rows) for rows in found.rows),
        "ms": round(seconds * 1e3, 1),
        **{key: round(value, 3) for key, value in rival_balances(outline, ranks, cost).items()},
    }


def group_prompts(prompts: int, answers: int, seed: int = 0) -> Outline:
    """GRPO: lengths of answers vary from prompt to prompt and within one, log-normally."""
    random = np.random.default_rng(seed)
    length, shared = [], []
    for _ in range(prompts):
        prompt = int(np.clip(random.lognormal(np.log(450), 0.5), 64, 4096))
        typical = random.lognormal(np.log(1400), 0.5)
        for answer in range(answers):
            length.append(prompt + int(np.clip(random.lognormal(np.log(typical), 0.5), 16, _LONGEST)))
            shared.append(prompt if answer else 0)
    return _outline(length, shared)


def agent_tasks(tasks: int, seed: int = 0) -> Outline:
    """Make tasks of few or many trials, each of which leaves the one before at some turn."""
    random = np.random.default_rng(seed)
    length, shared = [], []
    for _ in range(tasks):
        turns = [int(random.lognormal(np.log(1500), 0.4))]
        for trial in range(int(np.clip(random.lognormal(np.log(4), 1.2), 1, 100))):
            kept = turns[: int(random.integers(1, max(int(0.8 * len(turns)), 1) + 1))]
            new = np.clip(random.lognormal(np.log(300), 1.1, int(random.integers(1, 14))), 8, _LONGEST)
            turns = [*kept, *new.astype(int).tolist()]
            length.append(sum(turns))
            shared.append(sum(kept) if trial else 0)
    return _outline(length, shared)


def forked_prompts(prompts: int, forks: int, seed: int = 0) -> Outline:
    """Prompts with rows that fork off earlier ones at random places."""
    random = np.random.default_rng(seed)
    length, shared = [], []
    for _ in range(prompts):
        longest = int(random.integers(200, 460))
        for fork in range(forks):
            length.append(int(random.integers(longest // 2, longest)))
            shared.append(int(random.integers(1, min(length[-2:]))) if fork else 0)
    return _outline(length, shared)


def _outline(length: list[int], shared: list[int]) -> Outline:
    return Outline(np.array(length), np.array(shared), np.arange(len(length)))


CASES: dict[str, Callable[[], Outline]] = {
    "GRPO 512 x 16": lambda: group_prompts(512, 16),
    "GRPO 2048 x 8": lambda: group_prompts(2048, 8),
    "agents, 256 tasks": lambda: agent_tasks(256),
    "agents, 1024 tasks": lambda: agent_tasks(1024),
    "100 prompts x 100 forks": lambda: forked_prompts(100, 100),
}
