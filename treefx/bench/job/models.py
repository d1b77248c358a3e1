"""Small unmodified transformers models, from the name of an architecture or from a configuration file."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from treefx.errors import InputError

__all__ = ["make_config", "make_model", "require_transformers"]

# Architectures that drop out by default: one random number per row and token is not the same computation as
# one per distinct token.
_WITHOUT_DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "opt": {"dropout": 0.0},
}


def require_transformers() -> Any:
    """The transformers library.

    Raises:
        InputError: It is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            "this needs the library 'transformers', which is not installed: pip install 'treefx[examples]'"
        ) from error


def make_config(
    model: str,
    *,
    vocab_size: int,
    hidden_size: int = 64,
    layers: int = 2,
    max_positions: int = 4096,
) -> Any:
    """A transformers configuration.

    Args:
        model: An architecture such as ``llama`` or ``qwen3``, made small by the other arguments; or the path of
            a ``config.json``, taken as it is, only its vocabulary raised to ``vocab_size`` where it is smaller.
        vocab_size: Number of token ids.
        hidden_size: Width, a multiple of 32 (heads of 32; two query heads per key head).
        layers: Number of blocks.
        max_positions: Longest row.

    Raises:
        InputError: transformers is missing or too old for the architecture, or the file is no configuration.
    """
    transformers = require_transformers()
    if model.endswith(".json") or Path(model).is_file():
        fields = _read_config(Path(model))
        fields["vocab_size"] = max(int(fields.get("vocab_size", 0)), vocab_size)
    else:
        if hidden_size < 64 or hidden_size % 64:
            raise InputError(f"hidden_size must be a positive multiple of 64, got {hidden_size}")
        heads = hidden_size // 32
        fields = {
            "model_type": model,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size * 8 // 3 // 32 * 32,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": 32,
            "max_position_embeddings": max_positions,
            **_WITHOUT_DROPOUT.get(model, {}),
        }
    # Ids of special tokens default to places in the vocabulary of the released model.
    fields |= {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    try:
        return transformers.AutoConfig.for_model(**fields)
    except (ValueError, KeyError) as error:
        raise InputError(
            f"model must be an architecture that transformers {transformers.__version__} knows, "
            f"such as llama, qwen3, gemma2 or gpt2, or the path of a config.json; got {model!r} ({error})"
        ) from error


def make_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A causal LM with random weights, on the CPU and in training mode; the same seed gives the same weights.

    Raises:
        InputError: The architecture has no causal LM.
    """
    transformers = require_transformers()
    torch.manual_seed(seed)
    try:
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise InputError(f"{config.model_type} is not a causal language model: {error}") from error
    return model.train()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read a model configuration from {path}: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InputError(f"{path} must hold a JSON object with the key 'model_type', as transformers writes it")
    return fields
