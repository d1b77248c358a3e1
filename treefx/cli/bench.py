"""``treefx bench``: the benchmarks, each run in one process with what it is compared with."""

import os
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from treefx.bench import step as bench_step
from treefx.output import console, make_table, notes, print_json

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True, help="Measure: building forests, attention over a tree, a whole training step."
)

Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON.")]


@bench.command()
def forest(json: Json = False) -> None:
    """Time the building of forests from lists of rows and from padded batches."""
    from treefx.bench import forest as bench_forest

    _show("Building forests", bench_forest.run(json=json), json)


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
    GRPO, DPO, agent and tree-of-thought forests of 4,000 to 130,000 tokens, against FlexAttention with the same tree
    (its fastest variant) and SDPA on separate rows, with the matrix product the device reaches. Results are compared
    first; no time is printed of one that is wrong. A kernel that crashes or hangs costs its own case: the others run
    in a fresh process, without warp specialisation.
    """
    # Registers the operators of the kernels: only this benchmark needs them without a model.
    from treefx.bench.attention import cpu as bench_attention

    records: list[dict[str, Any]] = []
    if bench_attention.choose_device(device) == "cpu":
        total = len(bench_attention.CASES)
        records += track(bench_attention.run(), total=total, disable=json, console=notes, transient=True)
        _save(records, out)
        if json:
            print_json(records)
        else:
            console.print(bench_attention.make_summary(records))
        return
    from treefx.bench.attention import apart
    from treefx.bench.attention import cuda as on_cuda

    total = len(on_cuda.SETTINGS)
    for record in track(apart.run(minutes=minutes), total=total, disable=json, console=notes, transient=True):
        records.append(record)
        _save(records, out)
    if json:
        print_json(records)
    else:
        console.print(on_cuda.make_summary(records))
    if not all(record.get("tree_forward_ms") for record in records if not _out_of_time(record)):
        raise typer.Exit(1)


def _save(records: list[dict[str, Any]], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(dumps(records, indent=1), encoding="utf-8")


def _out_of_time(record: dict[str, Any]) -> bool:
    return any("minutes are up" in text for text in record["wrong"])


@bench.command()
def kernel(
    arch: Annotated[str, typer.Option(help="The GPU to compile for: sm_80, sm_90 or sm_100.")] = "sm_90",
    path: Annotated[str, typer.Option(help="plain, warp (sm_90 only) or both.")] = "both",
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
    from treefx.bench.attention import kernel as bench_kernel

    records = bench_kernel.run_with_progress(arch, path, quick=quick, full=full, json=json, jobs=jobs, triton=triton)
    if json:
        print_json(records)
    else:
        console.print(bench_kernel.make_summary(arch, records))
    if any(record["problems"] for record in records):
        raise typer.Exit(1)


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
    from treefx.bench import mixers as bench_mixers

    with notes.status("timing layers") as status:
        records = bench_mixers.run(repeats=repeats)
        records += bench_mixers.run_models(repeats=repeats, inner=inner, on_start=status.update)
    _show("Mixers along a tree", records, json)


@bench.command()
def plan(json: Json = False) -> None:
    """Time the planner, and count the tokens that plans, batch samplers and other systems' policies compute."""
    from treefx.bench import plan as bench_plan

    _show("Planning", bench_plan.run(json=json), json)


@bench.command()
def sampler(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Files or folders: tau-bench, ToolBench or OpenAI chats. Default: a scripted sample."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Budget of a batch, in distinct tokens.")] = 16384,
    tokenizer: Annotated[str, typer.Option(help="'bpe', trained on the text at hand, or 'bytes'.")] = "bpe",
    vocab_size: Annotated[int, typer.Option(help="Largest vocabulary of the BPE.")] = 16384,
    json: Json = False,
) -> None:
    """Put shuffled rows, one per assistant turn, into batches, and count the distinct tokens these compute.

    The minimum is the forest of all rows: no batching computes less. First-fit takes the rows as they arrive, each
    into the first batch that has room. A ratio is tokens computed over the minimum.
    """
    from treefx.bench import sampler as bench_sampler

    records = bench_sampler.run(
        paths or (), max_tokens=max_tokens, tokenizer=tokenizer, vocab_size=vocab_size, json=json
    )
    _show(f"Batches of at most {max_tokens:,} distinct tokens", records, json)


@bench.command()
def shapes(
    series: Annotated[str, typer.Option(help="near: 270 to 330 columns. wide: 64 to 1,024.")] = "near",
    batches: Annotated[int, typer.Option(min=1, help="Batches, no two of one shape; 3 to 15 rows each.")] = 14,
    model: Annotated[str, typer.Option(help="An architecture of transformers.")] = "llama",
    layers: Annotated[int, typer.Option(min=1, help="Its number of blocks.")] = 2,
    hidden_size: Annotated[int, typer.Option(min=64, help="Its width, a multiple of 64.")] = 256,
    json: Json = False,
) -> None:
    """Train on batches that never repeat a shape, compilation included, with inductor and with treefx.

    Two thirds of the columns are shared. Each way has a process of its own with empty caches: whole_seconds is its
    first round over all batches, with all that it compiles, steps_seconds a second round. Losses and gradients are
    compared first.
    """
    from treefx.bench import shapes as bench_shapes

    records = bench_shapes.run(
        series=series, batches=batches, model=model, layers=layers, hidden_size=hidden_size, json_output=json
    )
    _show("Batches of all shapes", records, json)


@bench.command()
def trainer(
    rows: Annotated[int, typer.Option(min=8, help="Turns to train on, eight a step.")] = 160,
    model: Annotated[str, typer.Option(help="An architecture of transformers.")] = "qwen3",
    layers: Annotated[int, typer.Option(min=1, help="Its number of blocks.")] = 4,
    width: Annotated[int, typer.Option(min=64, help="Its hidden size, a multiple of 64.")] = 256,
    json: Json = False,
) -> None:
    """Train with TRL's SFTTrainer, compilation included, with inductor and with treefx.

    The rows are turns of an agent in their order, so those of a batch share most of their tokens. Each way has a
    process of its own with empty caches. whole and later are seconds over inductor's: of the run, and of its steps but
    the first two. Losses and norms of gradients of every step are compared first.
    """
    from treefx.bench import trainer as bench_trainer

    records = bench_trainer.run(model=model, layers=layers, hidden_size=width, rows=rows, json_output=json)
    _show("A run of SFTTrainer", records, json)


@bench.command()
def first_step(
    model: Annotated[str, typer.Option(help="An architecture of transformers.")] = "qwen3",
    layers: Annotated[int, typer.Option(min=1, help="Its number of blocks.")] = 8,
    width: Annotated[int, typer.Option(min=64, help="Its hidden size, a multiple of 64.")] = 256,
    json: Json = False,
) -> None:
    """Take the first step with inductor and with treefx, with and without equal layers compiled once.

    Each way has empty caches and two processes, of which the second finds what the first compiled. wall is seconds on
    the clock; python, compilers and step (a later one) are seconds of the processor, in Python and in what it started.
    Losses and gradients are compared first.
    """
    from treefx.bench import first_step as bench_first_step

    records = bench_first_step.run(model=model, layers=layers, hidden_size=width, json_output=json)
    _show("The first step", records, json)


@bench.command()
def parts(
    forests: Annotated[int, typer.Option(min=1, help="Random forests, each under three limits.")] = 50,
    inner: Annotated[str, typer.Option(help="Inner compiler: inductor or aot_eager.")] = "inductor",
    json: Json = False,
) -> None:
    """Run plans on the CPU and measure their peaks with an allocation tracker.

    Random forests run under 1/2, 1/4 and 1/8 of what they take uncut. Then one large forest runs under an eighth, and
    by the policies of other systems; losses and gradients of all are compared. All of it takes some minutes.
    """
    from treefx.bench import parts as bench_parts
    from treefx.bench import policies as bench_policies

    peaks = bench_parts.measure_peaks(forests, inner, json=json)
    policies = bench_policies.measure_policies(inner)
    if json:
        print_json({"peaks": peaks, "policies": policies})
        return
    _show("Peaks of random forests under limits", peaks, json)
    _show("A large forest under an eighth of its memory", policies, json)


@bench.command()
def assign(json: Json = False) -> None:
    """Share forests of 2,000 to 16,000 rows among 8 to 4,096 ranks: balance, tokens computed twice, time.

    Forests are lengths and shared prefixes without tokens, the cost that of an 8B model; no model runs. Beside it,
    balances of whole trees longest first and by Karmarkar and Karp, and of rows that share nothing.
    """
    from treefx.bench import assign as bench_assign

    _show("Forests to ranks", bench_assign.run(json=json), json)


@bench.command()
def context(json: Json = False) -> None:
    """Share the tokens of one tree of 225,000 to 590,000 among 2, 8 and 32 ranks: balance, keys and values sent.

    Beside the way taken, all ways: balance, and what is received of what a ring would pass. No model runs.
    """
    from treefx.bench import context as bench_context

    _show("Tokens to ranks", bench_context.run(), json)


@bench.command()
def large(
    model: Annotated[str | None, typer.Option(help="A config.json; by default the size of Qwen3 0.6B.")] = None,
    device: Annotated[str, typer.Option(help="cuda (bfloat16) or cpu (float32).")] = "cuda",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each of the 85 spans of the tree.")] = 2048,
    memory: Annotated[str | None, typer.Option(help="Limit, such as 24GiB; by default what is free.")] = None,
    json: Json = False,
) -> None:
    """Train a tree of 64 rows in parts under a memory limit, against its rows one by one and a small tree uncut.

    With the defaults the tree has 524,288 raw and 174,080 distinct tokens. Losses are compared before times are shown.
    """
    from treefx.bench import large as bench_large
    from treefx.cli.plan import parse_bytes

    limit = None if memory is None else parse_bytes(memory)
    _show("One large tree", bench_large.run(model=model, device=device, tokens=tokens, memory_limit_bytes=limit), json)


@bench.command()
def step(
    model: Annotated[str, typer.Option(help="An architecture of transformers.")] = "llama",
    hidden_size: Annotated[int, typer.Option(help="Width of the model, a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 4,
    vocab_size: Annotated[int, typer.Option(min=8, help="Number of token ids.")] = 32000,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each backend; the median counts.")] = 5,
    backend: Annotated[str, typer.Option(help="The backend under test.")] = "treefx",
    baseline: Annotated[str, typer.Option(help="The backend it is compared with.")] = "inductor",
    json: Json = False,
) -> None:
    """Time forward and backward of 8 rows of 512 tokens in float32: prefixes of 448, 384 and 0 tokens shared.

    Both backends run the same padded batch in the same process, repeats in turn. Losses and gradients are
    compared first; if they differ, no time is printed.
    """
    records = bench_step.run(
        model=model,
        hidden_size=hidden_size,
        layers=layers,
        vocab_size=vocab_size,
        repeats=repeats,
        backend=backend,
        baseline=baseline,
    )
    _show("Training step, forward and backward", records, json)


@bench.command()
def unshared(
    names: Annotated[list[str] | None, typer.Argument(help="Models of the zoo; none for all of them.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each backend; the median counts.")] = 5,
    inner: Annotated[str, typer.Option(help="Inner compiler of treefx, and what it is compared with.")] = "inductor",
    changing: Annotated[bool, typer.Option("--changing", help="Other rows and columns in every batch.")] = False,
    json: Json = False,
) -> None:
    """Time treefx against its inner compiler on batches that share nothing, model by model.

    The ratio should be near 1: such a batch runs ordinarily. A model takes about half a minute to compile twice, all
    of the zoo an hour.
    """
    from treefx.bench import unshared as bench_unshared

    with notes.status("compiling") as status:
        records = bench_unshared.run(
            names or (), rows=rows, repeats=repeats, inner=inner, changing=changing, on_start=status.update
        )
    mean = bench_unshared.geometric_mean(records)
    if json:
        print_json({"models": records, "geometric_mean": mean})
        return
    fields = ("model", "baseline_seconds", "seconds", "ratio", "ran", "note")
    cells = [[_format(record.get(field, "")) for field in fields] for record in records]
    headers = [field.replace("_", " ") for field in fields]
    console.print(make_table("Nothing shared, forward and backward", headers, cells))
    timed = sum("ratio" in record for record in records)
    console.print(f"geometric mean of {timed} ratios: {mean:.3f}")


@bench.command()
def memory(
    inner: Annotated[str, typer.Option(help="Inner compiler of treefx: inductor, aot_eager or eager.")] = "inductor",
    json: Json = False,
) -> None:
    """Measure the most bytes one training step holds on the CPU, each figure in a process of its own.

    Four sharing ratios, gradient checkpointing on and off, logits read and unused, and 8,192 tokens with a vocabulary
    of 151,936. The last needs about 1 GB of memory; all of it takes some minutes.
    """
    from treefx.bench import memory as bench_memory

    _show("Memory of a training step", bench_memory.run(json_output=json, inner=inner), json)


def _show(title: str, records: Sequence[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(records)
        return
    if not records:
        notes.print("nothing was measured")
        return
    # Many figures of few cases: one line per figure fits a terminal where one per case does not.
    names, *fields = list(records[0])
    if len(fields) > len(records):
        headers = [names, *(str(record[names]) for record in records)]
        rows = [[field.replace("_", " "), *(_format(record.get(field)) for record in records)] for field in fields]
    else:
        headers = [field.replace("_", " ") for field in (names, *fields)]
        rows = [[_format(record.get(field)) for field in (names, *fields)] for record in records]
    console.print(make_table(title, headers, rows))


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
