"""Write the trainers' smallest recipes: configuration files and command lines."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treefx.tools.bench.trainers.loops import lightning, ray_train, torchtitan, torchtune, verl
from treefx.tools.bench.trainers.material import Material

__all__ = ["RECIPES", "Recipe"]

Write = Callable[[Material, Path, bool], list[str]]
"""Writes the command's inputs into an empty folder; with True, the trainer itself calls torch.compile.

Returns the command; its program lies in the trainer's environment. ``output`` in that folder gets the states.
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train with one trainer."""

    name: str
    requirements: tuple[str, ...]
    """What pip installs; the versions it was written for."""
    write: Write
    compiles: bool = True
    """Whether the trainer has a switch for torch.compile."""
    by_switch: bool = False
    """Whether treefx, too, needs that switch: it replaces the trainer's compiler."""
    left_out: tuple[str, ...] = ()
    """Packages that the trainer brings and that need a CUDA build of torch: taken out where there is none."""
    empty: tuple[str, ...] = ()
    """Of those, modules that the trainer imports without use: they are there and empty."""


def _json_lines(values: dict[str, Any]) -> str:
    """JSON is YAML."""
    return json.dumps(values, indent=1)


_EVERYWHERE: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-4,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "save_strategy": "epoch",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "seed": 7,
}
"""Arguments of transformers' trainer; a saved state holds the log of every step."""


def _llama_factory(material: Material, folder: Path, compiled: bool, stage: str) -> list[str]:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    shape: dict[str, Any] = {"formatting": "sharegpt", "tags": {**tags, "system_tag": "system"}}
    columns = {"messages": "messages"}
    data = {
        "sft": {"file_name": str(material.chats), "columns": columns, **shape},
        "dpo": {
            "file_name": str(material.pairs),
            "ranking": True,
            "columns": {**columns, "chosen": "chosen", "rejected": "rejected"},
            **shape,
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps(data), encoding="utf-8")
    recipe = {
        **_EVERYWHERE,
        "model_name_or_path": str(material.model),
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        "dataset": stage,
        "dataset_dir": str(folder),
        "template": "qwen",
        "cutoff_len": 4096,
        "disable_shuffling": True,
        "output_dir": str(folder / "output"),
        "torch_compile": compiled,
    }
    (folder / "recipe.yaml").write_text(_json_lines(recipe), encoding="utf-8")
    return ["llamafactory-cli", "train", str(folder / "recipe.yaml")]


def _llama_factory_sft(material: Material, folder: Path, compiled: bool) -> list[str]:
    return _llama_factory(material, folder, compiled, "sft")


def _llama_factory_dpo(material: Material, folder: Path, compiled: bool) -> list[str]:
    return _llama_factory(material, folder, compiled, "dpo")


def _ms_swift(material: Material, folder: Path, compiled: bool) -> list[str]:
    options = {
        **_EVERYWHERE,
        "model": material.model,
        "model_type": "qwen3",
        "template": "qwen3",
        "tuner_type": "full",
        "dataset": material.chats,
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "split_dataset_ratio": 0,
        "max_length": 4096,
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "use_hf": True,
        "add_version": False,
        # Its own patch makes checkpoints reentrant, which torch.compile does not trace, whatever the backend.
        "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
        "output_dir": folder / "output",
        "torch_compile": compiled,
    }
    given = [
        (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)) for name, value in options.items()
    ]
    return ["swift", "sft", *(word for pair in given for word in pair)]


def _axolotl(material: Material, folder: Path, compiled: bool, packing: bool) -> list[str]:
    dataset = {"path": str(material.chats), "ds_type": "json", "type": "chat_template", "roles_to_train": ["assistant"]}
    recipe = {
        "base_model": str(material.model),
        "datasets": [{**dataset, "field_messages": "messages", "train_on_eos": "turn"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "chat_template": "tokenizer_default",
        "sequence_len": 4096,
        "sample_packing": packing,
        "pad_to_sequence_len": False,
        "curriculum_sampling": True,
        "shuffle_merged_datasets": False,
        "micro_batch_size": 1 if packing else 4,
        "gradient_accumulation_steps": 2,
        "num_epochs": 1,
        "learning_rate": 1e-4,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": True,
        "attn_implementation": "sdpa",
        "logging_steps": 1,
        "save_strategy": "epoch",
        "use_cpu": True,
        "seed": 7,
        "output_dir": str(folder / "output"),
        "torch_compile": compiled,
    }
    (folder / "recipe.yaml").write_text(_json_lines(recipe), encoding="utf-8")
    return ["axolotl", "train", str(folder / "recipe.yaml"), "--launcher", "python"]


def _axolotl_padded(material: Material, folder: Path, compiled: bool) -> list[str]:
    return _axolotl(material, folder, compiled, packing=False)


def _axolotl_packed(material: Material, folder: Path, compiled: bool) -> list[str]:
    return _axolotl(material, folder, compiled, packing=True)


_CUDA_ONLY = ("torchvision", "torchaudio")
_LLAMA_FACTORY: dict[str, Any] = {
    "requirements": ("llamafactory==0.9.5",),
    "left_out": _CUDA_ONLY,
    "empty": ("torchaudio",),
}
_AXOLOTL: dict[str, Any] = {"requirements": ("axolotl==0.19.0",), "left_out": _CUDA_ONLY}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="llama-factory", write=_llama_factory_sft, **_LLAMA_FACTORY),
        Recipe(name="llama-factory-dpo", write=_llama_factory_dpo, **_LLAMA_FACTORY),
        Recipe(name="ms-swift", write=_ms_swift, requirements=("ms-swift==4.6.0",), left_out=_CUDA_ONLY),
        Recipe(name="axolotl", write=_axolotl_padded, **_AXOLOTL),
        Recipe(name="axolotl-packed", write=_axolotl_packed, **_AXOLOTL),
        Recipe(name="verl", write=verl, requirements=("verl==0.9.1",), left_out=_CUDA_ONLY, compiles=False),
        Recipe(name="torchtitan", write=torchtitan, requirements=("torchtitan==0.3.0",), by_switch=True),
        Recipe(name="torchtune", write=torchtune, requirements=("torchtune==0.6.1", "torchao==0.14.1"), by_switch=True),
        Recipe(name="lightning", write=lightning, requirements=("lightning==2.6.6", "transformers==5.23.0")),
        Recipe(name="ray-train", write=ray_train, requirements=("ray==2.60.0", "ray[train]", "transformers==5.23.0")),
    )
}
"""By name."""
