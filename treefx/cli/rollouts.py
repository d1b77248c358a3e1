"""Read what a path of rollouts holds, and encode it: what ``treefx data`` and ``treefx plan`` have in common."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treefx.errors import InputError, shorten

if TYPE_CHECKING:
    from treefx.data import (
        ChatTokenizer,
        Conversation,
        OnError,
        Preference,
        ReadReport,
        Sample,
        Text,
        Tokenizer,
        Trace,
    )

__all__ = ["Rollouts", "check_tokenizer", "make_encoder"]


@dataclass(frozen=True)
class Rollouts:
    """Hold what a file had: one of the three lists is not empty."""

    pairs: list[Preference] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None, on_error: OnError, report: ReadReport, drop_nulls: bool | None = None) -> Rollouts:
        """Read a file or folder; the scripted sample without one.

        Raises:
            InputError: nothing can be read, or all that is there was skipped.
        """
        from treefx.data import (
            holds_preferences,
            holds_traces,
            load,
            read_preferences,
            read_traces,
            scripted_conversations,
        )

        if path is None:
            return cls(conversations=scripted_conversations())
        if holds_traces(path):
            found = cls(traces=list(read_traces(path, on_error=on_error, report=report)))
        elif holds_preferences(path):
            pairs = read_preferences(path, on_error=on_error, report=report, drop_null_arguments=drop_nulls)
            found = cls(pairs=list(pairs))
        else:
            read = load(path, on_error=on_error, report=report, drop_null_arguments=drop_nulls)
            found = cls(conversations=read)
        if report.skipped and found == cls():
            raise InputError(f"expected at least one record that can be read in {path}; {report.summary()}")
        return found

    @property
    def have_token_ids(self) -> bool:
        return bool(self.traces) and all(trace.texts is None for trace in self.traces)

    def spoken(self) -> list[Conversation]:
        """Return the texts, for training a tokenizer."""
        pairs = [_spoken(pair.prompt, pair.chosen, pair.rejected) for pair in self.pairs]
        return [*self.conversations, *pairs, *(_spoken(*trace.texts) for trace in self.traces if trace.texts)]

    def samples(self, encoder: Tokenizer | ChatTokenizer | None) -> list[Sample]:
        """Return all rows: of traces as recorded, of conversations and pairs as the tokenizer encodes them."""
        from treefx.data import make_samples, preference_batch, trace_samples

        if self.traces or encoder is None:
            return trace_samples(self.traces)
        if self.pairs:
            return preference_batch(self.pairs, encoder).samples
        return make_samples(self.conversations, encoder)

    def first_task(self) -> Rollouts:
        """Return the trials of one task, the traces of one group, or one pair."""
        from treefx.data import group_by_task

        if self.traces:
            return Rollouts(traces=[trace for trace in self.traces if trace.group == self.traces[0].group])
        if self.pairs:
            return Rollouts(pairs=self.pairs[:1])
        return Rollouts(conversations=next(iter(group_by_task(self.conversations).values())))


def check_tokenizer(name: str) -> None:
    """Raise unless an option names a tokenizer of ours, or a folder."""
    if not Path(name).is_dir() and name not in ("bpe", "bytes"):
        raise InputError(f"--tokenizer must be 'bpe', 'bytes' or a folder, and there is no folder {name!r}")


def make_encoder(conversations: Sequence[Conversation], name: str, vocab_size: int) -> Tokenizer | ChatTokenizer:
    """Return a tokenizer of ours, trained on the text at hand, or that of a folder."""
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


def _spoken(*parts: Text) -> Conversation:
    """Return texts as messages of a user."""
    from treefx.data import Conversation, Message

    said = [(Message("user", part),) if isinstance(part, str) else part for part in parts]
    return Conversation("", 0, tuple(message for messages in said for message in messages))
