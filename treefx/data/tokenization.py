"""Tokenizers of our own, so that no vocabulary has to be downloaded.

``train_tokenizer`` learns a byte-level BPE from the text at hand (Sennrich et al. 2016,
https://arxiv.org/abs/1508.07909, on bytes as in GPT-2); ``ByteTokenizer`` needs no training and no library.
Special tokens stand above the text tokens and no text of an agent or a tool ever encodes to one.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.arguments import check_whole
from treefx.errors import InputError

__all__ = ["SPECIAL_TOKENS", "BpeTokenizer", "ByteTokenizer", "Tokenizer", "train_tokenizer"]

SPECIAL_TOKENS = (
    "<pad>",
    "<end>",
    "<system>",
    "<user>",
    "<assistant>",
    "<tool>",
    "<call>",
    "<think>",
    "</think>",
)
_BYTES = 256


class Tokenizer(ABC):
    """Encode text to token ids and back.

    Ids below ``text_size`` are text, above it ``SPECIAL_TOKENS``.
    """

    def __init__(self, text_size: int) -> None:
        self.text_size = text_size
        self.vocab_size = text_size + len(SPECIAL_TOKENS)
        self.pad_id = self.special("<pad>")
        self._encoded: dict[str, npt.NDArray[np.int64]] = {}

    def special(self, name: str) -> int:
        """Id of a special token.

        Raises:
            InputError: There is no special token of that name.
        """
        if name not in SPECIAL_TOKENS:
            raise InputError(f"special token must be one of {', '.join(SPECIAL_TOKENS)}, got {name!r}")
        return self.text_size + SPECIAL_TOKENS.index(name)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Token ids of a text, shape [T]; kept, as the same prompt is asked for many times."""
        if text not in self._encoded:
            ids = np.asarray(self._encode_text(text), dtype=np.int64)
            ids.flags.writeable = False
            self._encoded[text] = ids
        return self._encoded[text]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode token ids to text, with special tokens by their names.

        Raises:
            InputError: An id is not of this vocabulary.
        """
        pieces: list[str] = []
        run: list[int] = []
        for token in (int(token) for token in tokens):
            if not 0 <= token < self.vocab_size:
                raise InputError(f"token ids must be in [0, {self.vocab_size}), got {token}")
            if token < self.text_size:
                run.append(token)
                continue
            pieces += [self._decode_text(run), SPECIAL_TOKENS[token - self.text_size]]
            run = []
        return "".join([*pieces, self._decode_text(run)])

    @abstractmethod
    def _encode_text(self, text: str) -> Sequence[int]: ...

    @abstractmethod
    def _decode_text(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer(Tokenizer):
    """Encode one token per UTF-8 byte: rows are long, and nothing has to be installed."""

    def __init__(self) -> None:
        super().__init__(_BYTES)

    def _encode_text(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def _decode_text(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BpeTokenizer(Tokenizer):
    """Encode text by a trained byte-level BPE; made by ``train_tokenizer``."""

    def __init__(self, engine: Any) -> None:
        super().__init__(int(engine.get_vocab_size()))
        self._engine = engine

    def _encode_text(self, text: str) -> Sequence[int]:
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def _decode_text(self, tokens: Sequence[int]) -> str:
        return str(self._engine.decode(list(tokens), skip_special_tokens=False))


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> BpeTokenizer:
    """Train a byte-level BPE on ``texts``.

    Args:
        texts: Training texts, for example ``Conversation.texts()`` of every conversation.
        vocab_size: Largest number of token ids, special tokens included; little text gives fewer.

    Returns:
        The trained tokenizer.

    Raises:
        InputError: The library ``tokenizers`` is not installed, or ``vocab_size`` has no room for all bytes.
    """
    smallest = _BYTES + len(SPECIAL_TOKENS)
    if check_whole(vocab_size, "vocab_size", least=1) < smallest:
        raise InputError(f"vocab_size must be at least {smallest} (all bytes and the special tokens), got {vocab_size}")
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError as error:
        raise InputError(
            "training a tokenizer needs the library 'tokenizers', which is not installed: "
            "pip install 'treefx[examples]', or use treefx.data.ByteTokenizer()"
        ) from error
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine = library.Tokenizer(library.models.BPE())
    engine.pre_tokenizer = byte_level
    engine.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(sorted(set(texts)), trainer)
    return BpeTokenizer(engine)
