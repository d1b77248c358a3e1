"""All folders are installed, and the folders kernels/ and passes/ go by one name only."""

import importlib.metadata
import importlib.util
import os
import shutil
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
TEXTS = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"}
TOP_LEVEL = {*FOLDERS, "tests", "examples", "docs", "pyproject.toml", "Makefile", *TEXTS}


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


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="git says which files belong to it")
def test_nothing_else_lies_at_the_top() -> None:
    command = ["git", "-c", "safe.directory=*", "ls-files"]  # the checkout may belong to another user
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {path.split("/")[0] for path in tracked.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


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


_ALONE = """
import sys

sys.modules |= dict.fromkeys(["matplotlib", "rich", "typer", "safetensors", "transformers"])
import torch
import treefx, treefx.data, treefx.rl

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0] @ self.embed.weight.T

model = Model().double()
ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]])
wanted = model(ids).sum()
model.compile(backend="treefx", options={"inner": "eager"})
torch.testing.assert_close(model(ids).sum(), wanted)
assert treefx.inspect(model).stats["ran"] == "packed"
forest = treefx.Forest.from_sequences(ids)
with treefx.use(forest):
    packed = model(**forest.model_inputs())
assert packed.shape[1] == forest.num_tokens == 7
for call in (lambda: forest.draw("tree.png"), lambda: __import__("treefx.cli")):
    try:
        call()
    except (ModuleNotFoundError, SystemExit) as error:
        print(error)
"""


def test_the_core_needs_no_extra(tmp_path: Path) -> None:
    """Compiling and forests run without the libraries of the extras; what needs one names the extra."""
    done = subprocess.run([sys.executable, "-P", "-c", _ALONE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "a picture of a forest needs matplotlib, which is not installed: pip install 'treefx[plot]'",
        "the command treefx needs typer, which is not installed: pip install 'treefx[cli]'",
    ]


def test_constraints_agree_with_the_makefile() -> None:
    pins = {line for line in (ROOT / ".ci/constraints.txt").read_text().split() if "==" in line}
    makefile = (ROOT / "Makefile").read_text()
    assert {word for word in makefile.split() if "==" in word} <= pins
