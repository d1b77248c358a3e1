"""How much of a set of rollouts is the same: the three baselines of prefix sharing.

==============  ==========================================================================================
separate rows   one row per assistant turn, every token computed, as by a trainer without treefx
merged rows     turns of one conversation joined where one continues the other: the best that rows can do
tree            every distinct prefix once, as by treefx
==============  ==========================================================================================
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treefx.data.forest_batches import preference_batch
from treefx.data.samples import IGNORED, AnyTokenizer, Sample, as_encoder, merge_turns, sample_of, turn_samples
from treefx.data.trace_batches import trace_samples
from treefx.data.traces.trace import Trace
from treefx.data.trajectories import Conversation, Preference
from treefx.errors import InputError
from treefx.forests.forest import Forest

__all__ = ["SharingStatistics", "group_by_task", "pair_statistics", "sharing_statistics", "trace_statistics"]


@dataclass(frozen=True, kw_only=True)
class SharingStatistics:
    """Hold counts over all tasks; a task's trials and turns form one forest."""

    tasks: int
    conversations: int
    rows: int
    """Rows as emitted, one per assistant turn."""
    merged_rows: int
    raw_tokens: int
    """Tokens of the rows as emitted."""
    merged_tokens: int
    """Tokens of the merged rows."""
    tokens: int
    """Distinct tokens: the sizes of the forests, summed."""
    longest_row_tokens: int
    """Tokens of the longest row."""
    labelled_tokens: int
    """Tokens that carry loss."""

    @property
    def sharing_ratio(self) -> float:
        """Return raw over distinct tokens: the gain of the tree over separate rows."""
        return self.raw_tokens / self.tokens

    @property
    def merged_ratio(self) -> float:
        """Return raw over merged tokens: the gain of joined turns over separate rows."""
        return self.raw_tokens / self.merged_tokens

    @property
    def branching_ratio(self) -> float:
        """Return merged over distinct tokens: the gain of the tree over merged rows."""
        return self.merged_tokens / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """Return all counts and ratios, for JSON."""
        ratios = ("sharing_ratio", "merged_ratio", "branching_ratio")
        return asdict(self) | {name: getattr(self, name) for name in ratios}


def group_by_task(conversations: Iterable[Conversation]) -> dict[tuple[str, str], list[Conversation]]:
    """Group conversations by source and task, in the order of their first appearance.

    Args:
        conversations: in any order.

    Returns:
        (source, task) -> its conversations.
    """
    groups: dict[tuple[str, str], list[Conversation]] = {}
    for conversation in conversations:
        groups.setdefault((conversation.source, conversation.task), []).append(conversation)
    return groups


def sharing_statistics(conversations: Sequence[Conversation], tokenizer: AnyTokenizer) -> SharingStatistics:
    """Count the shared tokens of conversations, task by task.

    Args:
        conversations: with at least one assistant message among them.
        tokenizer: as for `make_samples`.

    Returns:
        Numbers of rows and tokens, and their ratios.

    Raises:
        InputError: No conversation has an assistant message.
    """
    groups = group_by_task(conversations)
    counts = [_count(group, tokenizer) for group in groups.values()]
    if not any(each["rows"] for each in counts):
        raise InputError(
            f"expected at least one assistant message to train on, got none in {len(conversations)} conversations"
        )
    return _sum(counts, len(conversations))


def trace_statistics(traces: Sequence[Trace], tokenizer: AnyTokenizer | None = None) -> SharingStatistics:
    """Count the shared tokens of traces, group by group.

    Rows as emitted are one per sampled message, with all tokens before it; merged rows are those of `trace_samples`.

    Args:
        traces: from `read_traces`, with at least one trained token or answer among them.
        tokenizer: encodes traces that hold texts only, as for `make_samples`; not used for others.

    Returns:
        Numbers of rows and tokens, and their ratios.

    Raises:
        InputError: nothing is trained, or there are texts and no tokenizer.
    """
    groups: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.group, []).append(trace)
    counts = [_count_traces(group, tokenizer) for group in groups.values()]
    if not any(each["labelled_tokens"] for each in counts):
        raise InputError(f"expected at least one trained token, got none in {len(traces)} traces")
    return _sum(counts, len(traces))


def _sum(counts: list[dict[str, int]], conversations: int) -> SharingStatistics:
    longest = max(each.pop("longest_row_tokens") for each in counts)
    sums = {name: sum(each[name] for each in counts) for name in counts[0]}
    return SharingStatistics(tasks=len(counts), conversations=conversations, longest_row_tokens=longest, **sums)


def pair_statistics(preferences: Sequence[Preference], tokenizer: AnyTokenizer) -> SharingStatistics:
    """Count the shared tokens of each pair's rows.

    Every pair counts as a task, each of its answers as a conversation.

    Args:
        preferences: pairs of answers, at least one.
        tokenizer: as for `preference_batch`.

    Returns:
        Numbers of rows and tokens, and their ratios.

    Raises:
        InputError: There is no pair, or the tokenizer refuses one.
    """
    batches = [preference_batch([pair], tokenizer) for pair in preferences]
    if not batches:
        raise InputError("expected at least one pair, got none")
    rows = [row for batch in batches for row in batch.samples]
    raw = sum(map(len, rows))
    return SharingStatistics(
        tasks=len(batches),
        conversations=len(rows),
        rows=len(rows),
        merged_rows=len(rows),
        raw_tokens=raw,
        merged_tokens=raw,
        tokens=sum(batch.forest.num_tokens for batch in batches),
        longest_row_tokens=max(map(len, rows)),
        labelled_tokens=sum(_labelled(row) for row in rows),
    )


def _count(group: Sequence[Conversation], tokenizer: AnyTokenizer) -> dict[str, int]:
    """The counts of one task; its rows are let go."""
    by_conversation = [turn_samples(conversation, tokenizer) for conversation in group]
    turns = [row for rows in by_conversation for row in rows]
    merged = [row for rows in by_conversation for row in merge_turns(rows)]
    return {
        "rows": len(turns),
        "merged_rows": len(merged),
        "raw_tokens": sum(map(len, turns)),
        "merged_tokens": sum(map(len, merged)),
        "tokens": Forest.from_sequences([row.tokens for row in turns]).num_tokens if turns else 0,
        "longest_row_tokens": max(map(len, turns), default=0),
        "labelled_tokens": sum(map(_labelled, turns)),
    }


def _count_traces(group: Sequence[Trace], tokenizer: AnyTokenizer | None) -> dict[str, int]:
    """The counts of one group of traces."""
    recorded = [trace for trace in group if trace.texts is None]
    merged = trace_samples(recorded, weighting="once") + [_encode(trace, tokenizer) for trace in group if trace.texts]
    texts = [len(row) for row in merged[len(merged) - (len(group) - len(recorded)) :]]
    turns = texts + [
        sum(len(trace.nodes[i].tokens) for i in trace.path(number))
        for trace in recorded
        for number, node in enumerate(trace.nodes)
        if node.trained.any()
    ]
    return {
        "rows": len(turns),
        "merged_rows": len(merged),
        "raw_tokens": sum(turns),
        "merged_tokens": sum(map(len, merged)),
        "tokens": Forest.from_sequences([row.tokens for row in merged]).num_tokens,
        "longest_row_tokens": max(map(len, merged)),
        "labelled_tokens": sum(map(_labelled, merged)),
    }


def _encode(trace: Trace, tokenizer: AnyTokenizer | None) -> Sample:
    if tokenizer is None or trace.texts is None:
        raise InputError(f"{trace.place}: a trace of texts needs a tokenizer to be counted")
    prompt, answer = trace.texts
    (row,) = as_encoder(tokenizer).answers(prompt, (answer,))
    return sample_of(row, trace.task, trace.trial)


def _labelled(row: Sample) -> int:
    return int((row.labels != IGNORED).sum())
