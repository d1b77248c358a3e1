"""Records of measurements, of cases that take little time, are valid against the schemas that ``--json`` promises.

Those of other measurements are held against them where they are tested.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.validation import assert_measured, record_of
from treefx.forests.forest import Forest
from treefx.tools.bench import assign, context, forest, mixers, plan, sampler, step
from treefx.tools.bench.memory import MemoryCase, measure

fastjsonschema = pytest.importorskip("fastjsonschema", reason="pip install -e '.[test]' brings it")

ROWS = [np.arange(9), np.concatenate([np.arange(6), np.arange(20, 24)]), np.arange(40, 47)]


def of_memory() -> list[dict[str, Any]]:
    return [
        measure(
            MemoryCase(name="sharing", rows=2, prefix=6, suffix=2, vocab_size=61, hidden_size=64, layers=1), "eager"
        )
    ]


def of_step() -> list[dict[str, Any]]:
    sizes: dict[str, Any] = {"hidden_size": 64, "layers": 1, "rows": 2, "vocab_size": 61, "repeats": 1}
    return step.run(**sizes, backend="aot_eager", baseline="eager", cases=[step.StepCase("small", 6, 3)])


SMALL: dict[str, Any] = {
    "assign": lambda: [assign._measure("GRPO", assign.group_prompts(3, 4), 2)],
    "context": lambda: [context._measure("rollouts", context.rollouts(64, 4, 32), 2)],
    "forest": lambda: [forest._time_case("rows", partial(Forest.from_sequences, [row.tolist() for row in ROWS]))],
    "memory": of_memory,
    "mixers": lambda: mixers.run(width=16, heads=2, head_dim=8, repeats=1, cases=[mixers.Case(2, 12, 6)]),
    "plan": lambda: [plan._measure("rows", ROWS, limit) for limit in (12, 0)],
    "step": of_step,
}


@pytest.mark.parametrize("command", SMALL)
def test_records_are_valid(command: str) -> None:
    assert_measured(command, SMALL[command]())


def test_records_of_sampled_trajectories(tmp_path: Path) -> None:
    chat = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    path = tmp_path / "chats.jsonl"
    path.write_text(2 * chat, encoding="utf-8")
    options: dict[str, Any] = {"max_tokens": 64, "tokenizer": "bytes", "vocab_size": 300, "json": True}
    assert_measured("sampler", sampler.run([path], **options))


@pytest.mark.parametrize("command", ["forest", "overlap", "parts"])
def test_a_record_of_another_form_is_not_valid(command: str) -> None:
    record = record_of(command)
    assert_measured(command, record)
    name = next(iter(record))
    lacking = {key: value for key, value in record.items() if key != name}
    for wrong in (record | {"more": 1}, record | {name: None}, lacking):
        with pytest.raises(fastjsonschema.JsonSchemaException):
            assert_measured(command, wrong)
