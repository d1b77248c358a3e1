"""Group trials of one task from a stream of conversations, with bounded memory."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from treefx.arguments import check_whole
from treefx.data.files import MAX_RECORD_BYTES, OnError, ReadReport
from treefx.data.loading import read_conversations
from treefx.data.trajectories import Conversation
from treefx.errors import InputError, RecordError

__all__ = ["TrialGroup", "group_trials", "read_groups"]


@dataclass(frozen=True)
class TrialGroup:
    """Hold trials of one task, which GRPO compares and which share their beginning."""

    task: str
    trials: tuple[Conversation, ...]

    @property
    def rewards(self) -> list[float]:
        """Return one reward per trial.

        Raises:
            InputError: a trial has none.
        """
        found = [trial.reward for trial in self.trials if trial.reward is not None]
        if len(found) < len(self.trials):
            missing = next(trial for trial in self.trials if trial.reward is None)
            where = missing.place or f"trial {missing.trial}"
            raise InputError(f"{where}: task {self.task} needs a reward for each of its trials, got none for this one")
        return found


def read_groups(
    path: str | Path,
    *,
    window: int | None = 256,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    progress: bool = True,
    drop_null_arguments: bool | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[TrialGroup]:
    """Read trials and group those of one task and one file.

    See `group_trials` and `read_conversations`.

    Args:
        path: a file or folder.
        window: as for `group_trials`.
        on_error, report, progress, drop_null_arguments, max_record_bytes: as for `read_records`.

    Returns:
        An iterator over the groups.

    Raises:
        InputError: there is nothing to read, or no such window.
        RecordError: while reading; a record is broken, or comes when its task's group is closed. The latter ends the
            reading even if broken records are skipped: a group without some of its trials has other advantages.
    """
    conversations = read_conversations(
        path,
        on_error=on_error,
        report=report,
        progress=progress,
        drop_null_arguments=drop_null_arguments,
        max_record_bytes=max_record_bytes,
    )
    return group_trials(conversations, window=window)


def group_trials(conversations: Iterable[Conversation], *, window: int | None = 256) -> Iterator[TrialGroup]:
    """Group the trials of one task and one file, with at most ``window`` tasks in memory.

    Args:
        conversations: in any order in which the trials of a task are not too far apart.
        window: how many tasks may be open at a time. When another one comes, the one whose last trial is longest ago is
            closed and yielded: 1 for adjacent trials; None for all tasks, with every trial in memory. Groups still open
            at the end are yielded in order of their first trials.

    Returns:
        An iterator over the groups.

    Raises:
        InputError: no such window.
        RecordError: a trial of a task that is closed already; make the window larger, or sort the file by tasks.
    """
    if window is not None:
        check_whole(window, "window", least=1, or_none="all tasks")
    return _group(conversations, window)


def _group(conversations: Iterable[Conversation], window: int | None) -> Iterator[TrialGroup]:
    waiting: OrderedDict[tuple[str, str], list[Conversation]] = OrderedDict()
    closed: set[int] = set()  # 8 bytes a task: a hash that meets another by chance is one in 2^64
    first_seen: dict[tuple[str, str], int] = {}
    for number, trial in enumerate(conversations):
        key = (trial.place.path if trial.place else trial.source, trial.task)
        if hash(key) in closed:
            raise _too_late(trial, window)
        first_seen.setdefault(key, number)
        waiting.setdefault(key, []).append(trial)
        waiting.move_to_end(key)
        if window is not None and len(waiting) > window:
            oldest, trials = waiting.popitem(last=False)
            closed.add(hash(oldest))
            del first_seen[oldest]
            yield TrialGroup(oldest[1], tuple(trials))
    for key in sorted(waiting, key=first_seen.__getitem__):
        yield TrialGroup(key[1], tuple(waiting[key]))


def _too_late(trial: Conversation, window: int | None) -> RecordError:
    problem = (
        f"a trial of task {trial.task} comes when that task's group is closed, as more than window={window} tasks were "
        "open; make the window larger, or sort the file by tasks"
    )
    return trial.place.error(problem) if trial.place else RecordError(f"{trial.source}: {problem}")
