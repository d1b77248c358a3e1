"""What `portool.py` prints and draws of its figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from treefx.output import console, make_table, print_line

__all__ = ["draw_results", "print_results"]


def print_results(figures: Mapping[str, Any]) -> None:
    seeds = figures["seeds"]
    columns = ["seed", "start", "end", "greedy", "steps", "generated", "/ row", "trained", "of raw", "s"]
    for name in seeds[0]["methods"]:
        of = [seed["methods"][name] for seed in seeds]
        rows = [*((seed["seed"], course) for seed, course in zip(seeds, of, strict=True)), ("median", _median(of))]
        console.print(make_table(name, columns, [[label, *_cells(course)] for label, course in rows]))
    print_line("success on held-out tasks in %; tokens generated, in all and per trajectory, and trained; seconds")
    console.print(
        make_table(
            f"means of {len(seeds)} seeds, with 95 % intervals",
            ["method", "success", "greedy", "steps", "gain", "more steps"],
            _means(seeds),
        )
    )
    print_line(f"gain and more steps: seed by seed, in comparison with {next(iter(seeds[0]['methods']))}")
    for policy in seeds[0]["tokens_per_trajectory"]:
        of = [seed["tokens_per_trajectory"][policy] for seed in seeds]
        rows, trees = (median(each) for each in zip(*(both.values() for both in of), strict=True))
        fewer = median(one / other for one, other in (both.values() for both in of))
        print_line(
            f"generated tokens per trajectory, policy at the {'start' if policy == 'start' else f'end of {policy}'}: "
            f"rows {rows:.1f}, trees {trees:.1f}, {fewer:.2f} times fewer"
        )
    for name, timing in figures["step_seconds"].items():
        ratio = timing["rows"] / timing["treefx"]
        print_line(
            f"one training step, {name}: {1000 * timing['treefx']:.0f} ms, on padded rows through {figures['inner']} "
            f"{1000 * timing['rows']:.0f} ms, {ratio:.1f} times; largest difference of a gradient {timing['error']:.0e}"
        )
    compiling = ", ".join(f"{way} {seconds:.0f} s" for way, seconds in figures["compile_seconds"].items())
    print_line(
        f"compiling: {compiling}; all: {figures['seconds']:.0f} s, {figures['processor_seconds']:.0f} of processors"
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of a few values, and half the width of its 95 % interval (Student's t, its quantile by drawing)."""
    if len(values) < 2:
        return values[0], float("nan")
    draws = np.random.default_rng(0).standard_t(len(values) - 1, 10**6)
    return mean(values), float(np.quantile(abs(draws), 0.95)) * stdev(values) / len(values) ** 0.5


def _means(seeds: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Per method success, greedy success and steps at the end; the first and the last also less the first method's."""
    names = list(seeds[0]["methods"])
    rows = []
    for name in names:
        own, first = (_ends([seed["methods"][of] for seed in seeds]) for of in (name, names[0]))
        apart = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(own, first, strict=True)]
        shown = [*zip(own, _DIGITS, strict=True), *([(apart[0], 1), (apart[2], 2)] if name != names[0] else [])]
        cells = ["{:.{digits}f} ± {:.{digits}f}".format(*interval(values), digits=digits) for values, digits in shown]
        rows.append([name, *cells, *[""] * (5 - len(cells))])
    return rows


_DIGITS = (1, 1, 2)


def _ends(courses: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Success and greedy success in percent, and steps, of every seed at the end."""
    success = [100 * course["success"][-1] for course in courses]
    return [success, [100 * course["greedy"] for course in courses], [course["steps"][-1] for course in courses]]


def _median(courses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every figure; of those of several evaluations, at the start and at the end."""
    ends = [{k: [v[0], v[-1]] if isinstance(v, list) else [v] for k, v in course.items()} for course in courses]
    medians = {k: [median(of[k][i] for of in ends) for i in range(len(ends[0][k]))] for k in ends[0]}
    return {k: v if isinstance(courses[0][k], list) else v[0] for k, v in medians.items()}


def _cells(course: Mapping[str, Any]) -> list[str]:
    percents = [f"{100 * value:.1f}" for value in (course["success"][0], course["success"][-1], course["greedy"])]
    generated = course["generated"][-1]
    counts = [course["trained_tokens"], course["raw_tokens"]]
    seconds = course["sampling_seconds"] + course["training_seconds"]
    per_trajectory = generated / course["trajectories"]
    return [
        *percents, f"{course['steps'][-1]:.2f}", f"{generated:,.0f}", f"{per_trajectory:.1f}",
        *(f"{count:,.0f}" for count in counts), f"{seconds:.0f}",
    ]  # fmt: skip


def draw_results(figures: Mapping[str, Any], path: Path) -> None:
    """Success and steps over generated tokens, a thin line per seed and a thick one for medians; seconds per step."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    colors = ("tab:orange", "tab:red", "tab:blue", "tab:cyan")
    for color, name in zip(colors, figures["seeds"][0]["methods"], strict=True):
        of = [seed["methods"][name] for seed in figures["seeds"]]
        for axes, key, factor in ((left, "success", 100), (middle, "steps", 1)):
            for course in of:
                axes.plot(course["generated"], [factor * v for v in course[key]], color=color, alpha=0.3, linewidth=1)
            points = [
                [median(at) for at in zip(*(course[k] for course in of), strict=True)] for k in ("generated", key)
            ]
            axes.plot(points[0], [factor * value for value in points[1]], color=color, marker="o", label=name)
    left.set(xlabel="generated tokens", ylabel="success on held-out tasks, %", ylim=(0, 100))
    middle.set(xlabel="generated tokens", ylabel="steps per task", ylim=(0, None))
    left.legend()
    names = list(figures["step_seconds"])
    for shift, way, color in ((-0.2, "treefx", "tab:green"), (0.2, "rows", "tab:gray")):
        heights = [1000 * figures["step_seconds"][name][way] for name in names]
        label = "treefx" if way == "treefx" else f"padded rows, {figures['inner']}"
        right.bar([place + shift for place in range(len(names))], heights, 0.4, color=color, label=label)
    right.set(xticks=range(len(names)), xticklabels=names, ylabel="ms per training step")
    right.set_ylim(top=1.3 * right.get_ylim()[1])  # room for the legend
    right.legend()
    figure.savefig(path, dpi=110)
