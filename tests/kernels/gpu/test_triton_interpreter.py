"""The generated kernels in Triton's interpreter, in a process of their own: Triton chooses it when imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    "all keys": ("interpreted_triton",),
    "one pass, boundaries, layers, heads": (
        "interpreted_once",
        "interpreted_boundary",
        "layers/interpreted_not_finite",
        "layers/interpreted_layers",
        "head_loss/interpreted_head_loss",
        "head_loss/interpreted_trl_head",
        "sparse/interpreted_sparse",
    ),
}
"""Two processes of equal length: each imports PyTorch once."""


@pytest.mark.parametrize("names", NAMES)
def test_kernels_in_the_interpreter(names: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TREEFX_CACHE_DIR": str(tmp_path), "PYTHONSAFEPATH": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    command += [f"tests/kernels/gpu/{name}.py" for name in NAMES[names]]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
