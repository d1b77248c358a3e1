"""Read traces of rollout engines: token ids as recorded."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from treefx.data.files import JSON_SUFFIXES, MAX_RECORD_BYTES, OnError, ReadReport, Value, read_records
from treefx.data.traces.nemo_gym import is_nemo_gym, parse_nemo_gym
from treefx.data.traces.slime import is_slime, parse_slime
from treefx.data.traces.trace import Trace
from treefx.data.traces.verifiers import is_verifiers, parse_verifiers
from treefx.data.traces.verl import is_verl, parse_verl

__all__ = ["holds_traces", "read_traces"]

Recognise = Callable[[Any], bool]
Parse = Callable[[Value, str | None], list[Trace]]

_FORMATS: dict[str, tuple[Recognise, Parse]] = {
    "verifiers {task, traces}, {task, agent, nodes} or {example_id, trajectory: [{tokens}]}": (
        is_verifiers,
        parse_verifiers,
    ),
    "NeMo Gym {responses_create_params, response}": (is_nemo_gym, lambda record, _: parse_nemo_gym(record)),
    "slime {rollout_id, samples}": (is_slime, parse_slime),
    "verl {input, output, score, step}": (is_verl, lambda record, _: parse_verl(record)),
}
_SUFFIXES = (*JSON_SUFFIXES, ".pt")


def read_traces(
    path: str | Path,
    *,
    reward_key: str | None = None,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    progress: bool = True,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Trace]:
    """Read the traces of rollout engines one by one; no tokenizer is needed.

    The engine is recognised by the fields of the first record of a file, and all others have to be of the same one.

    Args:
        path: a file or folder; ``.pt`` files of a folder are read too.
        reward_key: the reward that counts, where a trace has several by name. None: their weighted sum (verifiers), or
            none (slime).
        on_error, report, progress, max_record_bytes: as for `read_records`. A ``.pt`` file is one record.

    Returns:
        An iterator over the traces.

    Raises:
        InputError: there is nothing to read.
        RecordError: while reading; a record is broken, of no known engine, of two, or of another one than those before.

    Example:
        >>> batch = trace_batch(read_traces("traces.jsonl"))  # doctest: +SKIP
    """
    engine_of: dict[str, str] = {}

    def parse(record: Value) -> list[Trace]:
        engine = _recognise(record)
        before = engine_of.setdefault(record.place.path, engine)
        if engine != before:
            raise record.place.error(f"expected a record of {before}, as those before, got one of {engine}")
        return _FORMATS[engine][1](record, reward_key)

    return read_records(
        path,
        parse,
        on_error=on_error,
        report=report,
        progress=progress,
        max_record_bytes=max_record_bytes,
        suffixes=_SUFFIXES,
    )


def holds_traces(path: str | Path) -> bool:
    """Return whether the first readable record is a trace of a rollout engine.

    Args:
        path: a file or folder, as for `read_traces`.

    Returns:
        False also where no record can be read.

    Raises:
        InputError: there is nothing to read.
    """
    kinds = read_records(
        path,
        lambda record: [any(recognises(record.raw) for recognises, _ in _FORMATS.values())],
        on_error="skip",
        report=ReadReport(),
        progress=False,
        suffixes=_SUFFIXES,
    )
    return next(kinds, False)


def _recognise(record: Value) -> str:
    found = [name for name, (recognises, _) in _FORMATS.items() if recognises(record.raw)]
    if len(found) > 1:
        raise record.place.error(f"expected the fields of one engine, got those of {' and of '.join(found)}")
    if not found:
        record.fail(f"a trace of {'; '.join(_FORMATS)}")
    return found[0]
