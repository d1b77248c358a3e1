"""A study as rows, as JSON, and as a page of tables."""

from dataclasses import asdict
from typing import Any

from treefx.tools.simulate.hardware.machine import SOURCES, Machine
from treefx.tools.simulate.hardware.ring import groups_of_a_chunk
from treefx.tools.simulate.published import LIMIT, Comparison
from treefx.tools.simulate.study import software
from treefx.tools.simulate.sublayer import Outcome

__all__ = ["COLUMNS", "FIGURE_COLUMNS", "LEGEND", "cells", "figure_cells", "make_page", "make_record", "missed"]

COLUMNS = ("sub-layer", "GPUs", "GEMM", "RS", "T3", "MCA", "ideal", "chunks", "k", "data", "reads")
LEGEND = (
    "GEMM, RS    microseconds of the GEMM and of its reduce-scatter, alone",
    "The next four: times faster than GEMM, reduce-scatter and all-gather in turn:",
    "  T3        requests of GEMM and communication queue in order of arrival",
    "  MCA       T3-MCA: the memory serves the GEMM first",
    "  ideal     the shorter of GEMM and reduce-scatter costs nothing",
    "  chunks    in software, in k pieces, each with its collective",
    "data        share of the bytes moved in memory that T3 saves",
    "reads       share of the bytes read by the GEMM that T3-MCA saves, because its stores",
    "            no longer displace its inputs in the cache",
)
"""What the columns of ``COLUMNS`` mean, line by line."""
FIGURE_COLUMNS = ("figure of the paper, %", "section", "published", "simulated", "off by", "")


def make_row(outcome: Outcome, machine: Machine) -> dict[str, Any]:
    """Make one sub-layer's record: seconds, bytes, and speed-ups over sequential runs."""
    before, after = outcome.moved
    reads = outcome.gemm.traffic.total("gemm reads"), outcome.t3_mca.traffic.total("gemm reads")
    chunks, faster = software(outcome, machine)
    return {
        "model": outcome.sublayer.model,
        "sublayer": outcome.sublayer.name,
        "gpus": outcome.sublayer.ranks,
        "rows_inner_columns": [outcome.sublayer.gemm.rows, outcome.sublayer.gemm.inner, outcome.sublayer.gemm.columns],
        "seconds": {
            "gemm": outcome.gemm.seconds,
            "reduce_scatter": outcome.rs.seconds,
            "reduce_scatter_near_memory": outcome.rs_near_memory.seconds,
            "all_gather": outcome.ag.seconds,
            "t3_gemm_and_reduce_scatter": outcome.t3.seconds,
            "t3_mca_gemm_and_reduce_scatter": outcome.t3_mca.seconds,
        },
        "speedup": {name: outcome.speedup(name) for name in ("t3", "t3-mca", "ideal", "ideal-nmc", "ideal-all")}
        | {"chunks": faster},
        "best_chunks": chunks,
        "memory_bytes": {"sequential": before, "t3": after},
        "gemm_read_bytes": {"sequential": reads[0], "t3": reads[1]},
        "tracked_tiles_at_once": round(outcome.t3_mca.tracker_peak * _tiles_of_a_group(outcome, machine)),
    }


def _tiles_of_a_group(outcome: Outcome, machine: Machine) -> float:
    chunk = outcome.output_bytes / outcome.sublayer.ranks
    tile = machine.tile_rows * machine.tile_columns * machine.bytes_per_number
    return chunk / groups_of_a_chunk(outcome.output_bytes, outcome.sublayer.ranks, machine) / tile


def cells(row: dict[str, Any]) -> list[str]:
    """A row of ``make_row`` under ``COLUMNS``."""
    seconds, faster = row["seconds"], row["speedup"]
    data, reads = row["memory_bytes"], row["gemm_read_bytes"]
    return [
        f"{row['model']} {row['sublayer']}",
        f"{row['gpus']}",
        *[f"{1e6 * seconds[name]:,.0f}" for name in ("gemm", "reduce_scatter")],
        *[f"{faster[name]:.2f}" for name in ("t3", "t3-mca", "ideal", "chunks")],
        f"{row['best_chunks']}",
        f"{100 * (1 - data['t3'] / data['sequential']):.0f}%",
        f"{100 * (1 - reads['t3'] / reads['sequential']):.0f}%",
    ]


def figure_cells(comparison: Comparison) -> list[str]:
    """A comparison under ``FIGURE_COLUMNS``."""
    published, simulated = comparison.figure.published, comparison.simulated
    return [
        comparison.figure.name,
        comparison.figure.section,
        f"{published:.1f}",
        f"{simulated:.1f}",
        f"{simulated - published:+.1f}",
        "" if comparison.agrees else "missed",
    ]


def missed(comparisons: list[Comparison]) -> list[tuple[str, str]]:
    """The names of missed figures, together where the reason is the same, and the reason."""
    named: dict[str, list[str]] = {}
    for comparison in comparisons:
        if not comparison.agrees:
            named.setdefault(comparison.figure.reason, []).append(comparison.figure.name)
    return [("; ".join(names), reason) for reason, names in named.items()]


def make_record(outcomes: list[Outcome], comparisons: list[Comparison], machine: Machine) -> dict[str, Any]:
    """Everything, for JSON."""
    values = asdict(machine)
    return {
        "machine": {
            name: {"value": values[name], "kind": kind, "source": source} for name, (kind, source) in SOURCES.items()
        },
        "figures": [
            {
                "name": comparison.figure.name,
                "section": comparison.figure.section,
                "published_percent": comparison.figure.published,
                "simulated_percent": comparison.simulated,
                "agrees": comparison.agrees,
                "reason": "" if comparison.agrees else comparison.figure.reason,
            }
            for comparison in comparisons
        ],
        "points": LIMIT,
        "sublayers": [make_row(outcome, machine) for outcome in outcomes],
    }


def make_page(record: dict[str, Any], comparisons: list[Comparison]) -> str:
    """The tables of a record as Markdown."""
    agreed = sum(comparison.agrees for comparison in comparisons)
    parts = [
        "# T3, simulated",
        f"{agreed} of {len(comparisons)} published figures within {LIMIT:g} points.",
        _table(FIGURE_COLUMNS, [figure_cells(comparison) for comparison in comparisons]),
        "Missed:",
        "\n".join(f"- {names}: {reason}" for names, reason in missed(comparisons)) or "none",
        "GEMM and reduce-scatter alone in µs; how many times faster than both and the all-gather one after the other; "
        "less data moved, and less read by the GEMM:",
        _table(COLUMNS, [cells(row) for row in record["sublayers"]]),
        "Parameters:",
        _table(
            ("parameter", "value", "kind", "source"),
            [[name, f"{item['value']}", item["kind"], item["source"]] for name, item in record["machine"].items()],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
