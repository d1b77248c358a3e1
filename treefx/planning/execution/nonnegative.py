"""Fit least squares with non-negative coefficients, for times and bytes."""

import numpy as np
import numpy.typing as npt

__all__ = ["fit_nonnegative"]

FloatArray = npt.NDArray[np.float64]


def fit_nonnegative(features: npt.ArrayLike, target: npt.ArrayLike) -> FloatArray:
    """Find x >= 0 that minimises |A x - b| by the active-set method.

    Lawson and Hanson (1974), chapter 23.

    Columns are scaled first, so that tokens and pairs, of very different size, count alike.

    Args:
        features: A, [samples, K].
        target: b, [samples].

    Returns:
        x, float64 [K].
    """
    matrix, goal = np.asarray(features, dtype=np.float64), np.asarray(target, dtype=np.float64)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    solution = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    tolerance = 1e-12 * max(float(np.abs(matrix.T @ goal).max(initial=0.0)), 1e-300)
    for _ in range(3 * matrix.shape[1]):
        slope = matrix.T @ (goal - matrix @ solution)
        slope[free] = -np.inf
        if slope.max() <= tolerance:
            break
        free[slope.argmax()] = True
        solution = _solve_free(matrix, goal, solution, free)
    result: FloatArray = solution / scale
    return result


def _solve_free(matrix: FloatArray, goal: FloatArray, solution: FloatArray, free: npt.NDArray[np.bool_]) -> FloatArray:
    """Solve for the free coefficients; fix negative ones at 0 one after the other."""
    while True:
        trial = np.zeros_like(solution)
        trial[free] = np.linalg.lstsq(matrix[:, free], goal, rcond=None)[0]
        negative = free & (trial <= 0)
        if not negative.any():
            return trial
        step = float((solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300)).min())
        solution = solution + step * (trial - solution)
        free &= solution > 1e-300
