"""``treefx run``: every Python process of a command is hooked, and pays nothing where it imports no trainer."""

import gc
import io
import json
import os
import subprocess
import sys
import weakref
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import treefx
from tests.models import double
from tests.trainers.support import NEEDS_TRAINERS
from treefx.cli import app
from treefx.cli.run import environment_for
from treefx.errors import ConfigError
from treefx.inspection.inspector import Inspection
from treefx.inspection.observation.observed import Observation
from treefx.inspection.report.report import Report
from treefx.integrations import startup
from treefx.runtime.records import models_of_the_run
from treefx.runtime.run_record import RECORD


def python(code: str, *, environment: dict[str, str] | None = None, keep_groups: bool = False, **options: Any) -> str:
    """What a process under ``treefx run`` prints."""
    given = environment_for(options, {**os.environ, **(environment or {})}, keep_groups=keep_groups)
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_process_without_a_trainer_imports_nothing() -> None:
    code = "import sys, json; print(sorted(n for n in ('torch', 'treefx', 'transformers', 'trl') if n in sys.modules))"
    assert python(code) == "[]\n"


def test_the_package_imports_no_trainer_before_its_module_is_asked_for() -> None:
    code = "import sys, treefx; treefx.integrations; print({'accelerate', 'transformers', 'trl'} & set(sys.modules))"
    assert python(code) == "set()\n"


def test_children_of_children_are_hooked_and_paths_stay_clean() -> None:
    inner = "import sys; print(type(sys.meta_path[0]).__name__, any('startup' in p for p in sys.path))"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    assert python(outer) == "_HookingFinder False\n"


def test_the_sitecustomize_that_was_there_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = __name__\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code = "import sys; print(mine, sys.modules['sitecustomize'].__file__, type(sys.meta_path[0]).__name__)"
    expected = f"sitecustomize {tmp_path / 'sitecustomize.py'} _HookingFinder\n"
    assert python(code, environment={"PYTHONPATH": path}) == expected


def test_hooked_modules_are_imported_as_they_are(tmp_path: Path) -> None:
    """A module of a hooked name: its own loader, source and errors, then the hook."""
    package = tmp_path / "accelerate" / "utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "dataclasses.py").write_text("raise ValueError('of its own')\n")  # words: quoted
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code = "try:\n    import accelerate.utils.dataclasses\nexcept ValueError as error:\n    print(error)"
    assert python(code, environment={"PYTHONPATH": path}) == "of its own\n"  # words: quoted


def test_the_environment_is_made_once() -> None:
    first = environment_for({"inner": "eager"}, {"PYTHONPATH": "/mine", "HOME": "/home"})
    assert first["PYTHONPATH"].split(os.pathsep) == [str(Path(startup.__file__).parent), "/mine"]
    assert json.loads(first["TREEFX_RUN"]) == {"options": {"inner": "eager"}, "keep_groups": False}
    again = environment_for({}, first)
    assert again["PYTHONPATH"] == first["PYTHONPATH"] and again["HOME"] == "/home"
    with pytest.raises(ConfigError, match="'inner'"):
        environment_for({"inner": "outer"}, {})


def test_the_command_takes_over_with_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *given: seen.append(given))
    result = CliRunner().invoke(
        app, ["run", "--inner", "eager", "--", "python", "train.py", "--inner", "mine", "--help"]
    )
    assert result.exit_code == 0, result.output
    ((file, arguments, environment),) = seen
    assert file == "python" and arguments == ["python", "train.py", "--inner", "mine", "--help"]
    assert json.loads(environment["TREEFX_RUN"]) == {"options": {"inner": "eager"}, "keep_groups": False}
    assert CliRunner().invoke(app, ["run", "python", "--version"]).exit_code == 0
    assert seen[1][1] == ["python", "--version"]
    missing = CliRunner().invoke(app, ["run", "--", "no-such-trainer"])
    assert "no-such-trainer" in str(missing.exception) and len(seen) == 2


PROGRAM = """
import json, sys, tempfile
import transformers.trainer
transformers.trainer.DEFAULT_CALLBACKS = [transformers.trainer.DefaultFlowCallback]  # as ms-swift does
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

def train(rows, steps):
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=steps, logging_steps=1, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, optim="sgd", learning_rate=0.1,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in rows]
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), arguments, train_dataset=rows)
    trainer.train()
    return trainer.state.log_history

history = train([[*range(3, 15), n, n + 1] for n in range(8)], 2) if not KEEPS else []
starts = [[*range(first, first + 12)] for first in (3, 15, 27, 39)]
later = train([[*start, 52 + n, 53 + n] for n in range(4) for start in starts], 4) if HOOKED else []
sharing = [entry["treefx/sharing"] for entry in later if "treefx/sharing" in entry]
kept = False
if HOOKED and not KEEPS:
    from trl.trainer.grpo_trainer import GRPOTrainer
    kept = hasattr(GRPOTrainer._prepare_inputs, "keeps_groups")
found = {"history": history, "sharing": sharing, "kept": kept, "treefx": "treefx" in sys.modules}
print(json.dumps(found), flush=True)
"""
"""Rows of one prompt, then rows of four in turn: HOOKED says whether treefx runs it, KEEPS whether in groups."""


def test_a_training_program_shares_without_a_line_of_it_changed() -> None:
    """In the environment that ``accelerate launch`` hands its processes when it is told of no backend.

    Rows of a dataset come together where that is asked for.
    """
    pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
    pytest.importorskip("trl", reason=NEEDS_TRAINERS)
    environment = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False"}
    alone = subprocess.run(
        [sys.executable, "-c", f"HOOKED = KEEPS = False\n{PROGRAM}"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    plain = json.loads(alone.stdout.splitlines()[-1])
    hooked, grouped = (
        json.loads(
            python(
                f"HOOKED, KEEPS = True, {keep_groups}\n{PROGRAM}",
                environment=environment,
                keep_groups=keep_groups,
                inner="eager",
            ).splitlines()[-1]
        )
        for keep_groups in (False, True)
    )
    assert not plain["treefx"] and not any("treefx/sharing" in entry for entry in plain["history"])
    assert hooked["kept"] and len(hooked["history"]) > 2
    for before, now in zip(plain["history"], hooked["history"], strict=True):
        if "loss" in before:
            assert now["loss"] == pytest.approx(before["loss"], rel=1e-4)
            assert now["treefx/fallback"] == 0.0 and now["treefx/sharing"] > 2.0
    assert len(hooked["sharing"]) == len(grouped["sharing"]) == 4
    assert min(hooked["sharing"]) < 2.5 < min(grouped["sharing"])


LOOP = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 8)

    def forward(self, input_ids):
        x = self.embed(input_ids)[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0] @ self.embed.weight.T

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.tensor([[*range(3, 15), n, n + 1] for n in range(4)])
for _ in range(4):
    loss = model(ids).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), flush=True)
"""
"""A loop that uses no trainer."""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("raise KeyboardInterrupt", -2), ("import os; os.kill(os.getpid(), 15)", -15)],
    ids=["by itself", "interrupted", "terminated"],
)
def test_a_loop_is_observed_however_it_ends(end: str, code: int, tmp_path: Path) -> None:
    """By the exit status that it has without treefx."""
    environment = environment_for({}, {**os.environ}, observe=True, report=tmp_path / "seen")
    seen = subprocess.run(
        [sys.executable, "-c", LOOP + end], env=environment, capture_output=True, text=True, timeout=300
    )
    assert seen.returncode == code, seen.stderr[-3000:]
    with redirect_stdout(io.StringIO()) as alone:
        exec(LOOP, {"__name__": "alone"})
    assert seen.stdout == alone.getvalue() and len(set(seen.stdout.split())) == 4
    (file,) = (tmp_path / "seen").glob("observation-*.json")
    found = Observation.from_json(file.read_text(encoding="utf-8"))
    assert found.figures.steps == 3 and found.figures.raw_tokens == 3 * 56  # from the second step on
    assert found.figures.step_tokens == 3 * (12 + 8)
    if "kill" not in end:
        assert "treefx observed Model" in seen.stderr and "2.80x" in seen.stderr
    if not end:
        assert found.prediction is not None and found.prediction.flops_packed < found.prediction.flops


def test_observing_refuses_what_changes_a_run(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    for arguments, reason in (
        (["--observe", "--keep-groups"], "--observe changes nothing"),
        (["--observe", "--inner", "eager"], "--observe changes nothing"),
        (["--observe", "--report", str(tmp_path)], "empty or not there"),
    ):
        result = CliRunner().invoke(app, ["run", *arguments, "--", "python"])
        assert reason in str(result.exception)


COMPILED = LOOP.replace(
    "model = Model()", 'model = Model()\nmodel.compile(backend="treefx", options={"inner": "eager"})'
)
GONE = "import gc\nmodel = optimizer = loss = None\ntorch.compiler.reset()\ngc.collect()\n"


@pytest.mark.parametrize(
    ("end", "code", "rank"), [(GONE, 0, "0"), ("raise KeyboardInterrupt", -2, "1")], ids=["by itself", "interrupted"]
)
def test_the_report_of_a_run_is_written_however_it_ends(end: str, code: int, rank: str, tmp_path: Path) -> None:
    """Also of a model that is gone by then."""
    environment = environment_for({}, {**os.environ, "RANK": rank}, report=tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", COMPILED + end], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"report-rank{rank}.{x}" for x in ("json", "html")}
    report = Report.from_json((tmp_path / "out" / f"report-rank{rank}.json").read_text(encoding="utf-8"))
    assert report.stats["sharing_ratio"] == 56 / 20 and report.stats["calls"] == 4 and len(report.calls) == 4
    assert report.operators and report.stats["fallback"] is None
    assert ("20 tokens instead of 56" in done.stderr) == (rank == "0")
    assert "20 tokens instead of 56" in (tmp_path / "out" / f"report-rank{rank}.html").read_text(encoding="utf-8")


def test_the_record_of_a_run_holds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted model and a compiled one, both gone when their reports are made."""
    monkeypatch.setattr(RECORD, "is_on", True)
    monkeypatch.setattr(RECORD, "graphs", [])

    def run(prepare: Any) -> Any:
        model = prepare(double("llama", num_hidden_layers=1))
        model(input_ids=torch.tensor([[1, 2, 3], [1, 2, 4]]), use_cache=False).logits.sum().backward()
        return weakref.ref(model)

    refs = [run(treefx.convert)]
    refs.append(run(lambda model: model.compile(backend="treefx", options={"inner": "eager"}) or model))
    torch.compiler.reset()
    gc.collect()
    assert [reference() for reference in refs] == [None] * 2
    recorded = models_of_the_run()
    assert [name for name, _ in recorded] == ["LlamaForCausalLM"] * 2
    found = [Inspection(runs, name) for name, runs in recorded]
    assert [report.stats["tokens"] for report in found] == [4, 4]
    assert all(Report.from_json(report.to_json()).verdict.sentence for report in found)
