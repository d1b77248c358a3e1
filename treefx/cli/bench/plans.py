"""Measure planning and batching, and forests larger than one device: ``treefx bench``."""

from pathlib import Path
from typing import Annotated

import typer

from treefx.cli.bench.app import Json, bench, schema_of, show
from treefx.cli.checks import check_choice, check_input, check_output, parse_bytes
from treefx.errors import InputError
from treefx.output import print_json, waiting

__all__ = ["assign", "calibrate", "context", "large", "overlap", "parts", "plan", "sampler"]


@bench.command()
def plan(json: Json = False) -> None:
    """Time the planner, and count the tokens that plans, batch samplers and other systems' policies compute."""
    from treefx.tools.bench import plan as bench_plan

    show("Planning", bench_plan.run(json=json), json, "plan")


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
    check_choice("--tokenizer", tokenizer, ("bpe", "bytes"))
    for path in paths or ():
        check_input(path)
    from treefx.tools.bench import sampler as bench_sampler

    records = bench_sampler.run(
        paths or (), max_tokens=max_tokens, tokenizer=tokenizer, vocab_size=vocab_size, json=json
    )
    show(f"Batches of at most {max_tokens:,} distinct tokens", records, json, "sampler")


@bench.command()
def calibrate(
    forests: Annotated[int, typer.Option(min=2, help="Random forests, each by every layout.")] = 200,
    fitted: Annotated[int, typer.Option(min=1, help="The first of them, to which seconds are fitted.")] = 40,
    inner: Annotated[str, typer.Option(help="Inner compiler: inductor or aot_eager.")] = "inductor",
    save: Annotated[Path | None, typer.Option(help="Where the profile goes, for treefx plan --profile.")] = None,
    json: Json = False,
) -> None:
    """Fit the planner's seconds on this machine, and say how well they choose among layouts that were measured.

    Random forests run on the CPU by every way to cut, with levels shared and not. Errors, orders of pairs that differ
    by more than 3 %, and regrets (the time of the chosen layout over the least, less 1) are those of the forests that
    were not fitted. 200 forests take half an hour. Where other programs run, set OMP_NUM_THREADS=1: threads that wait
    for each other count as time of the processor.
    """
    check_choice("--inner", inner, ("inductor", "aot_eager"))
    check_output("--save", save)
    if fitted >= forests:
        raise InputError(f"--fitted {fitted} must leave some of --forests {forests} to judge by")
    from treefx.tools.bench import calibrate as bench_calibrate

    records = bench_calibrate.run(forests, fitted, inner, save, json=json)
    show("Layouts chosen by predicted time", records, json, "calibrate")


@bench.command()
def parts(
    forests: Annotated[int, typer.Option(min=1, help="Random forests, each under three limits.")] = 50,
    inner: Annotated[str, typer.Option(help="Inner compiler: inductor or aot_eager.")] = "inductor",
    json: Json = False,
) -> None:
    """Run plans on the CPU and measure their peaks with an allocation tracker.

    Random forests run under 1/2, 1/4 and 1/8 of their uncut peak. Then one large forest runs under an eighth, and
    by the policies of other systems; losses and gradients of all are compared. All of it takes some minutes.
    """
    check_choice("--inner", inner, ("inductor", "aot_eager"))
    with waiting("loading PyTorch", quiet=json):
        from treefx.tools.bench import parts as bench_parts
        from treefx.tools.bench import policies as bench_policies

    peaks = bench_parts.measure_peaks(forests, inner, json=json)
    with waiting("policies of other systems on a large forest", quiet=json):
        policies = bench_policies.measure_policies(inner)
    if json:
        print_json({"peaks": peaks, "policies": policies}, schema_of("parts"))
        return
    show("Peaks of random forests under limits", peaks, json, "parts")
    show("A large forest under an eighth of its memory", policies, json, "parts")


@bench.command()
def assign(json: Json = False) -> None:
    """Share forests of 2,000 to 16,000 rows among 8 to 4,096 ranks: balance, tokens computed twice, time.

    Forests are lengths and shared prefixes without tokens, the cost that of an 8B model; no model runs. For comparison:
    whole trees longest first and by Karmarkar and Karp, and rows that share nothing.
    """
    from treefx.tools.bench import assign as bench_assign

    show("Forests to ranks", bench_assign.run(json=json), json, "assign")


@bench.command()
def context(json: Json = False) -> None:
    """Share the tokens of one tree of 225,000 to 590,000 among 2, 8 and 32 ranks: balance, keys and values sent.

    Lists the chosen way and all others: balance, and received tokens relative to a ring. No model runs.
    """
    with waiting("sharing tokens among ranks", quiet=json):
        from treefx.tools.bench import context as bench_context

        records = bench_context.run()
    show("Tokens to ranks", records, json, "context")


@bench.command()
def overlap(
    rows: Annotated[int, typer.Option(min=256, help="Tokens.")] = 1024,
    width: Annotated[int, typer.Option(min=16, help="Input and output width of the MLP.")] = 1024,
    hidden: Annotated[int, typer.Option(min=16, help="Of the MLP's middle, over both processes.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each way; medians count.")] = 11,
    json: Json = False,
) -> None:
    """Hide the collectives of an MLP on two processes behind its products, over a link whose rate is given.

    Messages lie in memory that both read, and arrive after the delay of a link: no processor carries them. A
    collective of the forward takes 0.5, 1 and 2 times its product. Untouched, in 2, 4 and 8 chunks, and as the gate
    decides by rates it measures over that link; results are compared to the bit first.
    """
    with waiting("two processes share an MLP", quiet=json):
        from treefx.tools.bench.overlap import run as bench_overlap

        records = bench_overlap.run(rows=rows, width=width, hidden=hidden, repeats=repeats)
    show("Products and collectives in chunks", records, json, "overlap")


@bench.command()
def large(
    model: Annotated[str | None, typer.Option(help="A config.json; by default the size of Qwen3 0.6B.")] = None,
    device: Annotated[str, typer.Option(help="cuda (bfloat16) or cpu (float32).")] = "cuda",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each of the 85 spans of the tree.")] = 2048,
    memory: Annotated[str | None, typer.Option(help="Limit, such as 24GiB; by default all free memory.")] = None,
    json: Json = False,
) -> None:
    """Train a tree of 64 rows in parts under a memory limit, against its rows one by one and a small tree uncut.

    With the defaults the tree has 524,288 raw and 174,080 distinct tokens. Losses are compared before times are shown.
    """
    limit = None if memory is None else parse_bytes(memory)
    check_choice("--device", device, ("cuda", "cpu"))
    with waiting("loading PyTorch", quiet=json):
        from treefx.tools.bench import large as bench_large

    show(
        "One large tree",
        bench_large.run(model=model, device=device, tokens=tokens, memory_limit_bytes=limit),
        json,
        "large",
    )
