"""``treefx bench``: whole steps and whole runs."""

from pathlib import Path
from typing import Annotated

import typer

from treefx.cli.bench.app import Json, bench, format_cell, schema_of, show
from treefx.cli.checks import check_choice
from treefx.output import console, count, make_table, print_json, print_line, waiting

__all__ = ["calls", "first_step", "memory", "shapes", "step", "trainer", "trainers", "trl", "unshared"]


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
    with waiting("loading PyTorch", quiet=json) as progress:
        from treefx.tools.bench import step as bench_step
        from treefx.tools.bench.job.models import require_backend

        for name in (backend, baseline):
            require_backend(name)
        progress.tell("compiling and timing three cases")
        records = bench_step.run(
            model=model,
            hidden_size=hidden_size,
            layers=layers,
            vocab_size=vocab_size,
            repeats=repeats,
            backend=backend,
            baseline=baseline,
        )
    show("Training step, forward and backward", records, json, "step")


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

    Two thirds of the columns are shared. Each way has a separate process with empty caches: whole_seconds is its first
    round over all batches, compilation included, steps_seconds a second round. Losses and gradients are compared first.
    """
    check_choice("--series", series, ("near", "wide"))
    from treefx.tools.bench import shapes as bench_shapes

    records = bench_shapes.run(
        series=series, batches=batches, model=model, layers=layers, hidden_size=hidden_size, json_output=json
    )
    show("Batches of all shapes", records, json, "shapes")


@bench.command()
def calls(
    model: Annotated[str, typer.Option(help="An architecture of transformers.")] = "llama",
    layers: Annotated[int, typer.Option(min=1, help="Its number of blocks.")] = 2,
    json: Json = False,
) -> None:
    """Count what a steady training step walks through of treefx's own Python, by what a call is given.

    calls are functions called in the forward, in so many files; switches count how often a call went into another
    file than the one before; passes are calls into treefx.passes, and labels those that read proofs of values. A figure
    is the same on every machine.
    """
    from treefx.tools.bench import calls as bench_calls

    with waiting("compiling and walking", quiet=json):
        records = list(bench_calls.run(model, layers))
    show("A steady step", records, json, "calls")


@bench.command()
def first_step(
    model: Annotated[str, typer.Option(help="An architecture of transformers.")] = "qwen3",
    layers: Annotated[int, typer.Option(min=1, help="Its number of blocks.")] = 8,
    width: Annotated[int, typer.Option(min=64, help="Its hidden size, a multiple of 64.")] = 256,
    json: Json = False,
) -> None:
    """Take the first step with inductor and with treefx, with and without equal layers compiled once.

    Each way has empty caches and two processes, of which the second finds the first one's compiled code. wall is
    seconds on the clock; python, compilers and step (a later one) are seconds of the processor, in Python and in its
    subprocesses. Losses and gradients are compared first.
    """
    from treefx.tools.bench import first_step as bench_first_step

    records = bench_first_step.run(model=model, layers=layers, hidden_size=width, json_output=json)
    show("The first step", records, json, "first-step")


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
    separate process with empty caches. whole and later are seconds over inductor's: of the run, and of its steps but
    the first two. Losses and norms of gradients of every step are compared first.
    """
    from treefx.tools.bench import trainer as bench_trainer

    records = bench_trainer.run(model=model, layers=layers, hidden_size=width, rows=rows, json_output=json)
    show("A run of SFTTrainer", records, json, "trainer")


@bench.command()
def trainers(
    only: Annotated[list[str] | None, typer.Option(help="This one only; may be repeated. Default: all.")] = None,
    rows: Annotated[int, typer.Option(min=2, help="Turns to train on, eight to an optimizer step.")] = 56,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model, a Qwen3.")] = 2,
    width: Annotated[int, typer.Option(min=64, help="Its hidden size, a multiple of 64.")] = 128,
    folder: Annotated[
        Path | None, typer.Option(help="Where environments are kept. [default: ~/.cache/treefx/trainers]")
    ] = None,
    json: Json = False,
) -> None:
    """Train with other trainers from their own command lines: as they are, with inductor, and with treefx run.

    llama-factory, llama-factory-dpo, ms-swift, axolotl, axolotl-packed, verl, torchtitan, torchtune and lightning, each
    in an environment that is made for it from the package registry (some minutes and 3 GB, once) with the torch that is
    installed here. The rows are turns of an agent in their order; of verl, whose rollouts need a GPU, it is the update
    of the actor.
    Losses and norms of gradients of every step are compared with the run without a compiler; whole_seconds are those
    of the whole command, whole the same over inductor's.
    """
    from treefx.tools.bench.trainers import run as bench_trainers

    with waiting("making rows and a model", quiet=json) as progress:
        records = bench_trainers.run(
            only or (), folder=folder, rows=rows, layers=layers, hidden_size=width, on_start=progress.tell
        )
    show("Trainers from their command lines", records, json, "trainers")


@bench.command()
def trl(
    only: Annotated[list[str] | None, typer.Option(help="This one only; may be repeated. Default: all.")] = None,
    rows: Annotated[int, typer.Option(min=2, help="Turns to train on, or prompts to sample from.")] = 32,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model, a Qwen3.")] = 2,
    width: Annotated[int, typer.Option(min=64, help="Its hidden size, a multiple of 64.")] = 128,
    inductor: Annotated[bool, typer.Option(help="Also with inductor.")] = True,
    json: Json = False,
) -> None:
    """Train with TRL's trainers as they ship, and transformers' with flattened rows, in many settings.

    SFT (padded, packed, padding-free), DPO, KTO, GRPO and RLOO, with and without gradient checkpointing and LoRA: each
    uncompiled, with inductor and with treefx, in processes with empty caches. Losses and norms of gradients of every
    step are compared with the run without a compiler. Seconds are those of whole runs, whole is treefx's over
    inductor's.
    """
    from treefx.tools.bench.trl import run as bench_trl

    ways = [way for way in bench_trl.WAYS if inductor or way != "inductor"]
    with waiting("making rows and a model", quiet=json) as progress:
        records = bench_trl.run(
            only or (), ways=ways, rows=rows, layers=layers, hidden_size=width, on_start=progress.tell
        )
    show("Trainers of TRL", records, json, "trl")


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
    from treefx.tools.bench import unshared as bench_unshared

    with waiting("compiling", quiet=json) as progress:
        records = bench_unshared.run(
            names or (), rows=rows, repeats=repeats, inner=inner, changing=changing, on_start=progress.tell
        )
    mean = bench_unshared.geometric_mean(records)
    if json:
        print_json({"models": records, "geometric_mean": mean}, schema_of("unshared"))
        return
    fields = ("model", "baseline_seconds", "seconds", "ratio", "ran", "note")
    cells = [[format_cell(record.get(field, "")) for field in fields] for record in records]
    headers = [field.replace("_", " ") for field in fields]
    console.print(make_table("Nothing shared, forward and backward", headers, cells))
    timed = sum("ratio" in record for record in records)
    print_line(f"geometric mean of {count(timed, 'ratio')}: {mean:.3f}")


@bench.command()
def memory(
    inner: Annotated[str, typer.Option(help="Inner compiler of treefx: inductor, aot_eager or eager.")] = "inductor",
    json: Json = False,
) -> None:
    """Measure the most bytes one training step holds on the CPU, each figure in a separate process.

    Four sharing ratios, gradient checkpointing on and off, logits read and unused, and 8,192 tokens with a vocabulary
    of 151,936. The last needs about 1 GB of memory; all of it takes some minutes.
    """
    from treefx.tools.bench import memory as bench_memory

    show("Memory of a training step", bench_memory.run(json_output=json, inner=inner), json, "memory")
