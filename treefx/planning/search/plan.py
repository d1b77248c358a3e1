"""Hold a finished plan: parts of a forest, the order of steps, and predicted needs."""

import json
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from treefx.extras import needs
from treefx.forests.forest import Forest
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.part import Part, Schedule, Step, spans
from treefx.planning.search.simulate import Moment
from treefx.views import find_view

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Plan"]


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How a forest runs within a memory limit; made by `treefx.plan`.

    Attributes:
        forest: the planned forest.
        schedule: the parts and the order of their steps.
        sizes: how big each part is.
        moments: predicted memory and time of every step.
        cost: the cost model they come from.
        memory_limit_bytes: the limit; no moment's peak is above it.
        strategy: the name of the strategy that cut the forest (`treefx.planning.search.strategies`).
    """

    forest: Forest
    schedule: Schedule
    sizes: tuple[Size, ...]
    moments: tuple[Moment, ...]
    cost: CostModel
    memory_limit_bytes: int
    strategy: str = "auto"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts, depth first; every token of the forest is in exactly one."""
        return self.schedule.parts

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the steps in order."""
        return self.schedule.steps

    @cached_property
    def peak_bytes(self) -> int:
        """Predicted peak, parameters and gradients included; at most the limit."""
        return round(max(moment.peak_bytes for moment in self.moments))

    @cached_property
    def seconds(self) -> float:
        """Predicted time of all steps."""
        return sum(moment.seconds for moment in self.moments)

    @cached_property
    def recomputed_tokens(self) -> int:
        """Count tokens that run forward a second time, of parts that drop activations."""
        return sum(len(part) for part in self.parts if part.keep != "keep")

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that run forward per distinct token: 1 where nothing is computed twice."""
        return 1.0 + self.recomputed_tokens / self.forest.num_tokens

    def __repr__(self) -> str:
        peak, limit = (value / 2**20 for value in (self.peak_bytes, self.memory_limit_bytes))
        parts = f"{len(self.parts)} part{'s' * (len(self.parts) != 1)}"
        return (
            f"Plan({parts} of {self.forest.num_tokens:,} tokens, {self.recomputed_tokens:,} "
            f"recomputed, predicted peak {peak:,.1f} of {limit:,.1f} MiB)"
        )

    @needs("cli", "a table of a plan")
    def explain(self) -> str:
        """Format a table: part, tokens, boundary, bytes, time, binding step, and rivals."""
        text: str = find_view("explain_plan")(self)
        return text

    def draw(self, path: "str | PathLike[str]") -> None:
        """Save a picture: the tree coloured by part, and memory over time under the limit.

        Args:
            path: image file; the suffix (`.png`, `.svg`, `.pdf`) chooses the format.

        Raises:
            OSError: the file cannot be written.
        """
        find_view("draw_plan")(self, path)

    def to_networkx(self, rank: int | None = None) -> "nx.DiGraph[int]":
        """Export the parts as a directed graph, parents to children.

        Args:
            rank: the process that the plan is for, written on every part.

        Returns:
            Nodes numbered as `parts` with `tokens`, `boundary` (tokens whose K/V it reads), `bytes` (peak while one of
            its steps runs, all that is held included), `seconds` (all its steps), `mode` ("keep", "recompute",
            "offload" or "leaf") and `rank`; edges with `kv_tokens` and `kv_bytes` that the child reads of the parent's
            own tokens.
        """
        graph: nx.DiGraph[int] = find_view("plan_to_networkx")(self, rank)
        return graph

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as lists and numbers; tokens of a part are intervals [start, stop).

        Intervals are of packed indices.
        """
        return {
            "tokens": self.forest.num_tokens,
            "raw_tokens": self.forest.raw_tokens,
            "memory_limit_bytes": self.memory_limit_bytes,
            "peak_bytes": self.peak_bytes,
            "recomputed_tokens": self.recomputed_tokens,
            "seconds": self.seconds,
            "strategy": self.strategy,
            "parts": [
                {
                    "index": part.index,
                    "parent": part.parent,
                    "keep": part.keep,
                    "intervals": intervals(part),
                    **size._asdict(),
                }
                for part, size in zip(self.parts, self.sizes, strict=True)
            ],
            "steps": [
                {
                    "kind": moment.step.kind,
                    "part": moment.step.part,
                    "held_bytes": round(moment.held_bytes),
                    "peak_bytes": round(moment.peak_bytes),
                    "seconds": moment.seconds,
                }
                for moment in self.moments
            ],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def intervals(part: Part) -> list[list[int]]:
    """The part's tokens as maximal intervals [start, stop) of packed indices."""
    return [list(pair) for pair in zip(*(side.tolist() for side in spans(part)), strict=True)]
