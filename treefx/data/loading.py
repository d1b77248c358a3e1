"""Read trajectories of any known format, compared answers and judged ones."""

from collections.abc import Iterator
from pathlib import Path

from treefx.data.files import MAX_RECORD_BYTES, OnError, ReadReport, Value, read_records
from treefx.data.formats.openai_chat import is_openai_chat, parse_openai_chat
from treefx.data.formats.preferences import is_preference, parse_judged, parse_preference
from treefx.data.formats.tau_bench import is_tau_bench, parse_tau_bench
from treefx.data.formats.toolbench import is_toolbench, parse_toolbench
from treefx.data.formats.trials import is_trials, parse_trials
from treefx.data.formats.verifiers_results import is_verifiers_result, parse_verifiers_result
from treefx.data.trajectories import Conversation, Judged, Preference

__all__ = ["holds_preferences", "load", "read_conversations", "read_judged", "read_preferences"]

_FORMATS = (
    "a tau-bench trajectory {task_id, traj}, a ToolBench decision tree {tree: {tree}}, a chat {messages}, "
    "a group of trials {prompt, completions}, or a result of verifiers {example_id, prompt, completion} "
    "(read_traces reads traces with token ids: verifiers, NeMo Gym, slime, verl)"
)


def read_conversations(
    path: str | Path,
    *,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    progress: bool = True,
    drop_null_arguments: bool | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Conversation]:
    """Read the conversations of a file or folder one by one, of any size.

    Every record may be of another format, recognised by its fields. See `read_records` for files and arguments.

    Args:
        path: a file or folder.
        on_error, report, progress, drop_null_arguments, max_record_bytes: as for `read_records`.

    Returns:
        An iterator over the conversations.

    Raises:
        InputError: there is nothing to read.
        RecordError: while reading; a record is broken, or of no known format.
    """
    return read_records(
        path,
        _parse_record,
        on_error=on_error,
        report=report,
        progress=progress,
        drop_null_arguments=drop_null_arguments,
        max_record_bytes=max_record_bytes,
    )


def load(
    path: str | Path,
    *,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    drop_null_arguments: bool | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> list[Conversation]:
    """Read all conversations of a file, or of each file below a folder, at once.

    Files are ``.json``, ``.jsonl`` and ``.ndjson``.

    Files are read in sorted order. Null fields of call arguments, tools and ``chat_template_kwargs`` are warned of, as
    Arrow writes null for every field that another record has; ``drop_null_arguments=True`` leaves them out. See
    `read_records` for the other arguments.

    Args:
        path: a file or folder.
        on_error, report, drop_null_arguments, max_record_bytes: as for `read_records`.

    Returns:
        The conversations in the order of their records.

    Raises:
        InputError: there is nothing to read.
        RecordError: a record is broken, or of no known format.
    """
    return list(
        read_conversations(
            path,
            on_error=on_error,
            report=report,
            drop_null_arguments=drop_null_arguments,
            max_record_bytes=max_record_bytes,
        )
    )


def read_preferences(
    path: str | Path,
    *,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    progress: bool = True,
    drop_null_arguments: bool | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Preference]:
    """Read pairs of a chosen and a rejected answer one by one.

    ``treefx.data.formats.preferences`` lists the spellings.

    Args:
        path: a file or folder.
        on_error, report, progress, drop_null_arguments, max_record_bytes: as for `read_records`.

    Returns:
        An iterator over the pairs.

    Example:
        >>> pairs = list(read_preferences("pairs.jsonl"))  # doctest: +SKIP

    Raises:
        InputError: there is nothing to read.
        RecordError: while reading; a record is broken, or is no pair. See `read_records` for files and arguments.
    """
    return read_records(
        path,
        parse_preference,
        on_error=on_error,
        report=report,
        progress=progress,
        drop_null_arguments=drop_null_arguments,
        max_record_bytes=max_record_bytes,
    )


def read_judged(
    path: str | Path,
    *,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    progress: bool = True,
    drop_null_arguments: bool | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Judged]:
    """Read answers that are each judged good or bad (KTO) one by one.

    A pair is a good answer and a bad one.

    Args:
        path: a file or folder.
        on_error, report, progress, drop_null_arguments, max_record_bytes: as for `read_records`.

    Returns:
        An iterator over the judged answers.

    Raises:
        InputError: there is nothing to read.
        RecordError: while reading; a record is broken. See `read_records` for files and arguments.
    """
    return read_records(
        path,
        parse_judged,
        on_error=on_error,
        report=report,
        progress=progress,
        drop_null_arguments=drop_null_arguments,
        max_record_bytes=max_record_bytes,
    )


def holds_preferences(path: str | Path) -> bool:
    """Return whether the first readable record is a pair of a chosen and a rejected answer.

    Args:
        path: a file or folder, as for `read_records`.

    Returns:
        False also where no record can be read.

    Raises:
        InputError: there is nothing to read.
    """
    kinds = read_records(
        path, lambda record: [is_preference(record.raw)], on_error="skip", report=ReadReport(), progress=False
    )
    return next(kinds, False)


def _parse_record(record: Value) -> list[Conversation]:
    source = Path(record.place.path.removesuffix(".gz")).stem
    for recognises, parse in (
        (is_tau_bench, parse_tau_bench),
        (is_toolbench, parse_toolbench),
        (is_openai_chat, parse_openai_chat),
        (is_trials, parse_trials),
        (is_verifiers_result, parse_verifiers_result),
    ):
        if recognises(record.raw):
            return parse(record, source)
    record.fail(_FORMATS)
