"""Apply chat templates of Hugging Face tokenizers: conversations to rows and masks.

The tokenizer is an object that is handed in; nothing here imports transformers. ``messages`` converts messages for
templates, ``markers`` finds generation markers, ``time_limit`` bounds the time of a template, ``rendering`` is one
conversation through a template, ``chat_tokenizer`` makes rows of it, and ``drift`` finds where tokens of equal texts
differ.
"""

from treefx.data.chat.chat_tokenizer import ChatTokenizer
from treefx.data.chat.rendering import Engine

__all__ = ["ChatTokenizer", "Engine"]
