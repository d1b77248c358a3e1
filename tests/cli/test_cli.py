"""The command line: every command's help, its JSON, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.data.engines import gym_rollout
from treefx.cli import app
from treefx.cli.doctor import self_check
from treefx.data import Conversation, scripted_conversations
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.tools.bench import step as bench_step
from treefx.tools.bench.job.models import make_config, make_model
from treefx.tools.bench.job.report import TrainingReport
from treefx.tools.bench.job.rollouts import make_tokenizer, prepare_batches
from treefx.tools.bench.job.synthetic import shared_prefix_batch
from treefx.tools.bench.job.training import (
    StepRecord,
    TrainingRun,
    compare_training,
    gradient_error,
    reference_gradients,
)
from treefx.torch_patches.table import PATCHES

COMMANDS = (
    ["demo"],
    ["inspect"],
    ["explain"],
    ["data"],
    ["doctor"],
    ["bench"],
    ["bench", "forest"],
    ["bench", "assign"],
    ["bench", "calls"],
    ["bench", "attention"],
    ["bench", "memory"],
    ["bench", "unshared"],
    ["bench", "large"],
    ["simulate"],
    ["simulate", "t3"],
    ["simulate", "chunks"],
)


def _json(arguments: list[str]) -> Any:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _treefx(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-P", "-m", "treefx", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("command", [[], *COMMANDS, ["bench", "step"]], ids=lambda command: " ".join(command) or "all")
def test_help_explains_every_command(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output and len(result.output.splitlines()) > 8


def test_module_and_refusals() -> None:
    done = _treefx("data", "no/such/file")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("InputError: no file or folder no/such/file")
    assert "Traceback" not in done.stderr


def test_data_of_the_scripted_sample(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "tree.png"
    figures = _json(["data", "--tokenizer", "bytes", "--draw", str(picture), "--json"])
    assert figures["conversations"] == 32 and figures["tasks"] == 8
    assert figures["raw_tokens"] > figures["merged_tokens"] > figures["tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_data_of_pairs_and_of_broken_records(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pair = {"prompt": "the sky is", "chosen": " blue", "rejected": " green"}
    path.write_text(f"{json.dumps(pair)}\n{{\n{json.dumps({**pair, 'chosen': 3})}\n")
    done = _treefx("data", str(path))
    assert done.returncode == 2 and done.stdout == ""
    *progress, refusal = done.stderr.splitlines()
    assert refusal.startswith(f"RecordError: {path}, line 2: is not JSON")
    assert all(line.endswith(" ...") for line in progress)
    figures = _json(["data", str(path), "--tokenizer", "bytes", "--skip-broken", "--json"])
    assert (figures["tasks"], figures["rows"], figures["skipped"]) == (1, 2, 2)
    assert (figures["raw_tokens"], figures["tokens"]) == (2 * 10 + 5 + 6 + 2, 10 + 1 + 4 + 5 + 2)
    planned = _json(["plan", str(path), "--tokenizer", "bytes", "--skip-broken", "--json"])
    assert planned["tokens"] == figures["tokens"]
    result = CliRunner().invoke(app, ["data", str(path), "--tokenizer", "bytes", "--skip-broken"])
    assert "2 answers of 1 pair " in result.output and "skipped 2; the first:" in result.output


@pytest.mark.parametrize("command", ["data", "plan"])
def test_files_of_broken_records_alone(command: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("{\n{\n")
    with pytest.raises(InputError, match=r"at least one record that can be read.*skipped 2.*line 1: is not JSON"):
        CliRunner().invoke(app, [command, str(path), "--skip-broken"], catch_exceptions=False, standalone_mode=False)


def test_data_and_plan_of_traces(tmp_path: Path) -> None:
    """Traces have token ids: no tokenizer is made."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(gym_rollout(10 + 10 * n, n))}\n" for n in range(2)))
    figures = _json(["data", str(path), "--draw", str(tmp_path / "tree.svg"), "--json"])
    assert (figures["vocab_size"], figures["tasks"], figures["rows"], figures["merged_rows"]) == (None, 1, 4, 2)
    assert (figures["raw_tokens"], figures["merged_tokens"], figures["tokens"]) == (40, 24, 18)
    assert (tmp_path / "tree.svg").exists()
    assert _json(["plan", str(path), "--json"])["tokens"] == 18
    dump = tmp_path / "3.jsonl"
    dump.write_text(json.dumps({"input": "ask", "output": "yes", "score": 1.0, "step": 3}))
    assert _json(["data", str(dump), "--tokenizer", "bytes", "--json"])["tokens"] == 7
    with pytest.raises(InputError, match="texts only"):
        CliRunner().invoke(app, ["plan", str(dump)], catch_exceptions=False)


def test_data_tells_drift(tmp_path: Path) -> None:
    from tests.data.chats import make_engine

    path, folder = tmp_path / "chats.jsonl", tmp_path / "tokenizer"
    make_engine("plain").save_pretrained(folder)
    said = [("user", "hello"), ("assistant", "it is noon"), ("user", "thanks"), ("assistant", "bye")]
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    arguments = ["data", str(path), "--tokenizer", str(folder), "--drift"]
    drift = _json([*arguments, "--json"])["drift"]
    assert drift["history"] == 1 and drift["places"][0]["where"] == f"{path}, line 1"
    figures = [_json([command, *arguments[1:4], "--json"]) for command in ("data", "plan")]
    assert figures[0]["tokens"] == figures[1]["tokens"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "1 history" in result.output and f"{path}, line 1, turn 1, token" in result.output
    for wrong, words in (("bytes", "--drift needs --tokenizer FOLDER"), ("no/where", "no folder 'no/where'")):
        with pytest.raises(InputError, match=words):
            CliRunner().invoke(app, ["data", str(path), "--tokenizer", wrong, "--drift"], catch_exceptions=False)


def test_data_prints_a_table(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat))
    result = CliRunner().invoke(app, ["data", str(path), "--tokenizer", "bytes"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "separate rows" in result.output and "1 conversation of 1 task " in result.output


def test_doctor_self_check_is_exact() -> None:
    assert self_check("aot_eager") <= 1e-10


def test_doctor_reports_the_installation() -> None:
    findings = _json(["doctor", "--inner", "aot_eager", "--json"])
    assert findings["torch"] == torch.__version__.split("+")[0] or findings["torch"] == torch.__version__
    assert findings["backend registered"] is True
    assert findings["problems"] == []


def test_doctor_lists_what_is_replaced() -> None:
    listed = CliRunner().invoke(app, ["doctor", "--patches", "--json"], catch_exceptions=False)
    items = json.loads(listed.output)
    assert len(items) == len(PATCHES) and all(item["symbol"] and item["why"] and item["test"] for item in items)
    shown = CliRunner().invoke(app, ["doctor", "--patches"], catch_exceptions=False)
    assert "TensorVariable.method_requires_grad_" in shown.output and "behind the embedding" in shown.output
    with pytest.raises(InputError, match="--patches prints a table"):
        CliRunner().invoke(app, ["doctor", "--patches", "--zoo"], catch_exceptions=False)


def test_doctor_fails_on_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treefx.cli.doctor.self_check", lambda inner: 0.059)
    result = CliRunner().invoke(app, ["doctor", "--inner", "aot_eager", "--json"])
    assert result.exit_code == 1
    assert "off by 5.9e-02" in json.loads(result.stdout)["problems"][0]


def test_doctor_fails_on_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treefx.cli.doctor.self_check", lambda inner: float("nan"))
    assert CliRunner().invoke(app, ["doctor", "--inner", "aot_eager"]).exit_code == 1


# Models and batches


def test_make_config_refuses_what_transformers_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match="model must be an architecture .* got 'lama'"):
        make_config("lama", vocab_size=32)
    with pytest.raises(InputError, match="multiple of 64, got 100"):
        make_config("llama", vocab_size=32, hidden_size=100)
    path = tmp_path / "config.json"
    with pytest.raises(InputError, match="cannot read a model configuration"):
        make_config(str(path), vocab_size=32)
    path.write_text("{}")
    with pytest.raises(InputError, match="key 'model_type'"):
        make_config(str(path), vocab_size=32)


def test_make_config_reads_a_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_config("qwen3", vocab_size=64).to_json_file(tmp_path / "config.json")
    config = make_config(str(tmp_path / "config.json"), vocab_size=100)
    assert (config.model_type, config.hidden_size, config.vocab_size) == ("qwen3", 64, 100)


def test_missing_transformers_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install"):
        make_config("llama", vocab_size=32)


@pytest.mark.parametrize(("prefix", "suffix"), [(0, 5), (7, 1), (448, 64)])
def test_shared_prefix_batch_has_the_tokens_it_promises(prefix: int, suffix: int) -> None:
    batch = shared_prefix_batch(8, prefix, suffix, 512)
    forest = Forest.from_padded(batch.input_ids, batch.attention_mask)
    assert (forest.raw_tokens, forest.num_tokens) == (8 * (prefix + suffix), prefix + 8 * suffix)


def test_shared_prefix_batch_refuses_too_small_a_vocabulary() -> None:
    with pytest.raises(InputError, match="vocab_size=4"):
        shared_prefix_batch(8, 1, 1, 4)


# The main job


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return scripted_conversations(2, 2)


def test_prepare_batches_has_full_batches_of_one_shape(conversations: list[Conversation]) -> None:
    tokenizer = make_tokenizer(conversations, "bytes")
    prepared = prepare_batches(conversations, tokenizer, steps=3, rows=4, max_length=2048, pad_multiple=2048)
    assert [batch.shape for batch in prepared.batches] == [(4, 2048)] * 3
    assert prepared.too_long == sum(len(row) > 2048 for row in _rows(conversations)) < prepared.rows


def _rows(conversations: list[Conversation]) -> list[Any]:
    from treefx.data import ByteTokenizer, make_samples

    return make_samples(conversations, ByteTokenizer())


def test_prepare_batches_refuses_a_limit_below_every_row(conversations: list[Conversation]) -> None:
    tokenizer = make_tokenizer(conversations, "bytes")
    with pytest.raises(InputError, match="max_length must admit at least one row"):
        prepare_batches(conversations, tokenizer, steps=1, rows=2, max_length=10)
    with pytest.raises(InputError, match="'bpe' or 'bytes', got 'words'"):
        make_tokenizer(conversations, "words")


def test_gradient_error_finds_the_worst_parameter() -> None:
    reference = {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([1e-3]), "zero": torch.tensor([1e-12])}
    gradients = {"a": torch.tensor([2.0, 1.1]), "b": torch.tensor([1.2e-3]), "zero": torch.tensor([1e-9])}
    error, name = gradient_error(gradients, reference)
    assert name == "b" and error == pytest.approx(0.2, rel=1e-3)
    with pytest.raises(KeyError):
        gradient_error({"a": reference["a"]}, reference)


def test_comparison_starts_from_equal_weights_and_reports(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_model(make_config("llama", vocab_size=64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [shared_prefix_batch(4, 12, 4, 64, seed=seed) for seed in range(2)]
    runs = [TrainingRun(model, "none"), TrainingRun(model, "treefx", options={"inner": "aot_eager"})]
    records = compare_training(runs, batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [(record.raw_tokens, record.tokens) for record in records] == [(64, 28)] * 2
    reference = reference_gradients(model, batches[0])
    report = TrainingReport(
        records=records,
        backend="treefx",
        baseline="none",
        compile_seconds={run.backend: run.compile_seconds for run in runs},
        gradient_errors={run.backend: gradient_error(run.first_gradients, reference)[0] for run in runs},
    )
    assert max(report.gradient_errors.values()) < 1e-5 and report.loss_error < 1e-6
    # The second step has seen an optimizer step: weights stayed together.
    assert records[1].losses["treefx"] == pytest.approx(records[1].losses["none"], rel=1e-4)
    assert report.token_bound == pytest.approx(64 / 28) and report.padded_share == 0
    report.draw(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(report.to_dict()))["steps"][1]["tokens"] == 28


def test_a_median_leaves_out_the_first_step() -> None:
    times = [(8.0, 9.0), (4.0, 1.0), (6.0, 2.0), (9.0, 1.0)]
    records = [
        StepRecord(
            step=step, rows=1, length=4, raw_tokens=4, tokens=2, losses={"a": 1.0, "b": 1.0}, seconds={"a": a, "b": b}
        )
        for step, (a, b) in enumerate(times)
    ]  # fmt: skip
    report = TrainingReport(records=records, backend="b", baseline="a", compile_seconds={"a": 1.0, "b": 1.0})
    assert report.median_speed_up == 4.0 and report.to_dict()["median_speed_up"] == 4.0
    assert any("4.00 in the median step after the first" in line for line in report.lines())


def test_bench_step_refuses_wrong_results() -> None:
    pytest.importorskip("transformers")

    def halved(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *args: tuple(value * 0.5 for value in graph(*args))

    torch._dynamo.register_backend(halved)
    case = bench_step.StepCase("tiny", 6, 2)
    with pytest.raises(bench_step.WrongResultError, match="no time is reported"):
        bench_step.run(
            hidden_size=64,
            layers=1,
            rows=2,
            vocab_size=32,
            repeats=1,
            backend="halved",
            baseline="none",
            cases=[case],
        )


def test_bench_step_reports_the_share_of_the_bound() -> None:
    pytest.importorskip("transformers")
    case = bench_step.StepCase("tiny", 6, 2)
    (record,) = bench_step.run(
        hidden_size=64,
        layers=1,
        rows=2,
        vocab_size=32,
        repeats=1,
        backend="aot_eager",
        baseline="none",
        cases=[case],
    )
    assert record["token_bound"] == 16 / 10
    assert record["share_of_bound"] == pytest.approx(float(str(record["speed_up"])) / 1.6)
    assert float(str(record["gradient_error"])) < 1e-5
