"""Render a conversation through a chat template: text and tokens of each beginning."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from treefx.data.chat.markers import has_markers, read_marks, show_markers
from treefx.data.chat.messages import Arguments, to_template
from treefx.data.chat.time_limit import run_within
from treefx.data.rows import Tokens, common_length
from treefx.data.trajectories import Message
from treefx.errors import InputError, shorten

__all__ = ["Engine", "RenderedChat", "encode_text"]


class Engine(Protocol):
    """Define the methods that this package needs of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Text, or token ids, of a conversation."""
        ...

    def __call__(self, text: str, **options: Any) -> Any:
        """Token ids of a text, under "input_ids"."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Text of token ids."""
        ...


def encode_text(engine: Engine, text: str) -> tuple[Tokens, Tokens | None]:
    """Encode a text without special tokens, with the character behind which each token ends.

    The ends are None for tokenizers without offsets.

    Raises:
        InputError: the text holds half of a surrogate pair, which a template's own functions may have made.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} of the text to encode is {ascii(text[error.start])}, half of a surrogate pair"
        ) from error
    if not getattr(engine, "is_fast", False):
        return np.asarray(engine(text, add_special_tokens=False)["input_ids"], dtype=np.int64), None
    found = engine(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    return np.asarray(found["input_ids"], dtype=np.int64), offsets[:, 1]


class _Piece(NamedTuple):
    """Hold tokens of a piece of text, their ends in characters, and whether they decode to it."""

    tokens: Tokens
    ends: Tokens | None
    characters: int
    is_kept: bool


def _decode(engine: Engine, tokens: Tokens) -> str:
    return str(engine.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class RenderedChat:
    """Hold beginnings of one conversation: ``count`` messages, with or without a header.

    The header of the agent's next message follows when generation is requested.

    Args:
        engine: the tokenizer.
        messages: the conversation.
        tools: JSON schemas of the tools it was told of.
        options: for ``apply_chat_template``.
        cut_at_turns: whether the text is cut where messages begin and end before it is encoded.
        arguments: of calls: "object" or "text".
        seconds: most time that the template may take for one text; None: any.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        options: dict[str, Any],
        cut_at_turns: bool,
        arguments: Arguments = "object",
        seconds: float | None = None,
    ) -> None:
        self.messages = messages
        self._engine, self._cut, self._seconds = engine, cut_at_turns, seconds
        self._entries = [to_template(message, arguments) for message in messages]
        # Some templates write a heading for an empty list of tools.
        self._options = options | {"tools": list(tools) or None}
        self._texts: dict[tuple[int, bool], str] = {}
        self._tokens: dict[tuple[int, bool], Tokens] = {}
        self._ends: dict[tuple[int, bool], Tokens] = {}
        self._pieces: dict[str, _Piece] = {}

    def text(self, count: int, ask: bool = False) -> str:
        """Return the text of the first messages.

        With ``ask``, the header of the agent's next message follows.

        Raises:
            InputError: the template refuses them.
        """
        if (count, ask) not in self._texts:
            self._texts[count, ask] = str(self._apply(self._entries[:count], tokenize=False, add_generation_prompt=ask))
        return self._texts[count, ask]

    def tokens(self, count: int, ask: bool = False) -> Tokens:
        """Token ids of `text`.

        Raises:
            InputError: the template refuses the messages, or pieces of the text do not encode to the whole's text.
        """
        if (count, ask) not in self._tokens:
            self._tokens[count, ask] = self._encode(count, ask)
        return self._tokens[count, ask]

    def marked(self, count: int) -> npt.NDArray[np.bool_] | None:
        """Return bool [T]: the tokens inside of `{% generation %}` markers; None without markers.

        Raises:
            InputError: the tokenizer cannot tell.
        """
        template = self._template()
        if not has_markers(template):
            return None
        tokens, text = self.tokens(count), self.text(count)
        ends = self._ends.get((count, False))
        if ends is None:
            raise InputError(
                "the template marks the assistant's text by {% generation %}, and only a fast tokenizer can map it to"
                " tokens: take one, or ChatTokenizer(..., markers=False)"
            )
        shown = str(self._apply(self._entries[:count], tokenize=False, chat_template=show_markers(template)))
        mask = np.zeros(len(tokens), dtype=np.bool_)
        for start, stop in read_marks(shown, text):
            first, last = np.searchsorted(ends, (start, stop), side="right")
            mask[first:last] = True
        return mask

    def span(self, at: int, count: int) -> tuple[int, int]:
        """Return the tokens [start, stop) of assistant message ``at`` in the row of ``count``.

        It begins where the row's text leaves that of the prompt, which is the messages before with the header behind
        them. A token that reaches over the beginning is the message's, one that reaches over its end is not.

        Raises:
            InputError: the template writes something else for the messages up to it when others follow, or leaves out
                its content.
        """
        if at == 0:
            raise InputError(
                "a conversation must not begin with the assistant: nothing says where the header of its message ends; "
                "put a system or user message before it"
            )
        row, begun = self.text(count), self.text(at + 1)
        if not row.startswith(begun):
            raise InputError(
                f"the chat template writes messages 0 to {at} differently when others follow (it drops thinking, or "
                "treats the last message in a special way), so that one row cannot train both as they were seen: use "
                "the form 'turns' or 'merged', with one row per way of writing"
            )
        start = common_length(self.text(at, ask=True), row)
        if start < self._end_of(at - 1, count):
            raise InputError(
                f"the chat template writes messages 0 to {at - 1} differently when the agent is asked to answer them, "
                "so that its answer does not follow the prompt that it saw: mend the template"
            )
        self._check_written(at)
        return self._token_at(start, count, (at, True)), self._token_at(len(begun), count, (at + 1, False))

    def _end_of(self, at: int, count: int) -> int:
        """A character of the row near the end of message ``at``, behind the middle of its content.

        The row is written again with a letter more there: behind it, both are the same.
        """
        content = self._entries[at]["content"]
        row, middle = self.text(count), len(content) // 2
        again = self._with(at, count, content=f"{content[:middle]}x{content[middle:]}")
        if again == row and content.strip():
            raise InputError(f"the chat template leaves out the content of message {at} ({self.messages[at].role})")
        return len(row) - common_length(row[::-1], again[::-1])

    def _check_written(self, at: int) -> None:
        """Refuse a template that leaves out the assistant's content or calls."""
        entry, row = self._entries[at], self.text(at + 1)
        if entry["content"].strip() and self._with(at, at + 1, content=entry["content"] + "x") == row:
            raise InputError(
                f"the chat template leaves out the content of message {at} (assistant), so the model would not learn "
                "to say it: fix the template"
            )
        calls = entry.get("tool_calls", [])
        renamed = [{**call, "function": {**call["function"], "name": "x"}} for call in calls]
        if calls and self._with(at, at + 1, tool_calls=renamed) == row:
            raise InputError(
                f"the chat template leaves out the tool calls of message {at}: take a template that writes them, or "
                "leave such conversations out"
            )

    def _with(self, at: int, count: int, **changes: Any) -> str:
        """The text of the first messages with one of them changed."""
        entries = [*self._entries[:at], {**self._entries[at], **changes}, *self._entries[at + 1 : count]]
        return str(self._apply(entries, tokenize=False))

    def _token_at(self, character: int, count: int, beginning: tuple[int, bool]) -> int:
        """Return the first token of a row that reaches over a character.

        Without offsets, the first token that differs from the beginning's.
        """
        tokens = self.tokens(count)
        ends = self._ends.get((count, False))
        if ends is None:
            return common_length(self.tokens(*beginning), tokens)
        return int(np.searchsorted(ends, character, side="right"))

    def _encode(self, count: int, ask: bool) -> Tokens:
        text = self.text(count, ask)
        pieces = [self._encode_piece(piece) for piece in self._cut_text(count, text)]
        tokens = np.concatenate([piece.tokens for piece in pieces])
        if not all(piece.is_kept for piece in pieces):
            whole, _ = encode_text(self._engine, text)
            if _decode(self._engine, tokens) != _decode(self._engine, whole):
                raise InputError(
                    "cut_at_turns=True needs a tokenizer that encodes pieces like the whole text, but this one adds or "
                    "drops something where a text begins (such as a space): leave it at False"
                )
        ends = [piece.ends for piece in pieces if piece.ends is not None]
        if len(ends) == len(pieces):
            starts = np.cumsum([0, *(piece.characters for piece in pieces)])
            self._ends[count, ask] = np.concatenate([start + found for start, found in zip(starts, ends, strict=False)])
        return tokens

    def _cut_text(self, count: int, text: str) -> list[str]:
        """The text in one piece, or cut wherever a message begins, ends, or has its header end."""
        if not self._cut:
            return [text]
        begun = [self.text(n, ask) for n in range(1, count + 1) for ask in (False, True)]
        cuts = sorted({0, len(text), *(len(each) for each in begun if text.startswith(each))})
        return [text[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)] or [text]

    def _encode_piece(self, text: str) -> "_Piece":
        if not self._cut:
            return _Piece(*encode_text(self._engine, text), len(text), True)
        if text not in self._pieces:
            tokens, ends = encode_text(self._engine, text)
            self._pieces[text] = _Piece(tokens, ends, len(text), _decode(self._engine, tokens) == text)
        return self._pieces[text]

    def _template(self) -> str:
        given = self._options.get("chat_template")
        if hasattr(self._engine, "get_chat_template"):
            return str(self._engine.get_chat_template(given, self._options["tools"]))
        return str(given or getattr(self._engine, "chat_template", ""))

    def _apply(self, entries: list[dict[str, Any]], **how: Any) -> Any:
        options = {**self._options, **how}
        try:
            return run_within(self._seconds, lambda: self._engine.apply_chat_template(entries, **options))
        except TimeoutError as error:
            raise InputError(
                f"the chat template did not end for messages 0 to {len(entries) - 1} ({error}): mend its loops, or "
                "give it more time by ChatTokenizer(..., template_seconds=)"
            ) from error
        except Exception as error:  # templates raise anything
            said = shorten(str(error), 400)
            hint = "; if it joins the arguments of calls as text, arguments='text' helps" if "str" in said else ""
            raise InputError(f"the chat template refused messages 0 to {len(entries) - 1}: {said}{hint}") from error
