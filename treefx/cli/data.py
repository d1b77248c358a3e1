"""Count shared tokens of rollouts or compared answers: ``treefx data``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treefx.cli.checks import check_input, check_output
from treefx.errors import InputError, shorten
from treefx.output import console, count, make_table, notes, print_json, print_line, waiting

if TYPE_CHECKING:
    from treefx.data import (
        ChatTokenizer,
        Conversation,
        DriftReport,
        OnError,
        Preference,
        ReadReport,
        Sample,
        SharingStatistics,
        Tokenizer,
    )

__all__ = ["data"]


# Long: an option takes one line or three.
def data(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A file or folder: chats, tau-bench, ToolBench, groups of trials, or pairs of answers, as JSON lines, "
            "JSON lists or documents, gzip or not. Default: a scripted sample."
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
    make one tree.

    A record that is broken ends the reading; file, line and field are named. With --skip-broken it is left
    out and counted.

    With --drift: places where a token reaches over the border of a prompt and its answer, or where a later
    turn's prompt encodes what was said before in other tokens, so that rows fork which say the same.
    """
    _check_tokenizer(tokenizer, drift)
    check_input(path)
    check_output("--draw", draw)
    with waiting("loading PyTorch", quiet=json) as progress:
        from treefx.data import ReadReport, forest_of, pair_statistics, sharing_statistics

        progress.tell("reading rollouts")
        report = ReadReport()
        pairs, conversations = _read(path, "skip" if skip_broken else "raise", report, drop_null_arguments or None)
        progress.tell("counting tokens")
        encoder = _make_encoder([*conversations, *map(_spoken, pairs)], tokenizer, vocab_size)
        statistics = pair_statistics(pairs, encoder) if pairs else sharing_statistics(conversations, encoder)
        found = _find_drift(conversations, encoder) if drift else None
        if draw is not None:
            forest_of(_first_rows(pairs, conversations, encoder)).draw(draw)
    if report.skipped:
        notes.print(report.summary(), markup=False, soft_wrap=True)
    if json:
        about = {"path": str(path) if path else None, "vocab_size": encoder.vocab_size, "skipped": report.skipped}
        figures = about | statistics.to_dict() | ({"drift": found.to_dict()} if found else {})
        print_json(figures, "treefx.data/1")
        return
    _print(statistics, "pairs" if pairs else "tasks")
    for line in (found and found.summary(), draw and f"tree of the first {'pair' if pairs else 'task'}: {draw}"):
        if line:
            print_line(line)


def _check_tokenizer(name: str, drift: bool) -> None:
    if not Path(name).is_dir() and name not in ("bpe", "bytes"):
        raise InputError(f"--tokenizer must be 'bpe', 'bytes' or a folder, and there is no folder {name!r}")
    if drift and not Path(name).is_dir():
        raise InputError("--drift needs --tokenizer FOLDER: our own tokenizers encode every message on its own")


def _read(
    path: Path | None, on_error: OnError, report: ReadReport, drop_nulls: bool | None
) -> tuple[list[Preference], list[Conversation]]:
    from treefx.data import holds_preferences, load, read_preferences, scripted_conversations

    if path is None:
        return [], scripted_conversations()
    if holds_preferences(path):
        pairs = read_preferences(path, on_error=on_error, report=report, drop_null_arguments=drop_nulls)
        return list(pairs), []
    return [], load(path, on_error=on_error, report=report, drop_null_arguments=drop_nulls)


def _make_encoder(conversations: Sequence[Conversation], name: str, vocab_size: int) -> Tokenizer | ChatTokenizer:
    from treefx.data import ChatTokenizer
    from treefx.tools.bench.job.rollouts import make_tokenizer

    if not Path(name).is_dir():
        return make_tokenizer(conversations, name, vocab_size)
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError("a tokenizer from a folder needs transformers: pip install 'treefx[examples]'") from error
    try:
        return ChatTokenizer(library.AutoTokenizer.from_pretrained(name, local_files_only=True))
    except Exception as error:  # transformers and tokenizers raise anything on a broken file
        reason = f"{type(error).__name__}: {shorten(str(error))}"
        raise InputError(f"the folder {name} holds no tokenizer that transformers can load: {reason}") from error


def _find_drift(conversations: Sequence[Conversation], encoder: Tokenizer | ChatTokenizer) -> DriftReport:
    from treefx.data import ChatTokenizer, find_drift

    assert isinstance(encoder, ChatTokenizer)  # _check_tokenizer
    if not conversations:
        raise InputError("--drift compares turns of conversations; pairs of answers have none")
    return find_drift(conversations, encoder)


def _first_rows(
    pairs: Sequence[Preference], conversations: Sequence[Conversation], encoder: Tokenizer | ChatTokenizer
) -> list[Sample]:
    from treefx.data import group_by_task, make_samples, preference_batch

    if pairs:
        return preference_batch(pairs[:1], encoder).samples
    return make_samples(next(iter(group_by_task(conversations).values())), encoder)


def _spoken(pair: Preference) -> Conversation:
    """The texts of a pair, for training a tokenizer."""
    from treefx.data import Conversation, Message

    parts = (pair.prompt, pair.chosen, pair.rejected)
    said = [(Message("user", part),) if isinstance(part, str) else part for part in parts]
    return Conversation("", 0, tuple(message for messages in said for message in messages))


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
