"""``treefx bench large``: the three ways agree, peaks keep the limit, and a wrong loss gets no time."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.validation import assert_measured
from treefx.errors import TreefxError
from treefx.tools.bench import large as bench_large

MIB = 2**20


@pytest.fixture
def config(tmp_path: Path) -> str:
    fields = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    fields |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def measure(config: str) -> list[dict[str, Any]]:
    return bench_large.run(model=config, device="cpu", tokens=24, memory_limit_bytes=5 * MIB, inner="aot_eager")


def test_three_ways(config: str) -> None:
    parts, rows, uncut = records = measure(config)
    assert_measured("large", records)
    assert parts["raw_tokens"] == rows["raw_tokens"] == 64 * 4 * 24
    assert 0.98 * 85 * 24 < parts["distinct_tokens"] <= 85 * 24  # spans may begin alike by chance
    assert parts["parts"] > 1 and uncut["parts"] == 1
    assert parts["peak_mib"] <= parts["limit_mib"]
    assert parts["loss"] == pytest.approx(rows["loss"], rel=1e-5)


def test_no_time_for_a_wrong_loss(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_large, "_in_parts", lambda *_: {"loss": 1.01})
    monkeypatch.setattr(bench_large, "_row_by_row", lambda *_: {"loss": 1.0})
    with pytest.raises(TreefxError, match="no time is reported"):
        measure(config)
