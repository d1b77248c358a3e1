"""Recipes of trainers that have no command line: the program is ours."""

from pathlib import Path

from treefx.bench.trainers.material import Material

__all__ = ["PROGRAMS", "lightning", "verl"]

PROGRAMS = "treefx.bench.trainers.programs"


def lightning(material: Material, folder: Path, compiled: bool) -> list[str]:
    """The command for ``Trainer.fit``."""
    switch = ["--compile"] if compiled else []
    read = [str(material.model), str(material.chats)]
    return ["python", "-m", f"{PROGRAMS}.lightning", *read, str(folder / "output"), *switch]


def verl(material: Material, folder: Path, compiled: bool) -> list[str]:
    """The command for updates of the actor, whose model verl does not compile."""
    paths = [str(path) for path in (material.model, material.chats, folder / "output")]
    return ["python", "-m", f"{PROGRAMS}.verl_actor", *paths]
