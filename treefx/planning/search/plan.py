"""Hold a finished plan: parts, the order of their steps, predicted memory and time."""

import json
from dataclasses import asdict, dataclass
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

__all__ = ["Plan", "Unshared"]


@dataclass(frozen=True, kw_only=True)
class Unshared:
    """Describe a level that several parts compute, because sharing was predicted to cost more.

    Attributes:
        row: the first row through it, as the caller numbers rows.
        rows: number of rows through it.
        depth: tokens above it.
        tokens: number of its tokens.
        copies: parts that compute it.
        replay_seconds: predicted time of all copies but one.
        part_seconds: predicted time of a part for it: launches, K/V handed out, gradients gathered.
    """

    row: int
    rows: int
    depth: int
    tokens: int
    copies: int
    replay_seconds: float
    part_seconds: float

    @property
    def reason(self) -> str:
        """Explain in a sentence why the level is not shared."""
        last = self.depth + self.tokens - 1
        return (
            f"tokens {self.depth:,} to {last:,} of row {self.row}, which {self.rows} rows have, are computed in "
            f"{self.copies} parts: the copies take {self.replay_seconds * 1e3:,.3g} ms, a part for them "
            f"{self.part_seconds * 1e3:,.3g} ms"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all figures and the reason, for JSON."""
        return asdict(self) | {"reason": self.reason}


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Hold the schedule of a forest under a memory limit; `treefx.plan` returns it.

    Attributes:
        forest: the planned forest.
        schedule: the parts and the order of their steps.
        sizes: size of each part.
        moments: predicted memory and time of every step.
        cost: the cost model of the prediction.
        memory_limit_bytes: the limit; no moment's peak is above it.
        strategy: name of the strategy that cut the forest (`treefx.planning.search.strategies`).
        unshared: levels that run in several parts (`treefx.plan(..., sharing="auto")`); `forest` has their copies.
    """

    forest: Forest
    schedule: Schedule
    sizes: tuple[Size, ...]
    moments: tuple[Moment, ...]
    cost: CostModel
    memory_limit_bytes: int
    strategy: str = "auto"
    unshared: tuple[Unshared, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts, depth first; every token of the forest is in exactly one."""
        return self.schedule.parts

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the steps in execution order."""
        return self.schedule.steps

    @cached_property
    def peak_bytes(self) -> int:
        """Return the predicted peak with parameters and gradients; at most the limit."""
        return round(max(moment.peak_bytes for moment in self.moments))

    @cached_property
    def seconds(self) -> float:
        """Return the predicted time of all steps."""
        return sum(moment.seconds for moment in self.moments)

    @cached_property
    def recomputed_tokens(self) -> int:
        """Count the tokens that run forward twice, because their activations do not stay."""
        return sum(len(part) for part in self.parts if part.keep != "keep")

    @property
    def tokens_per_forward(self) -> float:
        """Return forward tokens per distinct token: 1 without recomputation."""
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
        """Format the plan as a table.

        It has part, tokens, boundary, bytes and the binding step, levels that are not shared, and other policies.
        """
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
            its steps runs, with all held bytes), `seconds` (all its steps), `mode` ("keep", "recompute",
            "offload" or "leaf") and `rank`; edges with `kv_tokens` and `kv_bytes`, the parent's own tokens that the
            child reads. `graph.graph["unshared"]` has a dictionary per level that is not shared (`Unshared`).
        """
        graph: nx.DiGraph[int] = find_view("plan_to_networkx")(self, rank)
        return graph

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain lists and numbers.

        Tokens of a part are intervals [start, stop) of packed indices.
        """
        return {
            "tokens": self.forest.num_tokens,
            "raw_tokens": self.forest.raw_tokens,
            "memory_limit_bytes": self.memory_limit_bytes,
            "peak_bytes": self.peak_bytes,
            "recomputed_tokens": self.recomputed_tokens,
            "seconds": self.seconds,
            "strategy": self.strategy,
            "unshared": [item.to_dict() for item in self.unshared],
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
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def intervals(part: Part) -> list[list[int]]:
    """Return the part's tokens as maximal intervals [start, stop) of packed indices."""
    return [list(pair) for pair in zip(*(side.tolist() for side in spans(part)), strict=True)]
