"""Fit the seconds of a cost model to plans that ran on this machine, and say what choosing by them costs."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import treefx
from treefx.errors import MemoryLimitError
from treefx.forests.forest import Forest
from treefx.output import watch
from treefx.planning.cost.model import CostModel, Seconds
from treefx.planning.execution.nonnegative import fit_nonnegative
from treefx.planning.search.plan import Plan
from treefx.planning.search.strategies import strategy_names
from treefx.tools.bench.parts import Runner

__all__ = ["Trial", "fit_seconds", "judge", "run"]

FloatArray = npt.NDArray[np.float64]

_REPEATS = 3
_CLEAR = 0.03
"""Pairs of layouts whose times differ by less are not asked for their order."""
_FORWARD = 1 / 3
"""Share of a forward in the time of both passes."""


@dataclass(frozen=True)
class Trial:
    """One forest by several layouts.

    Attributes:
        features: float64 [K, 6], what the time of a plan is linear in.
        measured: float64 [K], the least time of the processor of several runs in turn.
    """

    features: FloatArray
    measured: FloatArray


def run(forests: int, fitted: int, inner: str, save: Path | None = None, *, json: bool = False) -> list[dict[str, Any]]:
    """Measure random forests by all layouts, fit seconds to the first of them, and judge by the others.

    Times are those of this process on the processor, so that other processes count little; layouts of one forest run
    in turn, and the least time of each is taken.

    Args:
        forests: how many, those that are fitted among them.
        fitted: how many are fitted.
        inner: inner compiler.
        save: where the profile with the fitted seconds goes, for `treefx.plan` and `treefx plan --profile`.
        json: a program reads the result, so no progress bar is shown.

    Returns:
        The record of `judge`, of the forests that were not fitted.
    """
    runner = Runner(inner, 2, 64, _small_forest(0), lengths=(64, 256))
    trials = [_measure(runner, _small_forest(seed)) for seed in watch(range(forests), "forests", quiet=json)]
    cost = fit_seconds(runner.profile.cost, trials[:fitted])
    if save is not None:
        replace(runner.profile, cost=cost).save(save)
    return [judge(cost, trials[fitted:])]


def fit_seconds(cost: CostModel, trials: Sequence[Trial]) -> CostModel:
    """The cost model with the seconds that fit the trials, by relative errors."""
    features = np.concatenate([trial.features for trial in trials])
    measured = np.concatenate([trial.measured for trial in trials])
    fit = fit_nonnegative(features / measured[:, None], np.ones(len(measured)))
    return replace(
        cost,
        forward_seconds=Seconds(*(_FORWARD * fit[:3]).tolist()),
        backward_seconds=Seconds(*((1 - _FORWARD) * fit[:3]).tolist()),
        kv_seconds=Seconds(*fit[3:].tolist()),
    )


def judge(cost: CostModel, trials: Sequence[Trial]) -> dict[str, Any]:
    """How well predicted times choose among layouts that were measured.

    Returns:
        `forests`, `layouts`, `error_median` and `error_95` (predicted to measured time, relative),
        `pairs` (whose times differ by more than 3 %), `pairs_right` (share of them in the right order),
        `regret_median`, `regret_95` and `regret_most` (time of the layout predicted to be the fastest over the least
        time measured, less 1).
    """
    both = [np.add(a, b) for a, b in zip(cost.forward_seconds, cost.backward_seconds, strict=True)]
    fit = np.array([*both, *cost.kv_seconds])
    errors: list[float] = []
    orders: list[bool] = []
    regrets: list[float] = []
    for trial in trials:
        predicted = trial.features @ fit
        errors += np.abs(predicted / trial.measured - 1).tolist()
        regrets.append(float(trial.measured[predicted.argmin()] / trial.measured.min() - 1))
        for a, b in itertools.combinations(range(len(predicted)), 2):
            if abs(trial.measured[a] / trial.measured[b] - 1) > _CLEAR:
                orders.append(bool((predicted[a] < predicted[b]) == (trial.measured[a] < trial.measured[b])))
    return {
        "forests": len(trials),
        "layouts": len(errors),
        "error_median": float(np.median(errors)),
        "error_95": float(np.quantile(errors, 0.95)),
        "pairs": len(orders),
        "pairs_right": float(np.mean(orders)) if orders else 1.0,
        "regret_median": float(np.median(regrets)),
        "regret_95": float(np.quantile(regrets, 0.95)),
        "regret_most": max(regrets),
    }


def _measure(runner: Runner, forest: Forest) -> Trial:
    plans = _layouts(runner, forest)
    times = [[runner.run([plan]).seconds for plan in plans] for _ in range(_REPEATS)]
    return Trial(np.array([_features(plan) for plan in plans]), np.array(times).min(axis=0))


def _layouts(runner: Runner, forest: Forest) -> list[Plan]:
    """Different plans under a third of what the forest takes uncut: of every strategy, shared and not."""
    limit = max(runner.uncut_bytes(forest) // 3, 1)
    found: dict[Any, Plan] = {}
    for strategy in ("auto", *strategy_names()):
        for sharing in ("all", "auto"):
            with suppress(MemoryLimitError, treefx.InputError):
                plan = treefx.plan(forest, runner.profile, limit, strategy=strategy, sharing=sharing)
                key = tuple((part.keep, tuple(part.tokens.tolist())) for part in plan.parts)
                found.setdefault(key, plan)
    return list(found.values())


def _features(plan: Plan) -> list[float]:
    """Runs, tokens and pairs of both passes, and of passes for K/V alone."""
    again = np.array([part.keep != "keep" for part in plan.parts])
    columns = np.array([(1, size.tokens, size.pairs) for size in plan.sizes], dtype=np.float64)
    return [*columns.sum(axis=0), *columns[again].sum(axis=0)]


def _small_forest(seed: int) -> Forest:
    """4 to 12 rows of up to 500 tokens that branch off earlier ones anywhere."""
    random = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(int(random.integers(4, 13))):
        source = rows[int(random.integers(len(rows)))] if rows and random.random() < 0.9 else []
        kept = source[: int(random.integers(1, len(source) + 1))] if source else []
        fresh = int(random.integers(20, 400)) if rows else 400
        rows.append((kept + random.integers(0, 256, fresh).tolist())[:500])
    return Forest.from_sequences(rows)
