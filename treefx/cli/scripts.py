"""Objects of a user's script, named on the command line as ``script.py:name``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from treefx.errors import InputError

__all__ = ["Place", "load_place", "parse_place"]


class Place(NamedTuple):
    """A global name of a script."""

    script: Path
    name: str


def parse_place(option: str, text: str) -> Place | None:
    """``script.py:name`` as a place; None for a text of another form.

    Raises:
        InputError: The script does not exist, or the name is no name of Python.
    """
    script, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        raise InputError(f"expected {option} {text} to name an object of the script, such as {text}:model")
    if not colon or not script.endswith(".py"):
        return None
    if not name.isidentifier():
        raise InputError(f"expected a name of Python behind the colon of {option} {text}, got {name!r}")
    if not Path(script).is_file():
        raise InputError(f"{option} {text}: no file {script}")
    return Place(Path(script), name)


def load_place(place: Place, loaded: dict[Path, ModuleType]) -> Any:
    """Import the script of a place once, with its folder on Python's path, and return what the name stands for.

    Code below ``if __name__ == "__main__"`` does not run. Dynamo finds the globals of a function by the name of its
    module, so the module stays in ``sys.modules``.

    Args:
        place: Script and name.
        loaded: Scripts that were imported; this call adds to it.

    Raises:
        InputError: The script raises an error or has no such name.
    """
    script = place.script.resolve()
    if script not in loaded:
        loaded[script] = _import(place.script, script)
    names = vars(loaded[script])
    if place.name not in names:
        known = ", ".join(name for name in names if not name.startswith("_"))
        raise InputError(f"{place.script} has no global {place.name!r}; it has {known or 'none'}")
    return names[place.name]


def _import(given: Path, script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"treefx_script_{script.stem}", script)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{given} cannot be imported: {type(error).__name__}: {error}") from error
    return module
