"""Recipes of trainers that have no command line, or whose recipes name code: that is ours."""

import json
from pathlib import Path
from typing import Any

from treefx.tools.bench.trainers.material import Material

__all__ = ["PROGRAMS", "lightning", "ray_train", "torchtitan", "torchtune", "verl"]

PROGRAMS = "treefx.tools.bench.trainers.programs"


def lightning(material: Material, folder: Path, compiled: bool) -> list[str]:
    """The command for ``Trainer.fit``."""
    return _program("lightning", material, folder, compiled)


def ray_train(material: Material, folder: Path, compiled: bool) -> list[str]:
    """The command for ``TorchTrainer.fit`` with two workers."""
    return _program("ray_train", material, folder, compiled)


def _program(name: str, material: Material, folder: Path, compiled: bool) -> list[str]:
    switch = ["--compile"] if compiled else []
    paths = [str(path) for path in (material.model, material.chats, folder / "output")]
    return ["python", "-m", f"{PROGRAMS}.{name}", *paths, *switch]


def torchtitan(material: Material, folder: Path, compiled: bool) -> list[str]:
    """The command for torchtitan's ``train.main`` on one rank."""
    program = f"{PROGRAMS}.torchtitan"
    launch = ["torchrun", "--standalone", "--nproc-per-node", "1", "-m", program]
    options = ["--module", program, "--config", "tiny", "--dump_folder", str(folder / "output")]
    switch = ["--compile.enable"] if compiled else []
    return [*launch, str(material.model), str(material.chats), *options, *switch]


def torchtune(material: Material, folder: Path, compiled: bool) -> list[str]:
    """The command for torchtune's recipe, which names its components."""
    ours = f"{PROGRAMS}.torchtune"
    model = {"folder": str(material.model)}
    recipe: dict[str, Any] = {
        "output_dir": str(folder / "output"),
        "tokenizer": {"_component_": f"{ours}.Ids", **model},
        "dataset": {"_component_": f"{ours}.Chats", "path": str(material.chats)},
        "model": {"_component_": f"{ours}.decoder", **model},
        "checkpointer": {"_component_": f"{ours}.NewWeights", "model_type": "QWEN2", **model},
        "metric_logger": {"_component_": f"{ours}.Log", "folder": str(folder / "output")},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "resume_from_checkpoint": False,
        "seed": 7,
        "shuffle": False,
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "optimizer_in_bwd": False,
        "clip_grad_norm": "inf",  # the norm is logged, and nothing clipped
        "enable_activation_checkpointing": True,
        "device": "cpu",
        "dtype": "fp32",
        "compile": compiled,
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return ["tune", "run", "full_finetune_single_device", "--config", str(folder / "recipe.yaml")]


def verl(material: Material, folder: Path, compiled: bool) -> list[str]:
    """The command for updates of the actor, whose model verl does not compile."""
    paths = [str(path) for path in (material.model, material.chats, folder / "output")]
    return ["python", "-m", f"{PROGRAMS}.verl_actor", *paths]
