"""Train a small, unmodified transformers model on agent rollouts, with treefx and with inductor.

    python examples/train_rollouts.py                        # rollouts of a scripted agent, made on the spot
    python examples/train_rollouts.py --data trajectories/   # tau-bench, ToolBench or OpenAI chats

Each assistant turn is one training row, as agent frameworks emit them. Both backends train from the same
weights on the same padded batches; what differs is that treefx computes each distinct prefix once. Printed
are tokens, step times and losses of both, the error of both gradients against float64, and what treefx
rewrote. Saved are a picture of one batch's tree, a chart of the steps, and all figures as JSON.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import treefx
from treefx.data import Conversation, load, scripted_conversations, sharing_statistics
from treefx.output import console, notes, print_line, refusals_end_the_command
from treefx.tools.bench.job.models import make_config, make_model
from treefx.tools.bench.job.report import TrainingReport
from treefx.tools.bench.job.rollouts import RolloutBatches, make_tokenizer, prepare_batches, train_and_compare

DataOption = Annotated[Path | None, typer.Option(help="File or folder of trajectories. Default: a scripted sample.")]
ModelOption = Annotated[str, typer.Option(help="An architecture of transformers (llama, qwen3, gemma2, ...).")]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(help="Leave longer rows out. Default: 640, or 3072 for --data.", show_default=False),
]


def train_rollouts(
    data: DataOption = None,
    model: ModelOption = "llama",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 6,
    rows: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    max_length: MaxLengthOption = None,
    hidden_size: Annotated[int, typer.Option(help="Width of the model, a multiple of 64.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 4,
    vocab_size: Annotated[int, typer.Option(help="Largest vocabulary of the tokenizer.")] = 4096,
    backend: Annotated[str, typer.Option(help="The torch.compile backend to show.")] = "treefx",
    baseline: Annotated[str, typer.Option(help="The torch.compile backend to compare with.")] = "inductor",
    out: Annotated[Path, typer.Option(help="Folder for pictures and figures.")] = Path("out/demo"),
) -> None:
    """Train a small model on agent rollouts with treefx and with inductor, and compare."""
    conversations = load(data) if data is not None else scripted_conversations()
    limit = max_length or (640 if data is None else 3072)
    tokenizer = make_tokenizer(conversations, vocab_size=vocab_size)
    # The scripted rows are alike in length: one shape, compiled once. Real ones are not: a few shapes.
    multiple = limit if data is None else 512
    prepared = prepare_batches(
        conversations, tokenizer, steps=steps, rows=rows, max_length=limit, pad_multiple=multiple
    )
    statistics = sharing_statistics(conversations, tokenizer)
    _describe(conversations, prepared, limit)
    print_line(
        f"raw / distinct tokens of all rows: {statistics.sharing_ratio:.2f}; of turns merged to rows: "
        f"{statistics.branching_ratio:.2f}",
    )

    config = make_config(
        model,
        vocab_size=tokenizer.vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        max_positions=limit + multiple,
    )
    causal_lm = make_model(config)
    parameters = sum(parameter.numel() for parameter in causal_lm.parameters())
    print_line(f"model: {model}, {layers} layers, width {hidden_size}, {parameters / 1e6:.1f} million parameters")
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        task = progress.add_task("compiling", total=4 * steps + 1)
        report, run = train_and_compare(
            causal_lm,
            prepared.batches,
            backend=backend,
            baseline=baseline,
            on_progress=lambda done: progress.update(task, advance=1, description=done),
        )

    console.print(report.table())
    for line in report.lines():
        print_line(line)
    if backend == "treefx":
        print_line("\nwhat treefx did:")
        print_line(treefx.inspect(run.compiled).summary())
    _save(report, prepared, out)


def _describe(conversations: Sequence[Conversation], prepared: RolloutBatches, limit: int) -> None:
    tasks = len({(conversation.source, conversation.task) for conversation in conversations})
    print_line(
        f"rollouts: {len(conversations)} conversations of {tasks} tasks, "
        f"{prepared.rows:,} rows (one per assistant turn)",
    )
    if prepared.too_long:
        print_line(f"left out: {prepared.too_long:,} rows longer than {limit} tokens (--max-length)")


def _save(report: TrainingReport, prepared: RolloutBatches, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    first = prepared.batches[0]
    treefx.Forest.from_padded(first.input_ids, first.attention_mask).draw(out / "tree.png")
    report.draw(out / "steps.png")
    (out / "figures.json").write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8")
    print_line(f"\nsaved: {out / 'tree.png'}, {out / 'steps.png'}, {out / 'figures.json'}")


if __name__ == "__main__":
    with refusals_end_the_command():
        typer.run(train_rollouts)
