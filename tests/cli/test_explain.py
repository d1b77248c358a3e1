"""``treefx explain``: a dry run of a script's model, for people and for programs, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import treefx
from tests.oracle import refused
from treefx import output
from treefx.cli import app, explain_text

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.head, self.norm = nn.Linear(16, 50), nn.BatchNorm1d(16)

    def forward(self, input_ids, labels=None):
        x = self.inner(self.embedding(input_ids))
        x = x + 0.1 * x.cumsum(dim=1)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

model = Model()

def make():
    model = Model()
    model.norm = nn.Identity()
    return model

def batch():
    ids = torch.arange(40).reshape(4, 10)
    ids[:, :7] = ids[0, :7]
    return {"input_ids": ids, "labels": ids}

if __name__ == "__main__":
    raise SystemExit("this is no training run")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "80")
    for module in (output, explain_text):
        monkeypatch.setattr(module, "console", Console(highlight=False, width=80))
    path = tmp_path / "trained.py"
    path.write_text(SCRIPT)
    return str(path)


def explained(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_operator_on_rows_with_line_and_way_out(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    from treefx.cli.explain import explain

    explain(f"{script}:model", f"{script}:batch")
    text = capsys.readouterr().out
    line = next(number for number, code in enumerate(SCRIPT.splitlines(), 1) if "cumsum" in code)
    assert "[TFX104]" in text and "[TFX109] statistic of the batch" in text
    flowed = " ".join(text.split())
    assert f"trained.py:{line}: x = x + 0.1 * x.cumsum(dim=1)" in flowed
    assert "Way out: normalise over features" in flowed
    assert " tokens " in text and "2.11x" in text and "kept for the backward" in text
    folded = [part for part in text.splitlines() if script not in part]
    assert max(map(len, folded)) <= 80
    report = json.loads(explained(f"{script}:model", "--batch", f"{script}:batch", "--json"))
    lost = [item for item in report["operators"] if item["code"] in ("TFX104", "TFX109")]
    names = {item["op"] for item in lost}
    assert names and all(name in text for name in names)
    coverage = report["verdict"]["coverage"]
    share = 100 * coverage["row"] / (coverage["token"] + coverage["batch"] + coverage["row"])
    assert 0 < share < 100 and f"{share:.1f} % on rows" in flowed


def test_json_is_a_report_and_the_page_is_written(script: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 7, 8]]))
    page = tmp_path / "page.html"
    report = treefx.Report.from_json(explained(f"{script}:make", "--batch", str(rows), "--html", str(page), "--json"))
    assert (report.stats["raw_tokens"], report.stats["tokens"]) == (9, 4)  # the loss reads no last token
    assert {loss.code for loss in report.verdict.losses if loss.way_out} == {"TFX104"}
    assert "<script" in page.read_text() and report.memory.bytes_on_rows > report.memory.bytes > 0


def test_sizes_give_a_batch_that_the_model_can_take(script: str) -> None:
    report = json.loads(explained(f"{script}:model", "--batch", "4x12+3", "--json"))
    assert (report["verdict"]["raw_tokens"], report["verdict"]["tokens"]) == (60, 24)


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        ("{}:modle", "4x4+4", ("modle", "it has", "model")),
        ("{}", "4x4+4", ("name an object of the script",)),
        ("{}:model", "60x4+4", ("rows", "vocab_size=50")),
        ("{}:model", "{}.json", ("no file or folder",)),
        ("llama", "{}:model", ("input_ids",)),
        ("no_such_model", "4x4+4", ("no_such_model",)),
    ],
)
def test_refusals_name_the_argument(script: str, model: str, batch: str, words: Any) -> None:
    with refused(*words):
        explained(model.format(script), "--batch", batch.format(script))


def test_bad_rows_and_bad_scripts(script: str, tmp_path: Path) -> None:
    rows, broken = tmp_path / "rows.json", tmp_path / "broken.py"
    broken.write_text("raise ValueError('no weights here')")
    for text in ("[", "[]", "[[1], []]", '["a"]', "[[1.5]]", "[[[1]]]"):
        rows.write_text(text)
        with refused("rows.json", "rows"):
            explained(f"{script}:model", "--batch", str(rows))
    with refused("broken.py", "no weights here"):
        explained(f"{broken}:model")
