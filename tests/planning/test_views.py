"""What people and programs see of a plan: tables, pictures, JSON, the command line, and the policies of others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from typer.testing import CliRunner

from tests.planning.costs import linear_cost
from tests.strategies import Rows, row_batches
from treefx.cli.app import app
from treefx.cli.plan import _SAMPLE_MODEL, parse_bytes, read_dimensions
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.planning.cost.analytic import Dimensions, estimate_cost
from treefx.planning.cost.states import PerRun, StateCost
from treefx.planning.execution.nonnegative import fit_nonnegative
from treefx.planning.search.planner import plan
from treefx.planning.search.policies import compare_policies, plan_policy
from treefx.planning.search.strategies import strategy_names
from treefx.planning.views.compare import compare_strategies, draw_comparison

STATES = StateCost(
    state_bytes=3.0, gradient_bytes=3.0, entering=PerRun(2.0, 4.0, 5.0, 4.0), leaving=PerRun(0.0, 1.0, 3.0, 1.0),
    chain=PerRun(0.0, 2.0, 3.0, 2.0),
)  # fmt: skip
ROWS = [[*range(20), *range(100 * row, 100 * row + 30)] for row in range(1, 5)]


def test_explain_names_every_part_and_policy() -> None:
    found = plan(Forest.from_sequences(ROWS), linear_cost(part_seconds=1.0), 65)
    text = found.explain()
    assert text.splitlines()[0] == repr(found)
    lines = [line.split() for line in text.splitlines()]
    for part, size in zip(found.parts, found.sizes, strict=True):
        (row,) = [line for line in lines if len(line) > 8 and line[0] == str(part.index)]
        assert row[3] == str(size.tokens) and row[4] == str(size.boundary)
    for policy in ("treefx", "uncut", "separate rows", "micro-batches", "one branch"):
        assert f"\n{policy} " in text
    assert all(f"\n{name} " in text for name in ("under", "keep", "boundary", "outgoing", "held above", "binds"))


def test_the_table_of_parts_fits_a_terminal() -> None:
    cost = estimate_cost(Dimensions(**_SAMPLE_MODEL, bytes_per_number=2), flops_per_second=2e13)
    rows = [[*range(300), *range(10_000 * row, 10_000 * row + 2500)] for row in range(1, 7)]
    found = plan(Forest.from_sequences(rows), cost, 8 * 2**30)
    lines = found.explain().splitlines()
    assert len(found.parts) > 2 and any("MiB" in line and "GiB" in line for line in lines)
    assert max(map(len, lines[1:])) <= 80


def test_explain_of_very_many_parts_says_what_it_leaves_out() -> None:
    found = plan(Forest.from_sequences([[row, row + 1000] for row in range(100)]), linear_cost(), 2)
    assert len(found.parts) == 100
    assert "40 more not shown" in found.explain()


def test_json_holds_every_token_once() -> None:
    found = plan(Forest.from_sequences(ROWS), linear_cost(part_seconds=1.0), 65)
    read = json.loads(found.to_json())
    tokens = [k for part in read["parts"] for start, stop in part["intervals"] for k in range(start, stop)]
    assert sorted(tokens) == list(range(found.forest.num_tokens))
    assert read["peak_bytes"] == found.peak_bytes == max(step["peak_bytes"] for step in read["steps"])
    assert [(step["kind"], step["part"]) for step in read["steps"]] == [(s.kind, s.part) for s in found.steps]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_is_written(tmp_path: Path, suffix: str) -> None:
    found = plan(Forest.from_sequences(ROWS), linear_cost(store=0.1), 33)
    assert found.recomputed_tokens
    target = tmp_path / f"plan.{suffix}"
    found.draw(target)
    assert target.stat().st_size > 5000
    if suffix == "svg":
        text = target.read_text()
        assert "limit" in text and "</svg>" in text


@settings(max_examples=40, deadline=None)
@given(rows=row_batches())
def test_policies_compute_what_their_definitions_say(rows: Rows) -> None:
    forest = Forest.from_sequences(rows)
    limit = max(map(len, rows)) + 3
    found = plan(forest, linear_cost(store=0.0, part_seconds=1.0), limit)
    outcome = {item.policy: item for item in compare_policies(found)}
    assert outcome["uncut"].forward_tokens == forest.num_tokens
    assert outcome["separate rows"].forward_tokens == forest.raw_tokens
    assert outcome["treefx"].forward_tokens == forest.num_tokens + found.recomputed_tokens
    inner = {tuple(row[:k]) for row in rows for k in range(len(row) + 1)}
    forks = [p for p in inner if p and len({q[len(p)] for q in inner if len(q) == len(p) + 1 and q[: len(p)] == p}) > 1]
    twice = {fork[:k] for fork in forks for k in range(1, len(fork) + 1)}
    assert outcome["one branch"].forward_tokens == forest.num_tokens + len(twice)
    batches: list[set[tuple[int, ...]]] = []
    for row in sorted(rows):
        path = {tuple(row[:k]) for k in range(1, len(row) + 1)}
        if batches and len(batches[-1] | path) <= limit:
            batches[-1] |= path
        else:
            batches.append(path)
    assert outcome["micro-batches"].parts == len(batches)
    assert outcome["micro-batches"].forward_tokens == sum(map(len, batches))
    assert all(item.fits == (item.peak_bytes <= limit) for item in outcome.values())
    for item in outcome.values():
        runs = plan_policy(found, item.policy)
        tokens = sum(run.forest.num_tokens + run.recomputed_tokens for run in runs)
        assert (sum(len(run.parts) for run in runs), tokens) == (item.parts, item.forward_tokens)


@settings(max_examples=20, deadline=None)
@given(rows=row_batches())
def test_peaks_of_policies_count_masks(rows: Rows) -> None:
    """As plans that carry them out do; without masks the uncut forest seemed to fit where the planner had to cut it."""
    forest = Forest.from_sequences(rows)
    cost = replace(linear_cost(store=0.0, part_seconds=1.0), mask_element_bytes=0.5)
    found = plan(forest, cost, 3 * max(map(len, rows)) + 9)
    for item in compare_policies(found):
        assert item.peak_bytes == max(run.peak_bytes for run in plan_policy(found, item.policy)), item
    uncut = next(item for item in compare_policies(found) if item.policy == "uncut")
    assert len(found.parts) == 1 or not uncut.fits
    with_states = replace(cost, states=STATES)
    found = plan(forest, with_states, found.peak_bytes + 500)
    for item in compare_policies(found):
        assert item.peak_bytes == max(run.peak_bytes for run in plan_policy(found, item.policy)), item


@pytest.mark.parametrize(("text", "value"), [("24GiB", 24 * 2**30), ("1.5 MB", 1_500_000), ("1e9", 10**9), ("7b", 7)])
def test_bytes_are_read_with_their_units(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "12 apples", "-3GiB", "0", "1.2.3MB", "1e999"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="memory must be"):
        parse_bytes(text)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {
        "model_type": "qwen3",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(fields))
    return path


def test_command_plans_rollouts_for_a_configuration(config: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    arguments = ["plan", "--memory", "160MiB", "--model", str(config), "--tokenizer", "bytes", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--draw", str(picture)])
    assert done.exit_code == 0, done.output
    read = json.loads(done.stdout)
    assert read["peak_bytes"] <= read["memory_limit_bytes"] == 160 * 2**20
    assert len(read["parts"]) > 1
    assert {item["policy"] for item in read["policies"]} >= {"treefx", "micro-batches", "one branch"}
    assert picture.stat().st_size > 5000


def _plan_command(config: Path, *options: str) -> Any:
    arguments = ["plan", "--model", str(config), "--tokenizer", "bytes", "--memory", "200MiB", *options]
    return CliRunner().invoke(app, arguments)


def test_command_shows_strategies_beside_each_other(config: Path, tmp_path: Path) -> None:
    picture = tmp_path / "strategies.png"
    done = _plan_command(config, "--compare", "--draw", str(picture))
    assert done.exit_code == 0, done.output
    for name in ("auto", *strategy_names()):
        assert f"\n{name} " in done.stdout
    assert "strategy 'exact' tries every way to cut" in done.stdout
    assert picture.stat().st_size > 20_000


def test_the_fastest_strategy_of_a_comparison_is_auto() -> None:
    attempts = compare_strategies(Forest.from_sequences(ROWS), linear_cost(part_seconds=1.0), 65)
    figures = {item["strategy"]: item for item in (attempt.to_dict() for attempt in attempts)}
    assert set(figures) == {"auto", *strategy_names()}
    seconds = [item["seconds"] for item in figures.values() if "seconds" in item]
    assert len(seconds) > 3 and figures["auto"]["seconds"] == min(seconds) < max(seconds)


def test_a_comparison_that_nothing_survives_is_not_drawn(tmp_path: Path) -> None:
    attempts = compare_strategies(Forest.from_sequences(ROWS), linear_cost(), 1)
    assert all("refusal" in attempt.to_dict() for attempt in attempts)
    with pytest.raises(InputError, match="no strategy keeps the limit"):
        draw_comparison(attempts, tmp_path / "none.png")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))
    return saved


def test_a_picture_joins_and_numbers_the_parts(figures: list[Any]) -> None:
    found = plan(Forest.from_sequences(ROWS), linear_cost(part_seconds=1.0), 65)
    found.draw("plan.png")
    tree, memory = figures[0].axes
    (links,) = [item for item in tree.collections if isinstance(item, LineCollection)]
    assert len(links.get_segments()) == len(ROWS)  # one stem, and a child per row
    assert {text.get_text() for text in tree.texts} == {str(part.index) for part in found.parts}
    assert memory.get_ylim()[1] > found.memory_limit_bytes > found.peak_bytes / 2


def test_a_limit_far_above_the_peak_is_written_not_drawn(figures: list[Any]) -> None:
    found = plan(Forest.from_sequences(ROWS), linear_cost(part_seconds=1.0), 10_000)
    found.draw("plan.png")
    memory = figures[0].axes[1]
    assert found.peak_bytes < memory.get_ylim()[1] < 2 * found.peak_bytes
    labels = [text.get_text() for text in memory.get_legend().get_texts()]
    assert any(label.startswith("limit 9.77 KiB, above the axis: the peak is") for label in labels)


def test_a_comparison_names_what_was_refused(figures: list[Any]) -> None:
    rows = [[*range(20), *range(100 * row, 100 * row + 30)] for row in range(1, 12)]
    attempts = compare_strategies(Forest.from_sequences(rows), linear_cost(part_seconds=1.0), 65)
    refused = [attempt.strategy for attempt in attempts if attempt.plan is None]
    draw_comparison(attempts, "all.png")
    assert refused and figures[0].get_supxlabel().endswith(": " + ", ".join(refused))


def test_command_says_what_a_step_costs_on_many_ranks(config: Path) -> None:
    one, eight = (json.loads(_plan_command(config, "--ranks", ranks, "--json").stdout) for ranks in ("1", "8"))
    assert eight["ranks"] == 8 and eight["distinct_tokens"] == one["tokens"]
    assert eight["duplicated_tokens"] > 0 and eight["balance"] >= 1
    assert one["seconds"] / 8 < eight["mean_seconds"] <= eight["seconds"] < one["seconds"]
    assert eight["peak_bytes"] <= 200 * 2**20
    assert "computed on several ranks" in _plan_command(config, "--ranks", "8").stdout
    refused = _plan_command(config, "--ranks", "8", "--compare")
    assert isinstance(refused.exception, InputError) and "expected it without --compare" in str(refused.exception)


def test_command_has_a_model_of_its_own() -> None:
    done = CliRunner().invoke(app, ["plan", "--tokenizer", "bytes"], catch_exceptions=False)
    assert done.exit_code == 0 and "the sizes of Qwen3 0.6B, 596,049,920 parameters" in done.stderr.replace("\n", " ")
    assert done.stdout.startswith("Plan(")


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
def test_architectures_of_the_zoo_have_dimensions(name: str) -> None:
    assert estimate_cost(read_dimensions(name, "bfloat16"), flops_per_second=1e12).resident_bytes > 0


def test_a_model_without_attention_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 1}))
    with pytest.raises(InputError, match="a rwkv has no num_attention_heads"):
        read_dimensions(str(path), "bfloat16")


def test_command_wants_one_source_of_costs(config: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", str(config), "--profile", str(config)])
    assert isinstance(done.exception, InputError)
    done = CliRunner().invoke(app, ["plan", "--profile", str(config)])
    assert "Profile.to_json" in str(done.exception)


def test_estimate_of_a_known_model() -> None:
    """One layer by hand: 4 x 8 residual, 2 x 8 q and output, 2 x 4 K/V, 3 x 16 MLP, and 32 logits, 2 bytes each."""
    sizes = Dimensions(
        layers=1, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=32, parameters=1000,
        active_parameters=1000, bytes_per_number=2,
    )  # fmt: skip
    cost = estimate_cost(sizes, flops_per_second=1e6)
    assert cost.saved(1, 0, 0) == 2 * (32 + 16 + 8 + 48 + 32)
    assert cost.kv_bytes_per_token == 16 and cost.kv_grad_bytes_per_token == 32
    assert cost.resident_bytes == 4000
    assert cost.forward_seconds.token == pytest.approx(2e-3)


def test_nonnegative_fit_against_all_choices_of_free_coefficients() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        features = random.normal(size=(8, 3)) * [1, 100, 1e6]
        target = random.normal(size=8)
        errors = []
        for chosen in range(8):
            free = [i for i in range(3) if chosen >> i & 1]
            found = np.zeros(3)
            if free:
                found[free] = np.linalg.lstsq(features[:, free], target, rcond=None)[0]
            if (found >= 0).all():
                errors.append(np.linalg.norm(features @ found - target))
        fitted = fit_nonnegative(features, target)
        assert (fitted >= 0).all()
        assert np.linalg.norm(features @ fitted - target) == pytest.approx(min(errors))
