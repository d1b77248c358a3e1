"""Find re-tokenisation drift: equal texts with different tokens, which fork rows.

A server encodes a prompt as a whole, samples token ids for the answer, and encodes the answer's text again in the next
prompt. Wherever that gives other tokens than before, two rows of one conversation part although they say the same. The
kinds, each with the first token that differs:

========  ==============================================================================================================
border    prompt and answer encoded together are not the prompt's tokens and the answer's: some reach over the border
history   a turn's row does not begin with the tokens of the row of the turn before, although its text begins with its
          text
template  the text differs: the template writes earlier messages differently when others follow, or
          writes another header for generation than in front of an answer
recorded  the token ids recorded for an answer are not those of its text
========  ==============================================================================================================

Remedies: *recorded* ids were sampled, and rows keep them (`ChatTokenizer(recorded=True)`); *border* and
*history* vanish with ``cut_at_turns=True``, at the price of tokens that a server never sees if it encodes whole texts;
*template* drift is real: the model will see the same texts, so these forks are right.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from treefx.data.chat.chat_tokenizer import ChatTokenizer
from treefx.data.chat.rendering import Engine, RenderedChat, encode_text
from treefx.data.rows import Tokens, common_length
from treefx.data.trajectories import Conversation

__all__ = ["Drift", "DriftReport", "find_drift", "find_row_drift"]

Kind = Literal["border", "history", "template", "recorded"]
_SHOWN_TOKENS = 8


@dataclass(frozen=True)
class Drift:
    """Hold one place where tokens differ."""

    kind: Kind
    where: str
    """File and line, where known, else task and trial."""
    turn: int
    """Number of the later row's assistant turn, from 0; number of the row, for plain rows."""
    token: int
    """The first token that differs, from 0, in the row."""
    character: int | None
    """Where it begins in the row's text; None where the tokenizer does not tell."""
    expected: str
    """Text of the tokens from there on, some of them, `|` between tokens: alone, before, or recorded."""
    got: str
    """In the row, or encoded again."""
    tokens: int
    """How many of the expected tokens stand from there on."""

    def __str__(self) -> str:
        character = "" if self.character is None else f" (character {self.character})"
        return (
            f"{self.where}, turn {self.turn}, token {self.token}{character}: {self.kind}, "
            f"expected {self.expected}, got {self.got}; {self.tokens} tokens"
        )


@dataclass
class DriftReport:
    """Hold all differences, and the counts of compared rows."""

    rows: int = 0
    tokens: int = 0
    """Tokens of these rows."""
    found: list[Drift] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Places of each kind."""
        counts = Counter(drift.kind for drift in self.found)
        return {kind: counts[kind] for kind in ("border", "history", "template", "recorded")}

    @property
    def unshared_tokens(self) -> int:
        """Count tokens of earlier rows that the next row spells differently.

        The kinds are history and recorded.
        """
        return sum(drift.tokens for drift in self.found if drift.kind in ("history", "recorded"))

    def to_dict(self) -> dict[str, Any]:
        """Counts, and every place, for JSON."""
        totals = {"rows": self.rows, "tokens": self.tokens, "unshared_tokens": self.unshared_tokens}
        return totals | self.counts | {"places": [asdict(drift) for drift in self.found]}

    def summary(self, places: int = 5) -> str:
        """Counts, and the first places of each kind."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        lines = [f"{self.rows:,} rows of {self.tokens:,} tokens: {counts}; {self.unshared_tokens:,} tokens not shared"]
        for kind in self.counts:
            lines += [f"  {drift}" for drift in [each for each in self.found if each.kind == kind][:places]]
        return "\n".join(lines)


def find_drift(conversations: Iterable[Conversation], tokenizer: ChatTokenizer | Engine) -> DriftReport:
    """Compare the rows of every conversation's turns with each other.

    Rows are also compared with their parts and with recorded ids.

    Args:
        conversations: as they were loaded.
        tokenizer: a `ChatTokenizer`, or a tokenizer of transformers.

    Returns:
        All differences, and the numbers of compared rows and tokens.

    Raises:
        InputError: the chat template refuses a conversation.
    """
    encoder = tokenizer if isinstance(tokenizer, ChatTokenizer) else ChatTokenizer(tokenizer)
    report = DriftReport()
    for conversation in conversations:
        chat = encoder.render(conversation.messages, conversation.tools, conversation.template_options)
        turns = [at for at, each in enumerate(chat.messages) if each.role == "assistant" and at]
        report.rows += len(turns)
        report.tokens += sum(len(chat.tokens(at + 1)) for at in turns)
        where = str(conversation.place or f"task {conversation.task}, trial {conversation.trial}")
        report.found += _Finder(encoder.engine, chat, where).find(turns)
    return report


def find_row_drift(rows: Iterable[Sequence[int] | Tokens], engine: Engine, where: str = "rows") -> DriftReport:
    """Compare rows of token ids with the re-encoded text of each.

    Args:
        rows: token ids of each row, [T]; such as sampled ones.
        engine: a tokenizer of transformers, or any object with ``decode`` and ``__call__`` like it.
        where: name of the rows in the report.

    Returns:
        All differences, and the numbers of compared rows and tokens.
    """
    report = DriftReport()
    for number, row in enumerate(rows):
        ids = np.asarray(row, dtype=np.int64)
        text = str(engine.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        report.rows, report.tokens = report.rows + 1, report.tokens + len(ids)
        drift = _compare(engine, "recorded", where, number, ids, encode_text(engine, text)[0], text)
        report.found += [drift] if drift else []
    return report


@dataclass(frozen=True)
class _Finder:
    """The comparisons of one conversation."""

    engine: Engine
    chat: RenderedChat
    where: str

    def find(self, turns: Sequence[int]) -> Iterator[Drift]:
        """All differences, ``turns`` being the numbers of the assistant's messages."""
        for turn, at in enumerate(turns):
            found = [self._border(turn, at), self._recorded(turn, at)]
            if turn:
                found.append(self._history(turn, turns[turn - 1], at))
            yield from (drift for drift in found if drift)

    def _border(self, turn: int, at: int) -> Drift | None:
        """The turn's row against the prompt's tokens with those of the answer's text behind them."""
        prompt, text = self.chat.tokens(at, ask=True), self.chat.text(at + 1)
        asked = self.chat.text(at, ask=True)
        if not text.startswith(asked):
            return self._compare("template", turn, at, prompt)
        answer, _ = encode_text(self.engine, text[len(asked) :])
        return self._compare("border", turn, at, np.concatenate([prompt, answer]))

    def _history(self, turn: int, before: int, at: int) -> Drift | None:
        """The turn's row against the row of the turn before."""
        same_text = self.chat.text(at + 1).startswith(self.chat.text(before + 1))
        kind: Kind = "history" if same_text else "template"
        return self._compare(kind, turn, at, self.chat.tokens(before + 1))

    def _recorded(self, turn: int, at: int) -> Drift | None:
        ids = self.chat.messages[at].token_ids
        if ids is None:
            return None
        prompt = self.chat.tokens(at, ask=True)
        # Text of the template behind the end of the turn was not sampled.
        return self._compare("recorded", turn, at, np.concatenate([prompt, np.asarray(ids)]))

    def _compare(self, kind: Kind, turn: int, at: int, expected: Tokens) -> Drift | None:
        row, text = self.chat.tokens(at + 1), self.chat.text(at + 1)
        return _compare(self.engine, kind, self.where, turn, expected, row, text)


def _compare(
    engine: Engine, kind: Kind, where: str, turn: int, expected: Tokens, got: Tokens, text: str
) -> Drift | None:
    """Return the first difference; `got` may be longer than `expected`."""
    same = common_length(expected, got)
    if same == len(expected):
        return None
    return Drift(
        kind,
        where,
        turn,
        same,
        _character(engine, text, got, same),
        _show(engine, expected[same:]),
        _show(engine, got[same:]),
        len(expected) - same,
    )


def _character(engine: Engine, text: str, tokens: Tokens, at: int) -> int | None:
    if not getattr(engine, "is_fast", False):
        return None
    found = engine(text, add_special_tokens=False, return_offsets_mapping=True)
    if at >= len(tokens) or not np.array_equal(found["input_ids"], tokens):
        return len(text) if at >= len(tokens) else None
    return int(found["offset_mapping"][at][0])


def _show(engine: Engine, tokens: npt.NDArray[np.int64]) -> str:
    """The first of these tokens' texts."""
    if not len(tokens):
        return "nothing"
    shown = [str(engine.decode([token], skip_special_tokens=False)) for token in tokens[:_SHOWN_TOKENS].tolist()]
    return ascii("|".join(shown)) + ("..." if len(tokens) > _SHOWN_TOKENS else "")
