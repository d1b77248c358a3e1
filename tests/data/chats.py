"""Tokenizers trained on the spot with chat templates of the kinds that exist, and conversations for them."""

import copy
import functools
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelPlaces
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from treefx.data import Conversation, Message, ToolCall

__all__ = ["CHAT", "TEMPLATES", "chatml", "conversations", "make_engine"]

_LOOP = "{% for m in messages %}"
_BODY = "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"
_THINKING = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chatml(body: str, ask: str = _ASK) -> str:
    return _TOOLS + _LOOP + "<|im_start|>{{ m.role }}\n" + body + "<|im_end|>\n{% endfor %}" + ask


TEMPLATES = {
    "chatml": chatml(_BODY),
    "marked": _LOOP
    + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    + _BODY
    + "<|im_end|>"
    + "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    + _ASK,
    # Thinking is written for the last message only, as in the templates of Qwen3 and DeepSeek.
    "thinking": chatml(_THINKING + _BODY),
    # The generation header holds an empty thought, which a written answer does not.
    "no_think": chatml(
        _BODY, "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    ),
    # No special tokens: tokens reach over the borders of messages.
    "plain": _LOOP + "{{ m.role }}: " + _BODY + " {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    # Something stands behind the last message, whatever it is.
    "ended": chatml(_BODY, _ASK + "{% if not add_generation_prompt %}<end>{% endif %}"),
    "strict": "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + chatml(_BODY),
}

CHAT = Conversation(
    "t",
    0,
    (
        Message("system", "be brief"),
        Message("user", "what time is it?"),
        Message("assistant", "let me see", (ToolCall("clock", '{"zone": "UTC"}'),), reasoning="a clock would help"),
        Message("tool", "12:00", name="clock"),
        Message("assistant", "it is noon", reasoning="12:00 is noon"),
        Message("user", "thanks"),
        Message("assistant", "bye"),
    ),
)


@functools.cache
def _backend() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    # Without a pattern, tokens reach over spaces, as those of sentencepiece may.
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    texts = ["user: what time is it? assistant: it is noon user: thanks assistant: bye "] * 3
    texts += ["<|im_start|>assistant\nlet me see<|im_end|>\n<|im_start|>user\nthanks", "good morning and good night "]
    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def make_engine(template: str, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with the chat template of this name.

    With `trim_offsets` it says of every token where it stands without the white space around it, as many models' do.
    """
    backend = copy.deepcopy(_backend())
    if trim_offsets:
        backend.post_processor = ByteLevelPlaces(trim_offsets=True)
    engine = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    engine.chat_template = TEMPLATES[template]
    return engine


_WORDS = st.sampled_from(["it is", " noon", "good ", "night", "assistant: ", "", "bye ", "ü", "user"])
_TEXT = st.lists(_WORDS, max_size=3).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[Conversation]:
    """Trials of one task that begin alike, go apart anywhere, and end anywhere behind a message of the assistant."""
    trials: list[Conversation] = []
    for trial in range(draw(st.integers(1, 4))):
        messages: list[Message] = [Message("system", "be brief"), Message("user", draw(_TEXT))]
        if trials:
            messages = list(trials[draw(st.integers(0, len(trials) - 1))].messages)
            messages = messages[: draw(st.integers(1, len(messages)))]
        while messages[-1].role != "assistant" or draw(st.booleans()):
            role: Any = "user" if messages[-1].role in ("assistant", "system") else "assistant"
            thought = draw(_TEXT) if role == "assistant" else ""
            messages.append(Message(role, draw(_TEXT), reasoning=thought))
        trials.append(Conversation("t", trial, tuple(messages)))
    return trials
