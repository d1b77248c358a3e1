"""What treefx replaces in PyTorch stands in one table, and nowhere else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rooms import read_sources
from treefx.torch_patches.patch import Patch
from treefx.torch_patches.table import PATCHES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.symbol)
def test_what_a_patch_says_of_itself(patch: Patch) -> None:
    file, name = patch.test.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), patch.test
    assert patch.why and patch.versions


def test_only_patches_write_into_pytorch() -> None:
    sources = read_sources(ROOT)
    found = {name: list(written(ast.parse(text))) for name, (_, text) in sources.items()}
    assert {name for name, where in found.items() if where and not name.startswith("treefx.tools")} == {
        "treefx.torch_patches.backports",
        "treefx.torch_patches.batch_symbols",
        "treefx.torch_patches.compiling",
        "treefx.torch_patches.dynamo",
        "treefx.torch_patches.functions",
        "treefx.torch_patches.substitution",
        "treefx.torch_patches.symbols",
    }


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.add = 1",
        "import torch.nn as nn\nnn.Module.forward = 1",
        "from torch._dynamo.variables import builder\ndef late():\n    builder._name = print",
        "from torch import Tensor\nTensor.size, x = 1, 2",
        "from torch import Tensor\nsetattr(Tensor, 'size', 1)",
    ],
)
def test_a_planted_patch_is_found(text: str) -> None:
    assert len(list(written(ast.parse(text)))) == 1
    assert list(written(ast.parse(text.replace("torch", "other")))) == []


def written(tree: ast.Module) -> Iterator[str]:
    """Attributes of imports from torch that a module assigns to."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {
        (alias.asname or alias.name).partition(".")[0]
        for node in imports
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name or "").partition(".")[0] == "torch"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in known:
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and _root(node.args[0]) in known:
            yield ast.unparse(node)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
