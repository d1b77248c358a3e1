"""Measure the components of a step: ``treefx bench``."""

import os
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from treefx.cli.bench.app import Json, bench, schema_of, show
from treefx.cli.checks import check_choice, check_output
from treefx.output import console, notes, print_json, print_line, waiting

__all__ = ["attention", "forest", "gpu", "host", "kernel", "mixers"]

_STAGES = ("sanitize", "correct", "prologue", "rates", "attention", "step", "first", "large")


@bench.command()
def forest(json: Json = False) -> None:
    """Time the building of forests from lists of rows and from padded batches."""
    with waiting("building forests", quiet=json):
        from treefx.tools.bench import forest as bench_forest

    show("Building forests", bench_forest.run(json=json), json, "forest")


@bench.command()
def attention(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is one.")] = "auto",
    minutes: Annotated[float, typer.Option(help="On CUDA: no new case starts after this time.")] = 7.0,
    out: Annotated[Path | None, typer.Option(help="A file that gets the records; on CUDA as they come.")] = None,
    json: Json = False,
) -> None:
    """Time tree attention, forward and backward, against what else computes it exactly.

    On the CPU against the dense mask, separate rows, and the bare calls of ATen's kernel on the same rectangles: the
    floor of the method on the machine at hand. Trees that were timed before on another machine show those figures in
    brackets. Windows, ALiBi, softcap and sinks come last. On a GPU in bfloat16, prefix,
    GRPO, DPO, agent and tree-of-thought forests of 4,000 to 130,000 tokens and the three shapes of DualKV, against
    FlexAttention with the same tree (its fastest variant, and its FLASH backend where flash-attn-4 is installed) and
    SDPA on separate rows, with the matrix product the device reaches. Results and gradients are compared
    first; no time is printed of one that is wrong. A kernel that crashes or hangs costs its own case: the others run
    in a fresh process, in the plain form.
    """
    check_choice("--device", device, ("auto", "cpu", "cuda"))
    check_output("--out", out)
    with waiting("loading PyTorch", quiet=json):
        # Registers the operators of the kernels: only this benchmark needs them without a model.
        from treefx.tools.bench.attention import cpu as bench_attention

    records: list[dict[str, Any]] = []
    if bench_attention.choose_device(device) == "cpu":
        total = len(bench_attention.CASES)
        with waiting("timing attention", total=total, quiet=json) as progress:
            records += progress.each(bench_attention.run())
        _save(records, out)
        if json:
            print_json(records, schema_of("attention"))
        else:
            console.print(bench_attention.make_summary(records))
        return
    from treefx.tools.bench.attention import apart
    from treefx.tools.bench.attention import cuda as on_cuda
    from treefx.tools.bench.attention.settings import SETTINGS

    total = len(SETTINGS)
    with waiting("timing attention", total=total, quiet=json) as progress:
        for record in progress.each(apart.run(minutes=minutes)):
            records.append(record)
            _save(records, out)
    if json:
        print_json(records, schema_of("attention"))
    else:
        console.print(on_cuda.make_summary(records))
    if not all(record.get("tree_forward_ms") for record in records if not _out_of_time(record)):
        raise typer.Exit(1)


def _save(records: list[dict[str, Any]] | dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(dumps(records, indent=1), encoding="utf-8")


def _out_of_time(record: dict[str, Any]) -> bool:
    return any("minutes are up" in text for text in record["wrong"])


@bench.command()
def kernel(
    arch: Annotated[str, typer.Option(help="The GPU to compile for: sm_80, 86, 89, 90, 100, 120 or gfx942.")] = "sm_90",
    path: Annotated[str, typer.Option(help="plain, gluon (sm_90 only) or all.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the table.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every type, width, group and feature.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile at once.")] = os.cpu_count() or 1,
    triton: Annotated[Path | None, typer.Option(help="A folder with another version of Triton in it.")] = None,
    json: Json = False,
) -> None:
    """Compile the generated Triton kernels for a GPU that need not be there, and judge the assembler's report.

    One row per kernel: registers, bytes spilled, shared memory, matrix instructions, warp specialisation. The command
    fails if a row is out of bounds. The whole table takes some minutes.
    """
    check_choice("--path", path, ("plain", "gluon", "all"))
    with waiting("loading PyTorch", quiet=json):
        from treefx.tools.bench.attention import kernel as bench_kernel

    records = bench_kernel.run_with_progress(arch, path, quick=quick, full=full, json=json, jobs=jobs, triton=triton)
    if json:
        print_json(records, schema_of("kernel"))
    else:
        console.print(bench_kernel.make_summary(arch, records))
    if any(record["problems"] for record in records):
        raise typer.Exit(1)


@bench.command()
def host(json: Json = False) -> None:
    """Time what the launches of an attention cost the host, on a Hopper that is not there.

    Triton binds and looks up its kernels as on a device; its compiler and its launches do nothing. The first layer of a
    forest computes the launches, every later layer repeats them. Processor time of the thread.
    """
    with waiting("loading PyTorch", quiet=json):
        from treefx.tools.bench.attention import host as bench_host
    with waiting("timing launches", total=len(bench_host.KINDS), quiet=json) as progress:
        records = list(progress.each(bench_host.run()))
    show("What a layer's launches cost the host", records, json, "host")


@bench.command()
def gpu(
    stage: Annotated[str, typer.Option(help="sanitize, correct, prologue, rates, attention, step, first or large.")],
    rehearse: Annotated[bool, typer.Option("--rehearse", help="On the CPU, tiny: figures mean nothing.")] = False,
    minutes: Annotated[float, typer.Option(help="No new case starts after this time.")] = 7.5,
    cases: Annotated[int | None, typer.Option(min=1, help="How many cases at most.")] = None,
    only: Annotated[str, typer.Option(help="Text in the names of the cases that run, such as 0.6B.")] = "",
    batches: Annotated[str, typer.Option(help="Of step and first: names of batches, separated by commas.")] = "",
    deadline: Annotated[float, typer.Option(help="Seconds after which what still runs is ended.")] = float("inf"),
    layers: Annotated[
        int | None, typer.Option(min=1, help="Of step and first: layers of the models; fewer compile faster.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A file that gets the records as they come; .jsonl: one line each.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Of rates: tiles are chosen by them from now on.")] = False,
    json: Json = False,
) -> None:
    """Answer one question to a GPU: the stages in this order are what to find out on one that is new.

    sanitize: no kernel overwrites live data (Triton's concurrency sanitizer). correct: all forms against
    float64. prologue and rates: what programs and tiles cost. attention: against FlexAttention and rows. step: whole
    training steps against inductor. first: first steps, with nothing cached. large: a tree larger than memory. Each
    stage takes less than eight minutes, prints each record as it comes, and fails if anything is wrong.
    """
    check_choice("--stage", stage, _STAGES)
    check_output("--out", out)
    if keep and (rehearse or stage != "rates"):
        raise typer.BadParameter("only --stage rates on a GPU finds what can be kept", param_hint="--keep")
    with waiting("loading PyTorch", quiet=json):
        from treefx.tools.bench.gpu import launches, stages

    chosen: dict[str, Any] = {"cases": cases, "only": only, "batches": [name.strip() for name in _split(batches)]}
    records: list[dict[str, Any]] = []
    notes.print(f"{stage}: {stages.count(stage, **chosen)} cases{_REHEARSED if rehearse else ''}")
    for record in stages.run(stage, rehearsal=rehearse, minutes=minutes, deadline=deadline, layers=layers, **chosen):
        records.append(record)
        _keep(stages.describe(stage, rehearse, records), out)
        if not json:
            print_line(stages.line(record))
            console.file.flush()
    if json:
        print_json(stages.describe(stage, rehearse, records), schema_of("gpu"))
    if keep:
        notes.print(f"kept in {launches.keep(records)}")
    if any(record["wrong"] for record in records):
        raise typer.Exit(1)


_REHEARSED = " (rehearsal on the CPU: figures mean nothing)"


def _split(names: str) -> list[str]:
    """Split names of batches at commas; some names contain commas."""
    from treefx.tools.bench.gpu.batches import SHARING

    found, rest = [], names.strip()
    while rest:
        known = max((name for name in SHARING if rest.startswith(name)), key=len, default=rest.split(",")[0])
        found.append(known)
        rest = rest[len(known) :].lstrip(" ,")
    return found


def _keep(described: dict[str, Any], out: Path | None) -> None:
    """Append the newest record as a line behind the run's description, or rewrite the file."""
    if out is None or out.suffix != ".jsonl":
        return _save(described, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    *before, newest = described.pop("records")
    with out.open("a" if before else "w", encoding="utf-8") as file:
        if not before:
            file.write(dumps(described) + "\n")
        file.write(dumps(newest) + "\n")


@bench.command()
def mixers(
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; the best counts.")] = 3,
    inner: Annotated[str, typer.Option(help="What compiles the models: inductor or aot_eager.")] = "inductor",
    json: Json = False,
) -> None:
    """Time Mamba 2 and gated delta net layers along a tree (four raw tokens per distinct one) against rows.

    First layers of our own, the same chunked code for both; then unmodified models of transformers with one such
    layer, compiled with treefx and, by the same compiler, as they are. Forward and backward in float32; gradients
    are compared first.
    """
    check_choice("--inner", inner, ("inductor", "aot_eager"))
    with waiting("timing layers", quiet=json) as progress:
        from treefx.tools.bench import mixers as bench_mixers

        records = bench_mixers.run(repeats=repeats)
        records += bench_mixers.run_models(repeats=repeats, inner=inner, on_start=progress.tell)
    show("Mixers along a tree", records, json, "mixers")
