"""The figures of the paper, held against the simulation.

All are shares in percent: how much faster, or how much less. Published figures are from public notes on the paper
(arXiv 2401.16677), whose own text could not be read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

from treefx.tools.simulate.models import LARGE, SMALL
from treefx.tools.simulate.sublayer import Outcome

__all__ = ["FIGURES", "LIMIT", "Comparison", "Figure", "compare"]

LIMIT = 5.0
"""A simulated figure agrees with the published one within so many percentage points."""

_Measure = Callable[[list[Outcome]], float]


@dataclass(frozen=True)
class Figure:
    """Hold a published figure, its measure in the simulation, and the ``reason`` of a miss."""

    name: str
    section: str
    published: float
    measure: _Measure
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """A figure of the paper and of the simulation, in percent."""

    figure: Figure
    simulated: float

    @property
    def agrees(self) -> bool:
        """Within ``LIMIT`` points."""
        return abs(self.simulated - self.figure.published) <= LIMIT


def compare(outcomes: list[Outcome]) -> list[Comparison]:
    """Hold all figures against simulated sub-layers of all models."""
    return [Comparison(figure, figure.measure(outcomes)) for figure in FIGURES]


def _mean(values: Sequence[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))


def _of(outcomes: list[Outcome], small: bool, ranks: int = 0) -> list[Outcome]:
    names = {model.name for model in (SMALL if small else LARGE)}
    return [outcome for outcome in outcomes if outcome.sublayer.model in names and ranks in (0, outcome.sublayer.ranks)]


def _faster(configuration: str, worst: Callable[[Sequence[float]], float], small: bool = True) -> _Measure:
    return lambda outcomes: 100.0 * (worst([o.speedup(configuration) for o in _of(outcomes, small)]) - 1.0)


def _against(one: str, other: str, worst: Callable[[Sequence[float]], float]) -> _Measure:
    return lambda outcomes: (
        100.0 * (worst([o.speedup(one) / o.speedup(other) for o in _of(outcomes, small=True)]) - 1.0)
    )


def _near_memory(ranks: int) -> _Measure:
    return lambda outcomes: (
        100.0 * (_mean([o.rs.seconds / o.rs_near_memory.seconds for o in _of(outcomes, True, ranks)]) - 1.0)
    )


def _less(*names: str, ranks: int = 0) -> _Measure:
    def measure(outcomes: list[Outcome]) -> float:
        return 100.0 * (1.0 - _mean([_left(outcome, names) for outcome in _of(outcomes, True, ranks)]))

    return measure


def _left(outcome: Outcome, names: tuple[str, ...]) -> float:
    """Part of the bytes moved one after the other that T3 still moves."""
    before = outcome.gemm.traffic + outcome.rs.traffic
    return outcome.t3_mca.traffic.total(*names) / before.total(*names)


def _moved(worst: Callable[[Sequence[float]], float]) -> _Measure:
    def measure(outcomes: list[Outcome]) -> float:
        return 100.0 * (1.0 - 1.0 / worst([o.moved[0] / o.moved[1] for o in _of(outcomes, small=True)]))

    return measure


def _split(units: int, slower: float, total: int = 80) -> _Measure:
    """Run GEMM and all-reduce side by side, on ``total - units`` and ``units`` compute units."""

    def faster(outcome: Outcome) -> float:
        reduce = (outcome.rs.seconds + outcome.ag.seconds) * slower
        return outcome.sequential / max(outcome.gemm.seconds * total / (total - units), reduce)

    return lambda outcomes: 100.0 * (_mean([faster(outcome) for outcome in _of(outcomes, small=True)]) - 1.0)


_RATIOS = (
    "Which sub-layers figure 6 has, and on what they were timed, is not in our sources; the mean depends on how long "
    "GEMMs and all-reduces are relative to each other, and is 64 % over our large models."
)
_ORDER = (
    "The published figures do not fit each other: 1.30 / 1.20 is 8 %, not 13 %. The simulation knows of contention "
    "only bytes, the order of queues and the turns from reads to stores; rows, banks and the latency of loads, which "
    "Accel-Sim has, would cost T3 more where it is worst."
)
_LARGE = (
    "The simulated bound itself is too high: ideal overlap gives 41 % for OP of MT-NLG and 42 % for IP of GPT-3, whose "
    "GEMM and reduce-scatter are nearly equally long. The paper's must be in another proportion, which follows from "
    "width, GPUs, link and compute alone."
)
_READS = (
    "Tiles and their order are not in our sources. With the four combinations that we tried the reads fall by 27 to "
    "31 %; with tiles of 256x256, for which we know no kernel, by 35 %."
)

FIGURES = (
    Figure("ideal overlap of GEMM and reduce-scatter, mean", "6.1", 35.0, _faster("ideal", _mean)),
    Figure("ideal overlap of GEMM and reduce-scatter, most", "6.1", 50.0, _faster("ideal", max)),
    Figure("ideal overlap of GEMM and all-reduce, mean", "3.2", 67.0, _faster("ideal-all", _mean), _RATIOS),
    Figure("the same with 8 units for the all-reduce", "3.2", 18.0, _split(8, 1.41), _RATIOS),
    Figure("the same with 16 units for the all-reduce", "3.2", 49.0, _split(16, 1.07), _RATIOS),
    Figure("reduce-scatter with near-memory add, 8 GPUs", "6.1.1", 7.0, _near_memory(8)),
    Figure("reduce-scatter with near-memory add, 16 GPUs", "6.1.1", 3.0, _near_memory(16)),
    Figure("near-memory add on top of ideal overlap, most", "6.1.1", 4.0, _against("ideal-nmc", "ideal", max)),
    Figure("T3, mean", "6.1", 20.0, _faster("t3", _mean)),
    Figure("T3, most", "6.1", 39.0, _faster("t3", max)),
    Figure("T3-MCA, mean", "6.1", 30.0, _faster("t3-mca", _mean)),
    Figure("T3-MCA, most", "6.1", 47.0, _faster("t3-mca", max)),
    Figure("T3-MCA over T3, mean", "6.1", 13.0, _against("t3-mca", "t3", _mean), _ORDER),
    Figure("T3-MCA over T3, most", "6.1", 29.0, _against("t3-mca", "t3", max), _ORDER),
    Figure("T3-MCA against ideal overlap, mean", "6.1", -5.0, _against("t3-mca", "ideal", _mean)),
    Figure("large models, T3-MCA, mean", "6.4", 29.0, _faster("t3-mca", _mean, small=False)),
    Figure("large models, T3-MCA, most", "6.4", 35.0, _faster("t3-mca", max, small=False), _LARGE),
    Figure("data moved, less, mean", "6.2", 22.0, _moved(_mean)),
    Figure("data moved, less, most", "6.2", 36.0, _moved(max)),
    Figure("reduce-scatter reads, less, mean", "6.2", 100 * (1 - 1 / 2.4), _less("rs reads")),
    Figure("reduce-scatter reads, less, 8 GPUs", "6.2", 100 * (1 - 1 / 2.5), _less("rs reads", ranks=8)),
    Figure("reduce-scatter reads, less, 16 GPUs", "6.2", 100 * (1 - 1 / 2.2), _less("rs reads", ranks=16)),
    Figure("GEMM and reduce-scatter stores, less, mean", "6.2", 10.0, _less("gemm stores", "rs stores")),
    Figure("GEMM reads, less, mean", "6.2", 100 * (1 - 1 / 1.56), _less("gemm reads"), _READS),
)
