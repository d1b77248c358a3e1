"""Seconds that are fitted to plans, and what choosing by them costs, on times made up by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cli.validation import assert_measured
from tests.planning.costs import linear_cost
from treefx.planning.cost.model import Seconds
from treefx.tools.bench.calibrate import Trial, fit_seconds, judge

TRUE = np.array([0.1, 2e-3, 1e-6, 0.05, 1e-3, 5e-7])
"""Seconds per part, token and pair of both passes, and of passes for K/V alone."""


def trials(count: int, wrong: float = 0.0) -> list[Trial]:
    random = np.random.default_rng(0)
    features = random.uniform(0.1, 1.0, (count, 5, 6)) * [8, 2000, 1e6, 4, 800, 3e5]
    return [Trial(rows, rows @ TRUE * random.uniform(1 - wrong, 1 + wrong, 5)) for rows in features]


def test_seconds_are_found_again() -> None:
    cost = fit_seconds(linear_cost(), trials(20))
    both = np.add(cost.forward_seconds, cost.backward_seconds)
    np.testing.assert_allclose([*both, *cost.kv_seconds], TRUE, rtol=1e-6)
    figures = judge(cost, trials(9))
    assert_measured("calibrate", figures)
    assert figures["error_95"] < 1e-6
    assert (figures["pairs_right"], figures["regret_most"]) == (1.0, pytest.approx(0.0))


def test_errors_orders_and_regrets_are_counted() -> None:
    """Two layouts, of which the one that is predicted to be faster takes a fifth more time."""
    trial = Trial(np.array([[1.0, 0, 0, 0, 0, 0], [2.0, 0, 0, 0, 0, 0]]), np.array([1.2, 1.0]))
    second: dict[str, Any] = {name: Seconds(0.5, 0.0, 0.0) for name in ("forward_seconds", "backward_seconds")}
    figures = judge(replace(linear_cost(), **second), [trial])
    assert (figures["pairs"], figures["pairs_right"]) == (1, 0.0)
    assert figures["regret_most"] == pytest.approx(0.2)
    assert figures["error_median"] == pytest.approx((1.0 + 1 / 6) / 2)
