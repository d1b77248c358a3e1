"""Simulate communication costs and the gain of hiding them: ``treefx simulate``.

The machines need not be at hand.
"""

from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from treefx.cli.checks import check_positive
from treefx.errors import InputError
from treefx.output import console, make_table, notes, print_json, print_line, waiting
from treefx.tools.simulate.chunks import CANDIDATES, Link, best_chunks, run_chunks
from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.models import MODELS, Model
from treefx.tools.simulate.picture import save_picture
from treefx.tools.simulate.published import LIMIT, Comparison, compare
from treefx.tools.simulate.report import (
    COLUMNS,
    FIGURE_COLUMNS,
    LEGEND,
    cells,
    figure_cells,
    make_page,
    make_record,
    missed,
)
from treefx.tools.simulate.study import run_study
from treefx.tools.simulate.sublayer import Outcome

__all__ = ["simulate"]

simulate = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Simulate communication, and overlap with the work, on hardware that need not be there.",
)

_SCHEMA = "treefx.simulate.t3/1"
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
_MODEL_HELP = "Only this model; may be repeated: " + ", ".join(model.name for model in MODELS) + "."


@simulate.command()
def t3(
    model: Annotated[list[str] | None, typer.Option(help=_MODEL_HELP, show_default=False)] = None,
    link_gbps: Annotated[float, typer.Option(help="GB/s of a link, each way.")] = 150.0,
    memory_gbps: Annotated[float, typer.Option(help="GB/s of a GPU's memory.")] = 1000.0,
    units: Annotated[int, typer.Option(min=1, help="Compute units of a GPU.")] = 80,
    out: Annotated[
        Path | None, typer.Option(help="Folder for t3.md, t3.json and t3.png, the picture.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Simulate T3: a GEMM and its reduce-scatter, overlapped by hardware, against the figures of its paper.

    Under tensor parallelism the output of a GEMM is summed over all GPUs, and nothing else can run meanwhile. T3
    (arXiv 2401.16677) hides the sum in the GEMM itself: as soon as a tile is stored, and the neighbour's part of it
    has arrived, a tracker fires a DMA that sends the sum on; the memory does the adding.

    The legend of the columns is printed below the table. Nothing runs on a GPU; every parameter and its source is in
    --out and --json. The published figures are compared only on the paper's own machine and all its models.
    """
    machine = replace(
        Machine(),
        link_bytes_per_second=check_positive("--link-gbps", link_gbps) * 1e9,
        memory_bytes_per_second=check_positive("--memory-gbps", memory_gbps) * 1e9,
        compute_units=units,
    )
    models = _chosen(model)
    outcomes = _watched(machine, models, json)
    comparisons = compare(outcomes) if machine == Machine() and models == MODELS else []
    record = {"schema": _SCHEMA, **make_record(outcomes, comparisons, machine)}
    if out is not None:
        _save(out, record, outcomes, comparisons)
    if json:
        print_json(record, _SCHEMA)
    else:
        _show(record, comparisons)


@simulate.command()
def chunks(
    gemm_ms: Annotated[float, typer.Option(help="Milliseconds of the product, uncut.")],
    mib: Annotated[float, typer.Option(help="MiB that each rank sends in its collective.")],
    link_gbps: Annotated[float, typer.Option(help="GB/s of the link.")],
    latency_us: Annotated[float, typer.Option(help="Latency of a collective in microseconds.")] = 0.0,
    chunk_us: Annotated[float, typer.Option(help="Microseconds that each chunk adds to the product.")] = 5.0,
    compute_taken: Annotated[
        float, typer.Option(help="Share of the compute units that a collective takes while it runs.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Say into how many chunks a product and the collective behind it should be cut on a given link.

    Each chunk's collective is issued as soon as its part of the product is done, so that it overlaps with the next
    part. More chunks hide more and add more launches. One chunk means: leave it alone.

    For example, 2 ms of work and 64 MiB on a 50 GB/s network:

        treefx simulate chunks --gemm-ms 2 --mib 64 --link-gbps 50
    """
    for name, value in (("--gemm-ms", gemm_ms), ("--mib", mib), ("--link-gbps", link_gbps)):
        check_positive(name, value)
    link = Link(
        bytes_per_second=link_gbps * 1e9,
        latency_seconds=latency_us * 1e-6,
        chunk_seconds=chunk_us * 1e-6,
        compute_taken=compute_taken,
    )
    work, size = gemm_ms * 1e-3, mib * 2**20
    seconds = {k: run_chunks(work, size, link, k).seconds for k in CANDIDATES}
    best = best_chunks(work, size, link)
    if json:
        print_json({"best_chunks": best, "seconds": seconds}, "treefx.simulate.chunks/1")
        return
    rows = [
        (k, f"{1e3 * time:.3f}", f"{seconds[1] / time:.2f}", "<-" if k == best else "") for k, time in seconds.items()
    ]
    console.print(make_table("predicted", ("chunks", "ms", "times faster", ""), rows))


def _chosen(names: list[str] | None) -> tuple[Model, ...]:
    known = [model.name for model in MODELS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise InputError(f"expected --model among {', '.join(known)}; got {unknown[0]!r}")
    return tuple(model for model in MODELS if not names or model.name in names)


def _watched(machine: Machine, models: tuple[Model, ...], json: bool) -> list[Outcome]:
    """Run the study under a progress bar."""
    total = 4 * sum(len(model.degrees) for model in models)
    with waiting("simulating sub-layers", total=total, quiet=json) as progress:
        return run_study(machine, models, lambda outcome: progress.advance())


def _save(out: Path, record: dict[str, Any], outcomes: list[Outcome], comparisons: list[Comparison]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "t3.json").write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "t3.md").write_text(make_page(record, comparisons), encoding="utf-8")
    save_picture(outcomes, out / "t3.png")
    notes.print(f"written: t3.md, t3.json and t3.png in {out}", markup=False)


def _show(record: dict[str, Any], comparisons: list[Comparison]) -> None:
    console.print(make_table("treefx simulate t3", COLUMNS, [cells(row) for row in record["sublayers"]], tight=True))
    for line in LEGEND:
        print_line(line)
    if not comparisons:
        return
    agreed = sum(comparison.agrees for comparison in comparisons)
    title = f"published and simulated: {agreed} of {len(comparisons)} within {LIMIT:g} points"
    console.print(make_table(title, FIGURE_COLUMNS, [figure_cells(comparison) for comparison in comparisons]))
    for names, reason in missed(comparisons):
        print_line(f"missed: {names}")
        print_line(f"    {reason}")
