"""Small models and batches for the hidden blocks of pages."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["batch", "llama", "rollouts"]


def llama(**changes: Any) -> Any:
    """A Llama of one layer, width 32, 512 words."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **changes}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, **sizes))


def batch(rows: int = 4, shared: int = 24, more: int = 8) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` of answers to one prompt."""
    prompt = torch.randint(3, 512, (1, shared)).expand(rows, -1)
    ids = torch.cat([prompt, torch.randint(3, 512, (rows, more))], dim=1)
    labels = ids.clone()
    labels[:, :shared] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def rollouts() -> list[Tensor]:
    """Rows of unequal lengths: a prompt, two tool answers, two answers to each."""
    prompt, tools = torch.randint(3, 512, (24,)), torch.randint(3, 512, (2, 8))
    return [torch.cat([prompt, tools[i // 2], torch.randint(3, 512, (4 + 2 * i,))]) for i in range(4)]
