"""Run trainers' commands without a compiler, with inductor and with treefx."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treefx.errors import InputError, TreefxError
from treefx.tools.bench.job.failures import what_failed
from treefx.tools.bench.job.ways import check_same, empty_caches, logged_sharing
from treefx.tools.bench.trainers.environment import make_environment
from treefx.tools.bench.trainers.material import Material, make_material
from treefx.tools.bench.trainers.recipes import RECIPES, Recipe

__all__ = ["WAYS", "TrainersError", "choose", "default_folder", "run"]

WAYS = ("eager", "inductor", "treefx")
"""As the trainer has it; with its own switch for torch.compile; and ``treefx run -- COMMAND``."""

_ALONE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's check of installed versions; pip has solved them
    "TOKENIZERS_PARALLELISM": "false",
}


class TrainersError(TreefxError):
    """A trainer failed, or losses or norms of gradients differ."""


def default_folder() -> Path:
    """Return the folder of environments: ``trainers`` in the cache folder."""
    return Path(os.environ.get("TREEFX_CACHE_DIR") or Path.home() / ".cache" / "treefx") / "trainers"


def choose(names: Sequence[str]) -> list[Recipe]:
    """The recipes of these names, all for none.

    Raises:
        InputError: A name is unknown.
    """
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise InputError(f"expected trainers of {', '.join(RECIPES)}, got {', '.join(unknown)}")
    return [RECIPES[name] for name in names] or list(RECIPES.values())


def run(
    names: Sequence[str] = (),
    *,
    folder: Path | None = None,
    rows: int = 56,
    layers: int = 2,
    hidden_size: int = 128,
    on_start: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train once in every way with every trainer that is named.

    Args:
        names: Of `RECIPES`; none for all.
        folder: Where environments are made and kept; `default_folder` when None.
        rows: Turns of conversations to train on, in their order.
        layers: Blocks of the model, a Qwen3.
        hidden_size: Its width, a multiple of 64.
        on_start: Told what begins.

    Returns:
        One record per trainer and way: ``whole_seconds`` of the process, from its start to its end with all that is
        compiled, and ``whole``, those over inductor's; ``steps``; of treefx ``sharing`` and ``sharing_possible`` (raw
        over distinct tokens, the least and the most of a step), ``compiles`` and ``fallbacks``; ``error``, the largest
        relative difference of a loss or norm from those of the trainer without a compiler. Where its own switch for
        torch.compile fails, or there is none, ``note`` says so, and nothing is compared with it. What does not
        apply is "".

    Raises:
        TrainersError: A run without torch.compile or with treefx failed, or computed something else.
        EnvironmentFailed: A trainer could not be installed.
        InputError: An unknown name or size.
    """
    recipes = choose(names)
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        material = make_material(Path(scratch), rows=rows, layers=layers, hidden_size=hidden_size)
        for recipe in recipes:
            on_start(f"{recipe.name}: installing")
            programs = make_environment(recipe, folder or default_folder())
            records += _ways(recipe, programs, material, on_start)
    fields = list(dict.fromkeys(name for record in records for name in record))
    return [{name: record.get(name, "") for name in fields} for record in records]


def _ways(recipe: Recipe, programs: Path, material: Material, on_start: Callable[[str], None]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        if way == "inductor" and not recipe.compiles:
            found[way] = {"note": "it compiles no model"}
            continue
        on_start(f"{recipe.name}: {way}")
        try:
            found[way] = train(recipe, way, programs, material)
        except TrainersError as error:
            if way != "inductor":
                raise
            found[way] = {"note": str(error).strip().splitlines()[-1]}
    for way in WAYS[1:]:
        if "numbers" in found[way]:
            found[way]["error"] = check_same(found[way], found["eager"], TrainersError)
    return [_shown(recipe, way, found[way], found["inductor"]) for way in WAYS]


def train(recipe: Recipe, way: str, programs: Path, material: Material) -> dict[str, Any]:
    """Run a trainer's command in separate processes.

    Args:
        recipe: The trainer.
        way: Of `WAYS`.
        programs: Of the trainer's environment.
        material: What it reads.

    Returns:
        ``way``, ``whole_seconds``, ``numbers`` (losses and norms of gradients, as logged) and ``log``, its entries.

    Raises:
        TrainersError: It failed, or left no losses.
    """
    with tempfile.TemporaryDirectory() as scratch, empty_caches() as environment:
        compiled = way == "inductor" or (way == "treefx" and recipe.by_switch)
        command = recipe.write(material, Path(scratch), compiled)
        prefix = [str(programs / "treefx"), "run", "--"] if way == "treefx" else []
        path = os.pathsep.join([str(programs), environment.get("PATH", "")])
        given = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
        started = time.perf_counter()
        done = subprocess.run(
            [*prefix, str(programs / command[0]), *command[1:]],
            env={**given, **_ALONE, "PATH": path}, cwd=scratch, capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        log = _read_log(Path(scratch) / "output")
    numbers = [float(entry[name]) for entry in log for name in ("loss", "grad_norm")]
    if done.returncode != 0 or not numbers:
        raise TrainersError(
            f"{recipe.name} with {way} was expected to train, but its command ended with status {done.returncode} "
            f"after {len(log)} steps:\n{what_failed(done.stdout + done.stderr)}"
        )
    return {"way": f"{recipe.name} with {way}", "whole_seconds": seconds, "numbers": numbers, "log": log}


def _read_log(folder: Path) -> list[dict[str, Any]]:
    """Steps in the last state that transformers' trainer saved."""
    states = [json.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("trainer_state.json")]
    logs: list[list[dict[str, Any]]] = [state["log_history"] for state in states]
    entries = max(logs, key=len, default=[])
    return [entry for entry in entries if "loss" in entry and "grad_norm" in entry]


def _shown(recipe: Recipe, way: str, found: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {"run": f"{recipe.name}, {way}", "trainer": recipe.requirements[0]}
    if "numbers" not in found:
        return {**record, "note": found["note"]}
    seconds = found["whole_seconds"]
    record |= {"steps": len(found["log"]), "whole_seconds": seconds, "error": found.get("error", 0.0)}
    if "whole_seconds" in baseline:
        record["whole"] = seconds / baseline["whole_seconds"]
    return {**record, **logged_sharing(found["log"])}
