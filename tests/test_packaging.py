"""What is installed is what is in the folders, and the folders kernels/ and passes/ go by one name only."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"treefx": "treefx", "passes": "treefx.passes", "kernels": "treefx.kernels"}


@pytest.fixture(scope="module")
def setuptools_table() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def _packages_in_folders() -> set[str]:
    """Dotted names of all folders with an ``__init__.py``; links are not followed."""
    names = set()
    for folder, package in FOLDERS.items():
        for parent, _, files in os.walk(ROOT / folder, followlinks=False):
            if "__init__.py" in files:
                inner = Path(parent).relative_to(ROOT / folder).parts
                names.add(".".join([package, *inner]))
    return names


def test_every_package_is_listed_and_every_listed_package_exists(setuptools_table: Any) -> None:
    listed = setuptools_table["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == _packages_in_folders()


def test_package_dir_maps_the_folders(setuptools_table: Any) -> None:
    assert setuptools_table["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


@pytest.mark.parametrize("folder", ["passes", "kernels"])
def test_links_lead_to_the_folders(folder: str) -> None:
    link = ROOT / "treefx" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("name", ["kernels", "passes"])
def test_bare_names_are_not_importable(name: str) -> None:
    # transformers looks for a package called kernels and would load ours if the checkout were on the path,
    # so run bare `pytest`, not `python -m pytest`.
    specification = importlib.util.find_spec(name)
    origin = specification.origin if specification is not None else None
    assert origin is None or not Path(origin).resolve().is_relative_to(ROOT)


def test_subpackages_are_one_copy() -> None:
    import treefx.kernels
    import treefx.passes

    assert Path(treefx.kernels.__file__).resolve() == ROOT / "kernels" / "__init__.py"
    assert Path(treefx.passes.__file__).resolve() == ROOT / "passes" / "__init__.py"
    assert {"kernels", "passes"}.isdisjoint(sys.modules)


def test_entry_point_names_the_backend() -> None:
    entries = importlib.metadata.distribution("treefx").entry_points
    (backend,) = entries.select(group="torch_dynamo_backends", name="treefx")
    assert backend.value == "treefx.backend:treefx"
    (script,) = entries.select(group="console_scripts", name="treefx")
    assert callable(script.load())


def test_torch_lists_the_backend_without_importing_treefx() -> None:
    code = "import sys, torch; print('treefx' in torch._dynamo.list_backends(), 'treefx' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_importing_treefx_loads_no_optional_library() -> None:
    code = "import sys, treefx, treefx.data; print(*{'transformers', 'tokenizers', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_constraints_agree_with_the_makefile() -> None:
    pins = {line for line in (ROOT / ".ci/constraints.txt").read_text().split() if "==" in line}
    makefile = (ROOT / "Makefile").read_text()
    assert {word for word in makefile.split() if "==" in word} <= pins
