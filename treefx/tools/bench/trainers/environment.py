"""An environment per trainer, with the torch of this one and this treefx."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from treefx.errors import TreefxError
from treefx.tools.bench.trainers.recipes import Recipe

__all__ = ["EnvironmentFailed", "make_environment", "own_requirement"]


class EnvironmentFailed(TreefxError):
    """A trainer could not be installed."""


def make_environment(recipe: Recipe, folder: Path) -> Path:
    """Install a trainer, unless that was done before for the same requirements.

    Args:
        recipe: The requirements.
        folder: Holds the environments, one for each set of requirements; about 3 GB each.

    Returns:
        The folder of the environment's programs.

    Raises:
        EnvironmentFailed: pip failed; the message ends with what it said.
    """
    wanted = [*recipe.requirements, *own_requirement(), *_constraints()]
    home = folder / recipe.requirements[0].replace("==", "-")
    programs, done = home / "bin", home / "treefx-requirements.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == wanted:
        return programs
    _run(recipe, [sys.executable, "-m", "venv", "--clear", str(home)])
    limits = home / "constraints.txt"
    limits.write_text("\n".join(_constraints()), encoding="utf-8")
    pip = [str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # torch first and alone: its wheel depends on the machine, and nothing after it may choose another one.
    _run(recipe, [*pip, "install", *_constraints()])
    _run(recipe, [*pip, "install", "-c", str(limits), *recipe.requirements, *own_requirement()])
    if torch.version.cuda is None:
        _take_out(recipe, pip)
    done.write_text(json.dumps(wanted), encoding="utf-8")
    return programs


def own_requirement() -> list[str]:
    """What pip is told to install this treefx: the folder it came from, or its version."""
    distribution = importlib.metadata.distribution("treefx")
    project = Path(str(distribution.locate_file("pyproject.toml"))).resolve()
    if project.is_file():  # the checkout one stands in
        return ["-e", str(project.parent)]
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if "dir_info" not in origin:
        return [f"treefx=={distribution.version}"]
    path = str(origin["url"]).removeprefix("file://")
    return ["-e", path] if origin["dir_info"].get("editable") else [path]


def _constraints() -> list[str]:
    """torch and triton as they are here, whatever build."""
    found = {name: _version(name) for name in ("torch", "triton")}
    return [f"{name}=={version.split('+')[0]}" for name, version in found.items() if version]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _take_out(recipe: Recipe, pip: Sequence[str]) -> None:
    if recipe.left_out:
        _run(recipe, [*pip, "uninstall", "--yes", *recipe.left_out])
    where = [pip[0], "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(_run(recipe, where).strip())
    for name in recipe.empty:
        (packages / f"{name}.py").write_text('"""Empty: the one of the registry needs CUDA."""\n', encoding="utf-8")


def _run(recipe: Recipe, command: Sequence[str]) -> str:
    # Paths of this process would be found before those of the environment.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise EnvironmentFailed(f"expected to install {recipe.name}, but {' '.join(command)} failed:\n{said}")
    return done.stdout
