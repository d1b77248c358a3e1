"""``--json`` of every command is valid against its documented schema, and no command has a ``--json`` without one."""

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import treefx
from tests.cli.validation import assert_valid, record_of
from treefx.cli import app
from treefx.cli.app import COMMANDS
from treefx.cli.schemas import json_schema_of, names

fastjsonschema = pytest.importorskip("fastjsonschema", reason="pip install -e '.[test]' brings it")

CHAT = [{"role": role, "content": f"{role} says this {n}"} for n in range(2) for role in ("user", "assistant")]

RUN = {
    "treefx.data/1": "data ROLLOUTS --tokenizer bytes",
    "treefx.demo/1": "demo --steps 1 --rows 1 --backend eager --baseline eager",
    "treefx.doctor/1": "doctor --inner eager",
    "treefx.doctor.patches/1": "doctor --patches",
    "treefx.doctor.zoo/1": "doctor --zoo --model nanogpt-flash --inner eager --batches 1",
    "treefx.report/1": "explain llama --batch 2x4+2",
    "treefx.fuzz/1": "fuzz --programs 1 --family tokens --inner eager --out OUT",
    "treefx.inspect/1": "inspect llama --inner eager --rows 2 --prefix 3 --suffix 2",
    "treefx.plan/1": "plan ROLLOUTS --tokenizer bytes",
    "treefx.plan.strategies/1": "plan ROLLOUTS --tokenizer bytes --compare",
    "treefx.plan.ranks/1": "plan ROLLOUTS --tokenizer bytes --ranks 2",
    "treefx.simulate.t3/1": "simulate t3 --model MODEL",
    "treefx.simulate.chunks/1": "simulate chunks --gemm-ms 2 --mib 64 --link-gbps 50",
}
"""The cheapest form of each, by what it prints."""

MEASURED = {
    "forest": "forest.run", "attention --device cpu": "attention.cpu.run",
    "kernel": "attention.kernel.run_with_progress",
    "host": "attention.host.run", "gpu --stage correct --rehearse": "gpu.stages.run", "mixers": "mixers.run",
    "plan": "plan.run", "sampler": "sampler.run", "parts": "parts.measure_peaks", "assign": "assign.run",
    "context": "context.run", "overlap": "overlap.run.run", "large": "large.run", "step": "step.run",
    "shapes": "shapes.run", "calls": "calls.run", "first-step": "first_step.run", "trainer": "trainer.run",
    "trainers": "trainers.run.run", "trl": "trl.run.run", "memory": "memory.run",
    "unshared": "unshared.run", "calibrate": "calibrate.run",
}  # fmt: skip
"""Measurements that take minutes: the function in ``treefx.tools.bench`` that returns their records."""
MORE = {"mixers": "mixers.run_models", "parts": "policies.measure_policies"}


def with_json(command: Any, path: str) -> Iterator[str]:
    """Paths of a command and of those in it that have ``--json``."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from with_json(inner, f"{path} {name}")
    if any("--json" in item.opts for item in command.params):
        yield path


def test_every_command_with_json_is_here() -> None:
    found = {path for name, command in COMMANDS.items() for path in with_json(command.load(name), name)}
    split = [words.split() for words in RUN.values()]
    covered = {" ".join(words[: 2 if words[0] == "simulate" else 1]) for words in split}
    assert found == covered | {f"bench {words.split()[0]}" for words in MEASURED}
    printed = RUN.keys() | {f"treefx.bench.{words.split()[0]}/1" for words in MEASURED}
    assert set(names()) - {"treefx.observation/1"} == printed


@pytest.mark.parametrize("schema", RUN)
def test_what_commands_print_is_valid(schema: str, tmp_path: Path) -> None:
    rollouts = tmp_path / "chats.jsonl"
    rollouts.write_text("".join(json.dumps({"messages": CHAT[: 2 * n]}) + "\n" for n in (1, 2)), encoding="utf-8")
    from treefx.tools.simulate.models import MODELS

    places = {"ROLLOUTS": str(rollouts), "OUT": str(tmp_path / "fuzz"), "MODEL": MODELS[0].name}
    arguments = [places.get(word, word) for word in RUN[schema].split()]
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert_valid(done.stdout, schema)


@pytest.mark.parametrize("command", MEASURED)
def test_measurements_print_their_records(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print records of the documented form; ``tests/tools/bench`` checks real records against it."""
    name = command.split()[0]
    forms = {"parts": record_of("parts"), "unshared": {"models": [record_of("unshared")["models"][0]]}}

    def stand_in(place: str, records: list[Any]) -> None:
        module, _, function = f"treefx.tools.bench.{place}".rpartition(".")
        measure: Callable[..., Any] = lambda *given, **options: [dict(item) for item in records]  # noqa: E731
        monkeypatch.setattr(import_module(module), function, measure)

    if name == "gpu":
        stand_in(MEASURED[command], record_of("gpu")["records"])
    else:
        stand_in(MEASURED[command], [next(iter(forms[name].values()))[0]] if name in forms else [record_of(name)])
    if name in MORE:
        stand_in(MORE[name], forms[name]["policies"] if name in forms else [record_of(name)])
    done = CliRunner().invoke(app, ["bench", *command.split(), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert_valid(done.stdout, f"treefx.bench.{name}/1")


def test_a_record_with_another_field_is_not_valid() -> None:
    valid = fastjsonschema.compile(json_schema_of("treefx.simulate.chunks/1"))
    record = {"schema": "treefx.simulate.chunks/1", "best_chunks": 2, "seconds": {"1": 0.5}}
    assert valid(record) == record
    for wrong in (record | {"more": 1}, record | {"best_chunks": "2"}, {**record, "seconds": {"1": "0.5"}}):
        with pytest.raises(fastjsonschema.JsonSchemaException):
            valid(wrong)
    with pytest.raises(KeyError):
        json_schema_of("treefx.simulate.chunks/0")


@pytest.mark.parametrize("kind", [treefx.Report, treefx.Observation])
def test_records_of_another_version_are_refused_by_name(kind: Any) -> None:
    name = kind.__name__.lower()
    for text in (f'{{"schema": "treefx.{name}/0"}}', f'{{"schema": "treefx.{name}/2"}}', "{}", "[]", "no"):
        with pytest.raises(treefx.InputError, match=f"a {name} should"):
            kind.from_json(text)
