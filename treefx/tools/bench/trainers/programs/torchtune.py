"""Provide a torchtune recipe's components: a random Qwen2, rows of chats, a log.

The recipe is torchtune's own (``tune run full_finetune_single_device``), with its loss and its collation; nothing is
downloaded, and nothing is saved.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset
from torchtune.models.qwen2 import qwen2

import treefx
from treefx.errors import InputError
from treefx.integrations.metrics import metrics_of
from treefx.tools.bench.trainers.programs.chats import read_documents
from treefx.tools.bench.trainers.programs.log import write_log

__all__ = ["Chats", "Ids", "Log", "NewWeights", "decoder"]

_made: list[Any] = []
"""The decoder of this process, for the log: a recipe hands it to no component."""


def decoder(folder: str) -> Any:
    """A Qwen2 as deep, as wide and with as many tokens as the model in a folder."""
    sizes = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    made: Any = qwen2(
        vocab_size=sizes["vocab_size"], num_layers=sizes["num_hidden_layers"], embed_dim=sizes["hidden_size"],
        num_heads=sizes["num_attention_heads"], num_kv_heads=sizes["num_key_value_heads"],
        intermediate_dim=sizes["intermediate_size"], max_seq_len=sizes["max_position_embeddings"],
    )  # fmt: skip
    _made[:] = [made]
    return made


class NewWeights:
    """A checkpointer: random weights, the same ones in every run; it saves nothing."""

    def __init__(self, folder: str, **settings: Any) -> None:
        self._folder = folder

    def load_checkpoint(self) -> dict[str, Any]:
        """The state of a new decoder."""
        torch.manual_seed(7)
        return {"model": decoder(self._folder).state_dict()}

    def save_checkpoint(self, *state: Any, **options: Any) -> None:
        """The recipe ends with this."""


class Ids:
    """A tokenizer, as far as a recipe and `Chats` ask one."""

    pad_id = 0

    def __init__(self, folder: str) -> None:
        core: Any = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        template = jinja2.Template((Path(folder) / "chat_template.jinja").read_text(encoding="utf-8"))
        self.encode = lambda text: core.encode(text).ids
        self.write = lambda messages, **options: template.render(messages=messages, **options)


class Chats(Dataset[dict[str, list[int]]]):
    """A dataset: rows in their order, in the form that torchtune's own datasets have."""

    def __init__(self, tokenizer: Ids, path: str) -> None:
        self._rows = read_documents(Path(path), tokenizer.write, tokenizer.encode)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        ids, labels = self._rows[number]
        return {"tokens": ids, "labels": labels}

    def __len__(self) -> int:
        return len(self._rows)


class Log:
    """A metric logger."""

    def __init__(self, folder: str) -> None:
        self._folder, self._entries = Path(folder), list[dict[str, float]]()

    def log_config(self, config: Any) -> None:
        """The recipe begins with this."""

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """One optimizer step."""
        try:
            ours = metrics_of(treefx.inspect(_made[0]).stats)
        except InputError:  # not compiled, or by another
            ours = {}
        self._entries.append({name: float(payload[name]) for name in ("loss", "grad_norm")} | ours)
        write_log(self._folder, self._entries)

    def close(self) -> None:
        """The recipe ends."""
