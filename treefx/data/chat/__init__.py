"""Chat templates of Hugging Face tokenizers: conversations in, rows of token ids and their masks out.

The tokenizer is an object that is handed in; nothing here imports transformers. ``messages`` writes messages as
templates read them, ``markers`` finds what a template marks, ``time_limit`` bounds the time that a template takes,
``rendering`` is one conversation through a template,
``chat_tokenizer`` makes rows of it, and ``drift`` finds where tokens of equal texts differ.
"""

from treefx.data.chat.chat_tokenizer import ChatTokenizer
from treefx.data.chat.rendering import Engine

__all__ = ["ChatTokenizer", "Engine"]
