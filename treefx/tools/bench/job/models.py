"""Make small transformers models from an architecture's name or a configuration file."""

import difflib
import functools
import importlib
import importlib.resources
import json
from pathlib import Path
from typing import Any

import torch

from treefx.documents import Field, read_document
from treefx.errors import InputError, shorten
from treefx.output import notes

__all__ = [
    "close_matches",
    "make_config",
    "make_model",
    "read_configurations",
    "require_backend",
    "require_transformers",
]


@functools.cache
def read_configurations() -> dict[str, Any]:
    """Read ``zoo.json``, the one table of small configurations.

    Returns:
        ``common`` fields, and under ``models`` the ``overrides`` and ``drop`` of each architecture.
    """
    text = importlib.resources.files("treefx.tools.bench.zoo").joinpath("zoo.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def close_matches(name: str, known: Any, otherwise: str) -> str:
    """Name up to three known names close to a mistyped one, or ``otherwise``."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


_CODE = {
    "auto_map": "the architecture's code is that of transformers, none is fetched",
    "trust_remote_code": "no code is fetched",
    "use_kernels": "no kernels are fetched",
    "kernel_config": "no kernels are fetched",
}
"""Fields of a configuration by which code would be fetched -> the replacement."""
_BUILT_IN = {"attention": ("eager", "sdpa", "flex_attention"), "experts": ("eager", "batched_mm", "grouped_mm")}


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


def require_backend(name: str) -> None:
    """Check the name of a ``torch.compile`` backend.

    Raises:
        InputError: There is no such backend.
    """
    known = ["none", *torch._dynamo.list_backends(exclude_tags=())]
    if name not in known:
        raise InputError(
            f"expected a backend of torch.compile, or none for eager execution; got {name!r}; "
            f"{close_matches(name, known, 'known: ' + ', '.join(known))}"
        )


def make_config(
    model: str,
    *,
    vocab_size: int,
    hidden_size: int | None = None,
    layers: int | None = None,
    max_positions: int = 4096,
) -> Any:
    """Make a transformers configuration.

    Args:
        model: An architecture such as ``llama`` or ``qwen3``, made small by ``zoo.json`` and the other arguments, or
            another shape of it there, such as ``nemotron_h:groups``; or the path of a ``config.json``, used unchanged
            but for a vocabulary raised to ``vocab_size`` where it is smaller.
        vocab_size: Number of token ids.
        hidden_size: Width, a multiple of 64 (heads of 32; two query heads per key head). Default: that of ``zoo.json``
            with its heads.
        layers: Number of blocks. Default: that of ``zoo.json``.
        max_positions: Longest row.

    Raises:
        InputError: transformers is missing or too old for the architecture, the sizes contradict each other, or the
            file is no configuration.
    """
    transformers = require_transformers()
    if model.endswith(".json") or Path(model).is_file():
        fields = _read_config(Path(model))
        fields["vocab_size"] = max(fields.get("vocab_size", 0), vocab_size)
        fields |= {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    else:
        fields = _small_fields(model, hidden_size, layers, max_positions) | {"vocab_size": vocab_size}
    kind = str(fields.pop("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        hint = close_matches(kind, transformers.CONFIG_MAPPING, "try llama, qwen3 or gpt2")
        raise InputError(
            f"model must be an architecture that transformers {transformers.__version__} knows or the path of a "
            f"config.json, got {kind!r}{_origin(model, kind)}; {hint}"
        )
    try:
        return transformers.AutoConfig.for_model(kind, **fields)
    except Exception as error:  # validators raise errors of huggingface_hub
        raise InputError(f"{model} is no configuration of {kind}: {shorten(_last_line(error), 400)}") from error


def _origin(model: str, kind: str) -> str:
    return f" in {model}" if model.endswith(".json") else ""


def _small_fields(model: str, hidden_size: int | None, layers: int | None, max_positions: int) -> dict[str, Any]:
    """The fields of ``zoo.json`` for an architecture, at other sizes where these are given."""
    table = read_configurations()
    common, entry = table["common"], table["models"].get(model, {})
    sizes: dict[str, Any] = {"max_position_embeddings": max_positions}
    if hidden_size is not None:
        sizes |= _width(hidden_size)
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    mapping, kind = require_transformers().CONFIG_MAPPING, model.partition(":")[0]
    aliases = getattr(mapping[kind], "attribute_map", {}) if kind in mapping else {}
    stated = {aliases.get(name) for name in sizes}
    same_as = ("max_position_embeddings", "hidden_size")
    scaled = {common[name]: sizes[name] for name in same_as if name in sizes}
    fields = {name: value for name, value in (common | sizes).items() if name not in entry.get("drop", ())}
    for name, value in entry.get("overrides", {}).items():
        if name in stated:
            continue
        if isinstance(value, int) and value in scaled:
            value = scaled[value]
        elif layers is not None and isinstance(value, list) and len(value) == common["num_hidden_layers"]:
            value = (value * layers)[:layers]  # one entry per layer
        fields[name] = value
    return {"model_type": kind, **fields}


def _width(hidden_size: int) -> dict[str, int]:
    if hidden_size < 64 or hidden_size % 64:
        raise InputError(f"hidden_size must be a positive multiple of 64, got {hidden_size}")
    heads = hidden_size // 32
    return {
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 8 // 3 // 32 * 32,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
    }


def _last_line(error: Exception) -> str:
    """The last line of a library's error: the lines before it name the validator."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def make_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Make a causal LM with random weights, on the CPU in training mode; seeded.

    Raises:
        InputError: The architecture has no causal LM.
    """
    transformers = require_transformers()
    torch.manual_seed(seed)
    auto = transformers.AutoModelForCausalLM
    unlisted = getattr(transformers, type(config).__name__.removesuffix("Config") + "ForCausalLM", None)
    if type(config) in auto._model_mapping or unlisted is None:
        make = functools.partial(auto.from_config, config, dtype=dtype)
    else:
        make = functools.partial(unlisted._from_config, config, dtype=dtype)
    try:
        model: torch.nn.Module = make()
    except Exception as error:  # sizes that do not fit each other are found in all kinds of places
        # the message of a ValueError may list every causal LM that transformers has
        cause = str(error).partition("Model type should be one of")[0].strip()
        reason = f"{type(error).__name__}: {shorten(cause, 400)}"
        raise InputError(
            f"transformers makes no causal language model of this {config.model_type}: {reason}"
        ) from error
    return model.train()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        document = read_document(path, "a model configuration with the key 'model_type', as transformers writes it")
    except OSError as error:
        raise InputError(f"cannot read a model configuration from {path}: {error}") from error
    document["model_type"].read(str)
    if "vocab_size" in document.items():
        document["vocab_size"].read(int)
    return {name: _without_code(name, field) for name, field in document.items().items() if _is_kept(name, field)}


def _without_code(name: str, field: Field) -> Any:
    """Return a configuration value without names by which transformers fetches code.

    Raises:
        InputError: it chooses an implementation that is not part of transformers and torch.
    """
    if "_implementation" in name:
        _check_implementation(name, field)
    if isinstance(field.raw, list):
        return [_without_code("", entry) for entry in field.entries()]
    if isinstance(field.raw, dict):
        return {key: _without_code(key, value) for key, value in field.items().items() if _is_kept(key, value)}
    return field.raw


def _is_kept(name: str, field: Field) -> bool:
    if name not in _CODE:
        return True
    notes.print(f"{field.document}: {field.name} is left out: {_CODE[name]}", markup=False, soft_wrap=True)
    return False


def _check_implementation(name: str, field: Field) -> None:
    known = _BUILT_IN["experts" if "experts" in name else "attention"]
    for value in field.items().values() if isinstance(field.raw, dict) else [field]:
        if value.raw is not None and value.raw not in known:
            value.fail(
                f"one of {', '.join(known)}, which are part of transformers (for others it fetches code): "
                "take the line out, or write one of these"
            )
