"""What ``TORCH_TRACE`` gets: each pass, decisions, compiled graphs and kernels, in the form that tlparse reads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from tests.inspection.situations import compiled, ids_of, train
train(compiled("mean", inner="aot_eager", min_sharing=1.0), ids_of())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the trace of a small training step."""
    folder = tmp_path_factory.mktemp("trace")
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r}){PROGRAM}"]
    environment = {**os.environ, "TORCH_TRACE": str(folder), "PYTHONSAFEPATH": "1"}
    subprocess.run(command, check=True, env=environment, timeout=300, capture_output=True)
    return folder


def records_of(log: Path) -> list[dict[str, Any]]:
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("V") and "] {" in line]
    return [json.loads(line.split("] ", 1)[1]) for line in lines]


def test_artifacts_of_a_compilation(folder: Path) -> None:
    (log,) = folder.glob("*.log")
    text = log.read_text(encoding="utf-8")
    names = [record["artifact"]["name"] for record in records_of(log) if "artifact" in record]
    ours = [name for name in names if name.startswith("treefx_")]
    assert ours[:2] == ["treefx_pass_0_trace", "treefx_pass_1_label_tokens"]
    assert {"treefx_decisions", "treefx_rewritten", "treefx_forward", "treefx_backward", "treefx_kernel_0"} <= set(ours)
    assert '"code": "TFX104"' in text and "treefx.tree_attention" in text


def test_tlparse_lists_the_artifacts(folder: Path, tmp_path: Path) -> None:
    tlparse = shutil.which("tlparse") or shutil.which("tlparse", path=str(Path(sys.executable).parent))
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    (log,) = folder.glob("*.log")
    out = tmp_path / "out"
    subprocess.run([tlparse, str(log), "-o", str(out), "--no-browser"], check=True, capture_output=True)
    index = (out / "index.html").read_text(encoding="utf-8")
    names = [record["artifact"]["name"] for record in records_of(log) if "artifact" in record]
    ours = sorted({name for name in names if name.startswith("treefx_")})
    assert len(ours) > 7 and [name for name in ours if name not in index] == []
    files = [path for path in out.rglob("*treefx_*") if path.is_file()]
    assert sum("treefx_decisions" in path.name and "TFX104" in path.read_text(encoding="utf-8") for path in files) == 1
    assert any("treefx_rewritten" in path.name and "tree_attention" in path.read_text("utf-8") for path in files)
