"""``treefx bench``: the benchmarks, each run in one process with what it is compared with."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from treefx.cli import bench_step
from treefx.cli.output import console, make_table, notes, print_json

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True, help="Measure: building forests, attention over a tree, a whole training step."
)

Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON.")]


@bench.command()
def forest(json: Json = False) -> None:
    """Time the building of forests from lists of rows and from padded batches."""
    from treefx.cli import bench_forest

    _show("Building forests", bench_forest.run(json=json), json)


@bench.command()
def attention(json: Json = False) -> None:
    """Time tree attention, forward and backward, against dense masks and separate rows."""
    # Registers the operators of the kernels: only this benchmark needs them without a model.
    from treefx.cli import bench_attention

    _show("Attention over a tree", bench_attention.run(json=json), json)


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
