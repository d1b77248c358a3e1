"""``treefx bench unshared``: ratios, and rows for what cannot be timed."""

import json
import math

import pytest
from torch import nn
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from treefx.cli import app
from treefx.tools.bench import unshared as bench_unshared
from treefx.tools.bench.zoo.models import ZooModel
from treefx.tools.bench.zoo.run import choose


def missing() -> nn.Module:
    raise ImportError("No module named 'elsewhere'")


@pytest.mark.parametrize("more", [[], ["--changing"]])
def test_models_are_timed_and_others_are_named(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (nano,) = choose(["nanogpt-flash"])
    models = [nano, ZooModel("elsewhere", "elsewhere", missing)]
    monkeypatch.setattr(bench_unshared, "choose", lambda names: models)
    result = CliRunner().invoke(
        app, ["bench", "unshared", "--rows", "4", "--repeats", "1", "--inner", "eager", "--json", *more]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    timed, other = found["models"]
    assert_measured("unshared", found)
    assert timed["ran"] == "ordinary", "nothing is shared"
    assert timed["ratio"] == pytest.approx(timed["seconds"] / timed["baseline_seconds"])
    assert found["geometric_mean"] == pytest.approx(timed["ratio"])
    assert "elsewhere" in other["note"] and "ratio" not in other


def test_changing_batches_have_other_sizes_and_share_nothing() -> None:
    batches = bench_unshared._batches(32, 64, 9, changing=True)
    sizes = [tuple(batch.input_ids.shape) for batch in batches]
    assert len(batches) == 9 + 3 and len(set(sizes)) == len(sizes)
    assert all(16 <= b <= 32 and 32 <= t <= 64 for b, t in sizes)
    assert all(len(set(batch.input_ids[:, 0].tolist())) == len(batch.input_ids) for batch in batches)


def test_geometric_mean() -> None:
    assert bench_unshared.geometric_mean([{"ratio": 2.0}, {"ratio": 0.5}, {"note": "failed"}]) == pytest.approx(1.0)
    assert math.isnan(bench_unshared.geometric_mean([]))
