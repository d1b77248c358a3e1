"""How much of a set of rollouts is the same: the three baselines of prefix sharing.

==============  ==========================================================================================
separate rows   one row per assistant turn, every token computed: what a trainer does without treefx
merged rows     turns of one conversation joined where one continues the other: the best that rows can do
tree            every distinct prefix once: what treefx does
==============  ==========================================================================================
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treefx.data.samples import AnyTokenizer, Sample, make_samples
from treefx.data.trajectories import Conversation
from treefx.errors import InputError
from treefx.forests.forest import Forest

__all__ = ["SharingStatistics", "group_by_task", "sharing_statistics"]


@dataclass(frozen=True, kw_only=True)
class SharingStatistics:
    """Counts over all tasks; the tokens of a task's trials and turns form one forest."""

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
    labelled_tokens: int
    """Tokens that carry loss."""

    @property
    def sharing_ratio(self) -> float:
        """Raw over distinct tokens: what the tree gains over separate rows."""
        return self.raw_tokens / self.tokens

    @property
    def merged_ratio(self) -> float:
        """Raw over merged tokens: what joining turns gains over separate rows."""
        return self.raw_tokens / self.merged_tokens

    @property
    def branching_ratio(self) -> float:
        """Merged over distinct tokens: what the tree gains over merged rows."""
        return self.merged_tokens / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """All counts and ratios, for JSON."""
        ratios = ("sharing_ratio", "merged_ratio", "branching_ratio")
        return asdict(self) | {name: getattr(self, name) for name in ratios}


def group_by_task(conversations: Iterable[Conversation]) -> dict[tuple[str, str], list[Conversation]]:
    """Conversations by source and task, in the order of their first appearance."""
    groups: dict[tuple[str, str], list[Conversation]] = {}
    for conversation in conversations:
        groups.setdefault((conversation.source, conversation.task), []).append(conversation)
    return groups


def sharing_statistics(conversations: Sequence[Conversation], tokenizer: AnyTokenizer) -> SharingStatistics:
    """Count what the conversations share, task by task.

    Raises:
        InputError: No conversation has an assistant message.
    """
    groups = group_by_task(conversations)
    rows: list[Sample] = []
    merged: list[Sample] = []
    tokens = 0
    for group in groups.values():
        turns = make_samples(group, tokenizer, "turns")
        if not turns:
            continue
        rows += turns
        merged += make_samples(group, tokenizer, "merged")
        tokens += Forest.from_sequences([row.tokens for row in turns]).num_tokens
    if not rows:
        raise InputError(
            f"expected at least one assistant message to train on, got none in {len(conversations)} conversations"
        )
    return SharingStatistics(
        tasks=len(groups),
        conversations=len(conversations),
        rows=len(rows),
        merged_rows=len(merged),
        raw_tokens=sum(map(len, rows)),
        merged_tokens=sum(map(len, merged)),
        tokens=tokens,
        longest_row_tokens=max(map(len, rows)),
        labelled_tokens=sum(int((row.labels >= 0).sum()) for row in rows),
    )
