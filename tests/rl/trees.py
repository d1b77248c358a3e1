"""Random trees of steps as plain paths, and the definitions of advantages written over them, one by one."""

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

Path = tuple[str, ...]


@st.composite
def rewarded_paths(draw: st.DrawFn) -> tuple[list[Path], list[int], list[float]]:
    """Paths of steps that share beginnings, duplicates among them; the prompt of each; its reward."""
    paths = draw(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8))
    groups = draw(st.lists(st.integers(0, 1), min_size=len(paths), max_size=len(paths)))
    reward = st.sampled_from([-1.0, 0.0, 1.0, 0.1, 0.3])
    return paths, groups, draw(st.lists(reward, min_size=len(paths), max_size=len(paths)))


def relative(value: float, among: Sequence[float], scale: str = "sample_std") -> float:
    """(value - mean) / std, 0 where all are equal."""
    n, mean = len(among), math.fsum(among) / len(among)
    if max(among) - min(among) < 1e-9:
        return 0.0
    if scale == "none":
        return value - mean
    freedom = n - 1 if scale == "sample_std" else n
    return (value - mean) / math.sqrt(math.fsum((x - mean) ** 2 for x in among) / freedom)


def slow_portool(
    paths: Sequence[Path],
    groups: Sequence[int],
    rewards: Sequence[float],
    *,
    gamma: float,
    aggregate: Any,
    w_traj: float,
    w_fork: float,
    scale: str,
    last: int = 0,
) -> list[list[float]]:
    """Per trajectory and step, by the formulas in the docstring of ``treefx.rl.portool``."""
    rows = range(len(paths))

    def reward_of(group: int, prefix: Path) -> float:
        through = [k for k in rows if groups[k] == group and paths[k][: len(prefix)] == prefix]
        return float(aggregate([gamma ** (len(paths[k]) - len(prefix) + last) * rewards[k] for k in through]))

    def siblings(group: int, prefix: Path) -> list[Path]:
        t = len(prefix)
        return sorted(
            {
                paths[k][:t]
                for k in rows
                if groups[k] == group and len(paths[k]) >= t and paths[k][: t - 1] == prefix[:-1]
            }
        )

    result = []
    for k in rows:
        own = relative(rewards[k], [rewards[i] for i in rows if groups[i] == groups[k]], scale)
        steps = [paths[k][: t + 1] for t in range(len(paths[k]))]
        among = [[reward_of(groups[k], other) for other in siblings(groups[k], step)] for step in steps]
        fork = [relative(reward_of(groups[k], step), of, scale) for step, of in zip(steps, among, strict=True)]
        result.append([w_traj * own + w_fork * value for value in fork])
    return result
