"""Count shared tokens of rollouts or compared answers: ``treefx data``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treefx.cli.checks import check_input, check_output
from treefx.cli.rollouts import Rollouts, check_tokenizer, make_encoder
from treefx.errors import InputError
from treefx.output import console, count, make_table, notes, print_json, print_line, waiting

if TYPE_CHECKING:
    from treefx.data import (
        ChatTokenizer,
        Conversation,
        DriftReport,
        OnError,
        SharingStatistics,
        Tokenizer,
    )

__all__ = ["data"]


# Long: an option takes one line or three.
def data(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A file or folder: chats, tau-bench, ToolBench, groups of trials, pairs of answers, or traces of "
            "verifiers, NeMo Gym, slime or verl, as JSON lines, lists or documents, gzip or not, or .pt. Default: a "
            "scripted sample."
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(help="'bpe', trained on the text at hand, 'bytes', or the folder of a Hugging Face tokenizer."),
    ] = "bpe",
    vocab_size: Annotated[int, typer.Option(min=1, help="Largest vocabulary of the BPE.")] = 16384,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out broken records and count them, instead of ending there.")
    ] = False,
    drift: Annotated[
        bool,
        typer.Option(
            "--drift", help="Also tell where equal texts have different tokens; needs the folder of a tokenizer."
        ),
    ] = False,
    drop_null_arguments: Annotated[
        bool,
        typer.Option(
            "--drop-null-arguments", help="Leave out null fields of call arguments and tools, which Arrow filled in."
        ),
    ] = False,
    draw: Annotated[Path | None, typer.Option(help="Save a picture of the first task's tree (.png, .svg).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Count what rollouts share: separate rows, merged rows, and the tree of prefixes.

    Each assistant turn is one row, as agent frameworks emit them. Rows of one task (all its turns and
    trials) make one tree; `treefx plan` makes one forest of all rows, in which tasks share their system
    prompt too. "Merged" joins the turns of a conversation where one continues the other: the
    best that can be done with rows. Of a file of pairs {prompt, chosen, rejected}, the two rows of a pair
    make one tree. Traces of engines have token ids, so that no tokenizer is used; verl's JSON lines have texts.

    A record that is broken ends the reading; file, line and field are named. With --skip-broken it is left
    out and counted.

    With --drift: places where a token reaches over the border of a prompt and its answer, or where a later
    turn's prompt encodes what was said before in other tokens, so that rows fork which say the same.
    """
    _check_tokenizer(tokenizer, drift)
    check_input(path)
    check_output("--draw", draw)
    with waiting("loading PyTorch", quiet=json) as progress:
        from treefx.data import ReadReport, forest_of

        progress.tell("reading rollouts")
        report = ReadReport()
        on_error: OnError = "skip" if skip_broken else "raise"
        read = Rollouts.read(path, on_error, report, drop_null_arguments or None)
        progress.tell("counting tokens")
        encoder = None if read.have_token_ids else make_encoder(read.spoken(), tokenizer, vocab_size)
        statistics = _count(read, encoder)
        found = _find_drift(read.conversations, encoder) if drift else None
        if draw is not None:
            forest_of(read.first_task().samples(encoder)).draw(draw)
    if report.skipped:
        notes.print(report.summary(), markup=False, soft_wrap=True)
    if json:
        vocabulary = encoder.vocab_size if encoder else None
        about = {"path": str(path) if path else None, "vocab_size": vocabulary, "skipped": report.skipped}
        figures = about | statistics.to_dict() | ({"drift": found.to_dict()} if found else {})
        print_json(figures, "treefx.data/1")
        return
    _print(statistics, "pairs" if read.pairs else "tasks")
    for line in (found and found.summary(), draw and f"tree of the first {'pair' if read.pairs else 'task'}: {draw}"):
        if line:
            print_line(line)


def _check_tokenizer(name: str, drift: bool) -> None:
    check_tokenizer(name)
    if drift and not Path(name).is_dir():
        raise InputError("--drift needs --tokenizer FOLDER: our own tokenizers encode every message on its own")


def _count(read: Rollouts, encoder: Tokenizer | ChatTokenizer | None) -> SharingStatistics:
    from treefx.data import pair_statistics, sharing_statistics, trace_statistics

    if read.traces or encoder is None:
        return trace_statistics(read.traces, encoder)
    return pair_statistics(read.pairs, encoder) if read.pairs else sharing_statistics(read.conversations, encoder)


def _find_drift(conversations: Sequence[Conversation], encoder: Tokenizer | ChatTokenizer | None) -> DriftReport:
    from treefx.data import ChatTokenizer, find_drift

    if not conversations:
        raise InputError("--drift compares turns of conversations; pairs of answers and traces have none")
    assert isinstance(encoder, ChatTokenizer)  # _check_tokenizer
    return find_drift(conversations, encoder)


def _print(statistics: SharingStatistics, trees: str) -> None:
    baselines = [
        ("separate rows", statistics.rows, statistics.raw_tokens, 1.0),
        ("merged rows", statistics.merged_rows, statistics.merged_tokens, statistics.merged_ratio),
        ("tree", statistics.tasks, statistics.tokens, statistics.sharing_ratio),
    ]
    rows = [(name, f"{count:,}", f"{tokens:,}", f"{ratio:.2f}") for name, count, tokens, ratio in baselines]
    thing = "answer" if trees == "pairs" else "conversation"
    title = f"{count(statistics.conversations, thing)} of {count(statistics.tasks, trees.removesuffix('s'))}"
    console.print(make_table(title, ("form", "rows or trees", "tokens", "raw / tokens"), rows))
    print_line(
        f"longest row {statistics.longest_row_tokens:,} tokens; "
        f"{statistics.labelled_tokens:,} tokens carry loss; "
        f"branching adds {statistics.branching_ratio:.2f} to merging",
    )
    if trees == "tasks" and statistics.tasks > 1:
        print_line("a tree per task; `treefx plan` makes one forest of all tasks, which share system prompts in it")
