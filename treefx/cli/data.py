"""``treefx data``: what a set of rollouts shares."""

from pathlib import Path
from typing import Annotated

import typer

from treefx.bench.job.rollouts import make_tokenizer
from treefx.data import (
    SharingStatistics,
    group_by_task,
    load,
    make_samples,
    scripted_conversations,
    sharing_statistics,
)
from treefx.forests.forest import Forest
from treefx.output import console, make_table, print_json, print_line

__all__ = ["data"]


def data(
    path: Annotated[
        Path | None,
        typer.Argument(help="A file or folder: tau-bench, ToolBench or OpenAI chats. Default: a scripted sample."),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="'bpe', trained on the text at hand, or 'bytes'.")] = "bpe",
    vocab_size: Annotated[int, typer.Option(help="Largest vocabulary of the BPE.")] = 16384,
    draw: Annotated[Path | None, typer.Option(help="Save a picture of the first task's tree (.png, .svg).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Count what rollouts share: separate rows, merged rows, and the tree of distinct prefixes.

    Each assistant turn is one row, as agent frameworks emit them. Rows of one task (all its turns and
    trials) make one tree. "Merged" joins the turns of a conversation where one continues the other: the
    best that can be done with rows.
    """
    conversations = load(path) if path is not None else scripted_conversations()
    encoder = make_tokenizer(conversations, tokenizer, vocab_size)
    statistics = sharing_statistics(conversations, encoder)
    if draw is not None:
        first = next(iter(group_by_task(conversations).values()))
        draw.parent.mkdir(parents=True, exist_ok=True)
        Forest.from_sequences([sample.tokens for sample in make_samples(first, encoder)]).draw(draw)
    if json:
        print_json({"path": str(path) if path else None, "vocab_size": encoder.vocab_size} | statistics.to_dict())
        return
    _print(statistics)
    if draw is not None:
        print_line(f"tree of the first task: {draw}")


def _print(statistics: SharingStatistics) -> None:
    baselines = [
        ("separate rows", statistics.rows, statistics.raw_tokens, 1.0),
        ("merged rows", statistics.merged_rows, statistics.merged_tokens, statistics.merged_ratio),
        ("tree", statistics.tasks, statistics.tokens, statistics.sharing_ratio),
    ]
    rows = [(name, f"{count:,}", f"{tokens:,}", f"{ratio:.2f}") for name, count, tokens, ratio in baselines]
    title = f"{statistics.conversations} conversations of {statistics.tasks} tasks"
    console.print(make_table(title, ("form", "rows or trees", "tokens", "raw / tokens"), rows))
    print_line(
        f"longest row {statistics.longest_row_tokens:,} tokens; "
        f"{statistics.labelled_tokens:,} tokens carry loss; "
        f"branching adds {statistics.branching_ratio:.2f} to merging",
    )
