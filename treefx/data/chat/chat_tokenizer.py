"""Rows of conversations by the chat template of any Hugging Face tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.arguments import check_number
from treefx.data.chat.messages import Arguments
from treefx.data.chat.rendering import Engine, RenderedChat
from treefx.data.formats.openai_chat import RESERVED_OPTIONS
from treefx.data.rows import EncodedRow, Tokens, common_length, is_trained
from treefx.data.trajectories import Conversation, Message, Text
from treefx.errors import InputError

__all__ = ["ChatTokenizer"]


class ChatTokenizer:
    """Encode conversations as the model sees them, through its tokenizer's chat template.

    The row of a turn is the template's text of all messages up to it, so the row omits or changes the same parts of
    earlier turns (thinking) as the template, and rows fork there. The assistant's text is trained:

    - the tokens from the first that differs from the prompt's (the messages before, with the generation header) to the
      end of the message in the template's text, with its end-of-turn token and all that follows it;
    - of these, where the template has ``{% generation %}`` markers, those inside of them.

    Every row has its own mask: a trained token of one row is prompt in the next. The number of rows that train a shared
    token is its weight (`Sample.weights`, `treefx.Forest`).

    Args:
        tokenizer: any object with ``apply_chat_template``, ``__call__`` and ``decode`` as transformers' tokenizers
            have them.
        cut_at_turns: encode the text between the borders of messages piece by piece. Then no token reaches over a
            border, and conversations with equal beginnings share all of their tokens; but at inference a server encodes
            the whole text. `treefx.data.find_drift` reports differences.
        markers: whether ``{% generation %}`` markers are read.
        recorded: take a turn's recorded ``token_ids`` instead of encoding its text again.
        arguments: of calls: "object", JSON text read, as transformers documents it; "text", as it was recorded, for
            templates that join it to other text.
        template_seconds: most seconds that the template may take for one text, after which the conversation is refused;
            None sets no limit.
        **options: for ``apply_chat_template``, such as ``chat_template=`` or ``enable_thinking=``. A conversation's
            ``template_options`` override variables of the template.

    Raises:
        InputError: the tokenizer lacks a method, or an argument has a wrong value.

    Example:
        >>> tokenizer = ChatTokenizer(AutoTokenizer.from_pretrained("..."), enable_thinking=False)  # doctest: +SKIP
        >>> samples = make_samples(conversations, tokenizer, "merged")  # doctest: +SKIP
    """

    def __init__(
        self,
        tokenizer: Engine,
        *,
        cut_at_turns: bool = False,
        markers: bool = True,
        recorded: bool = True,
        arguments: Arguments = "object",
        template_seconds: float | None = 10.0,
        **options: Any,
    ) -> None:
        missing = [name for name in ("apply_chat_template", "__call__", "decode") if not hasattr(tokenizer, name)]
        if missing:
            raise InputError(
                f"expected a tokenizer with {', '.join(missing)}, as transformers' are, got {type(tokenizer).__name__}"
            )
        if arguments not in ("object", "text"):
            raise InputError(f"arguments must be 'object' or 'text', got {arguments!r}")
        if template_seconds is not None:
            check_number(template_seconds, "template_seconds", "a number of seconds above 0, or None", above=0)
        self.engine = tokenizer
        self._arguments: Arguments = arguments
        self._cut, self._markers, self._recorded, self._options = cut_at_turns, markers, recorded, options
        self._seconds = template_seconds

    @property
    def pad_id(self) -> int:
        """Token id at padding: the tokenizer's, or its end of sequence; it is masked either way.

        Raises:
            InputError: the tokenizer has neither.
        """
        for name in ("pad_token_id", "eos_token_id"):
            if getattr(self.engine, name, None) is not None:
                return int(getattr(self.engine, name))
        raise InputError("the tokenizer has neither pad_token nor eos_token: set one of them")

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return len(self.engine)  # type: ignore[arg-type]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The conversation through the template, with options in addition to the tokenizer's own.

        Raises:
            InputError: one of these options is an argument of ``apply_chat_template``, or a special token.
        """
        given = template_options or {}
        special = getattr(self.engine, "special_tokens_map", None) or {}
        for name in given:
            if name in RESERVED_OPTIONS or name in special:
                raise InputError(
                    f"template_options are what the template reads, got {name!r}, which the tokenizer has for all "
                    "conversations: give it to ChatTokenizer(tokenizer, ...)"
                )
        options = {**self._options, **given}
        return RenderedChat(self.engine, messages, tools, options, self._cut, self._arguments, self._seconds)

    def turns(self, conversation: Conversation) -> list[EncodedRow]:
        """Return one row per trained assistant message: the messages before, and the message.

        Raises:
            InputError: the template refuses the messages, or merges the message with others.
        """
        chat = self.render(conversation.messages, conversation.tools, conversation.template_options)
        return [
            self._recorded_row(chat, at) if self._recorded and message.token_ids is not None else self._row(chat, at)
            for at, message in enumerate(conversation.messages)
            if is_trained(message)
        ]

    def whole(self, conversation: Conversation) -> EncodedRow:
        """Encode the conversation as one row, every assistant message trained.

        Raises:
            InputError: the template writes a message differently when others follow, or token ids were recorded.
        """
        if self._recorded and any(message.token_ids is not None for message in conversation.messages):
            raise InputError(
                "recorded token_ids are those of one turn each: use the form 'turns' or 'merged', or recorded=False to "
                "encode the text again"
            )
        chat = self.render(conversation.messages, conversation.tools, conversation.template_options)
        return self._chat_row(chat, 0, len(conversation.messages))

    def answers(
        self,
        prompt: Text,
        answers: Sequence[Text],
        tools: Sequence[dict[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> list[EncodedRow]:
        """Return one row per answer, with the prompt in front; the assistant's text is trained.

        All answers begin at the same token, where the first of their rows leaves the tokens of the prompt, so that all
        rows contain the compared tokens. For answers of one message without markers, and for plain text, which ends in
        the tokenizer's ``eos_token``, rows and masks are those of TRL's DPO and KTO trainers.

        Raises:
            InputError: the template refuses the messages or writes one differently when others follow; plain text, and
                the tokenizer has no ``eos_token``.
        """
        if isinstance(prompt, str):
            return self._text_rows(prompt, [str(answer) for answer in answers])
        first = len(prompt)
        chats = [
            self.render((*prompt, *each), tools, template_options) for each in answers if not isinstance(each, str)
        ]
        rows = [self._chat_row(chat, first, len(chat.messages)) for chat in chats]
        begins = min(
            common_length(chat.tokens(first, ask=True), row.tokens) for chat, row in zip(chats, rows, strict=True)
        )
        for chat, row in zip(chats, rows, strict=True):
            if is_trained(chat.messages[first]) and self._marked(chat, len(chat.messages)) is None:
                row.trained[begins : chat.span(first, len(chat.messages))[0]] = True
        return rows

    def _row(self, chat: RenderedChat, at: int) -> EncodedRow:
        return self._chat_row(chat, at, at + 1)

    def _chat_row(self, chat: RenderedChat, first: int, count: int) -> EncodedRow:
        """The row of ``count`` messages, assistant messages from number ``first`` on trained."""
        tokens, marked = chat.tokens(count), self._marked(chat, count)
        trained = np.zeros(len(tokens), dtype=np.bool_)
        for at in range(first, count):
            if is_trained(chat.messages[at]):
                start, stop = chat.span(at, count)
                trained[start:stop] = True if marked is None else marked[start:stop]
                if chat.messages[at].content.strip() and not trained[start:stop].any():
                    raise InputError(
                        f"no token of message {at} (assistant) stands between {{% generation %}} markers, or the "
                        "tokenizer cannot place them: mend the template, or take ChatTokenizer(..., markers=False)"
                    )
        return EncodedRow(tokens, trained)

    def _marked(self, chat: RenderedChat, count: int) -> npt.NDArray[np.bool_] | None:
        return chat.marked(count) if self._markers else None

    def _recorded_row(self, chat: RenderedChat, at: int) -> EncodedRow:
        if at == 0:
            raise InputError("a conversation must not begin with the assistant: its turn follows no prompt")
        prompt = chat.tokens(at, ask=True)
        tokens = np.concatenate([prompt, np.asarray(chat.messages[at].token_ids, dtype=np.int64)])
        return EncodedRow(tokens, np.arange(len(tokens)) >= len(prompt))

    def _text_rows(self, prompt: str, answers: Sequence[str]) -> list[EncodedRow]:
        end = getattr(self.engine, "eos_token", None)
        if end is None:
            raise InputError("plain answers end in the tokenizer's eos_token, but it has none: set it")
        before = self._encode(prompt)
        rows = [self._encode(prompt + answer + ("" if answer.endswith(end) else end)) for answer in answers]
        begins = min(common_length(before, row) for row in rows)
        return [EncodedRow(row, np.arange(len(row)) >= begins) for row in rows]

    def _encode(self, text: str) -> Tokens:
        """Encode with the tokenizer's own additions, such as the token for a text's beginning."""
        return np.asarray(self.engine(text)["input_ids"], dtype=np.int64)
