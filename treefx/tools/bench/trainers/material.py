"""Write the trainers' inputs: a random Qwen3, a tokenizer with a template, and chats."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from treefx.data import Conversation, Message, scripted_conversations
from treefx.errors import InputError
from treefx.tools.bench.job.models import make_config, make_model, require_transformers

__all__ = ["Material", "make_material"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, which the templates of the trainers for Qwen write too."""
_LONGEST = 4096

Chat = list[dict[str, str]]
"""Messages with the keys ``role`` and ``content``."""


@dataclass(frozen=True)
class Material:
    """Where it lies."""

    model: Path
    """A folder with ``config.json``, weights, and the tokenizer."""
    chats: Path
    """JSON Lines, a row each: ``{"messages": [...]}``, ending with the answer to be learned."""
    pairs: Path
    """A JSON list: ``{"messages": [...], "chosen": {...}, "rejected": {...}}``."""


def make_material(folder: Path, *, rows: int, layers: int, hidden_size: int, vocab_size: int = 1024) -> Material:
    """Write model and rows.

    Args:
        folder: Exists and is empty.
        rows: Turns of the assistant in scripted conversations, in their order: eight of them share most of their words.
        layers: Blocks of the model.
        hidden_size: Its width, a multiple of 64.
        vocab_size: Most token ids of the tokenizer, which is trained on the rows.

    Raises:
        InputError: transformers is missing, or there are fewer turns than rows.
    """
    chats = list(_turns(scripted_conversations()))
    if not 1 < rows <= len(chats):
        raise InputError(f"rows must be 2 to {len(chats)}, the turns of the scripted conversations, got {rows}")
    chats = chats[:rows]
    material = Material(folder / "model", folder / "chats.jsonl", folder / "pairs.json")
    tokenizer = _tokenizer(chats, vocab_size)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": hidden_size, "layers": layers}
    config = make_config("qwen3", **sizes, max_positions=_LONGEST)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    config.update({**ids, "bos_token_id": None, "tie_word_embeddings": False})
    model: Any = make_model(config)
    model.save_pretrained(material.model)
    tokenizer.save_pretrained(material.model)
    material.chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    material.pairs.write_text(json.dumps(list(_pairs(chats))), encoding="utf-8")
    return material


def _turns(conversations: Iterable[Conversation]) -> Iterator[Chat]:
    """Yield every answer of the assistant with its past, in roles that all trainers know."""
    for conversation in conversations:
        spoken = [{"role": _role(message), "content": _words(message)} for message in conversation.messages]
        chat = [_joined(role, list(run)) for role, run in groupby(spoken, key=lambda message: message["role"])]
        ends = [end for end, message in enumerate(chat, 1) if message["role"] == "assistant" and end > 1]
        yield from (chat[:end] for end in ends)


def _role(message: Message) -> str:
    return "user" if message.role == "tool" else message.role


def _words(message: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(text for text in (message.content, *calls) if text) or "..."


def _joined(role: str, messages: Sequence[dict[str, str]]) -> dict[str, str]:
    """Trainers ask for roles that take turns."""
    return {"role": role, "content": "\n".join(message["content"] for message in messages)}


def _pairs(chats: Sequence[Chat]) -> Iterator[dict[str, Any]]:
    """The answer of another row is the one that is not preferred."""
    for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True):
        yield {"messages": chat[:-1], "chosen": chat[-1], "rejected": other[-1]}


def _tokenizer(chats: Sequence[Chat], vocab_size: int) -> Any:
    """A byte-level BPE as transformers saves it."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    core: Any = Tokenizer(BPE())
    core.pre_tokenizer, core.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(sorted({message["content"] for chat in chats for message in chat}), trainer)
    make: Any = require_transformers().PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>", model_max_length=_LONGEST
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
