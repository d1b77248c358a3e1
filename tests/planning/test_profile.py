"""Profiles: live bytes of graphs, and predictions that hold when parts run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import fx

import treefx
from tests.cli.validation import assert_measured
from treefx.errors import InputError
from treefx.kernels.cpu.rectangles import flash, flash_backward
from treefx.planning.cost.liveness import live_bytes
from treefx.planning.cost.memory import track_peak
from treefx.planning.cost.model import Size, flash_block
from treefx.planning.cost.workspace import bytes_per_pair
from treefx.planning.execution.profile import BLOCK, N, P, Profile, profile
from treefx.planning.search.policies import compare_policies
from treefx.tools.bench import parts as bench_parts
from treefx.tools.bench import policies as bench_policies
from treefx.tools.bench.parts import Runner, run_under_limits
from treefx.tools.bench.policies import run_policies

transformers = pytest.importorskip("transformers")

VOCABULARY = 256


def _forest(seed: int, spans: tuple[int, int] = (100, 500), count: int = 8) -> treefx.Forest:
    random = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(count):
        source = rows[random.integers(len(rows))] if rows else []
        kept = source[: random.integers(1, len(source) + 1)] if source else []
        rows.append(kept + random.integers(0, VOCABULARY, random.integers(*spans)).tolist())
    return treefx.Forest.from_sequences(rows)


@pytest.fixture(scope="module", autouse=True)
def reproducible() -> Iterator[None]:
    """Instead of a fresh Dynamo per test: what the one model of this file is compiled to serves all tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def runner() -> Runner:
    torch.use_deterministic_algorithms(True, warn_only=True)  # as inside of every test, or Dynamo compiles twice
    return Runner("aot_eager", 2, 64, _forest(0), lengths=(32, 128))


@pytest.fixture(scope="module")
def compiled(runner: Runner) -> Any:
    return runner.compiled


@pytest.fixture(scope="module")
def measured(runner: Runner) -> Profile:
    return runner.profile


def test_live_bytes_by_hand() -> None:
    """x [4] and w [4] are given; a dies when b is made, the view of b keeps b."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    a = graph.call_function(torch.ops.aten.add.Tensor, (x, w))
    b = graph.call_function(torch.ops.aten.mul.Tensor, (a, a))
    view = graph.call_function(torch.ops.aten.view.default, (b, [2, 2]))
    c = graph.call_function(torch.ops.aten.exp.default, (view,))
    graph.output((c,))
    gm = fx.GraphModule({}, graph)
    value = torch.zeros(4)
    for node in (x, w, a, b, c):
        node.meta["val"] = torch.zeros(4)
    node_b: torch.Tensor = b.meta["val"]
    view.meta["val"] = node_b.view(2, 2)
    held = value.untyped_storage().nbytes()

    def own(node: fx.Node) -> sympy.Expr:
        return sympy.Integer(5 * (node is b))

    assert live_bytes(gm, own, lambda node: node is w) == [held, 2 * held, 3 * held + 5, 2 * held, 3 * held]
    let_go = live_bytes(gm, own, lambda node: node is w, lambda node: False)
    assert let_go == [held, 2 * held, 2 * held + 5, held, 2 * held]


def test_expressions_are_of_the_sizes_of_a_part(measured: Profile) -> None:
    for name in ("saved", "forward", "backward", "kv"):
        expression = measured.bytes[name]
        assert expression.free_symbols <= {N, P}
        at = float(expression.subs({N: 100, P: 50}).replace(BLOCK, flash_block))
        assert at == pytest.approx(getattr(measured.cost, name)(100, 50, 0), rel=1e-3)
    assert measured.cost.kv_bytes_per_token == 2 * 2 * 32 * 4  # K and V, two layers, one K/V head of 32, float32
    hidden, q, kv, mlp = 64, 64, 32, 160
    per_layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * mlp
    assert measured.flops["forward"].token == 2 * (2 * per_layer + hidden * VOCABULARY)
    assert measured.flops["forward"].pair == 2 * 2 * 2 * q
    assert measured.flops["backward"].pair == 2.5 * measured.flops["forward"].pair
    assert measured.flop_expressions["kv"] != sympy.Integer(0)


def test_no_sample_is_above_its_prediction(measured: Profile) -> None:
    assert {sample.kind for sample in measured.samples} == {"kv", "forward", "backward"}
    for sample in measured.samples:
        assert sample.bytes <= sample.predicted_bytes(measured.cost)
    text = measured.explain()
    assert "saved bytes" in text and "backward seconds" in text and "fitted" in text


def test_profile_survives_being_saved(measured: Profile, tmp_path: Path) -> None:
    measured.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == measured
    with pytest.raises(InputError, match=r"expected what Profile.to_json writes"):
        Profile.from_json("{}")


def test_gradients_stay_as_they_were(compiled: Any, measured: Profile) -> None:
    parameters = list(compiled.parameters())
    kept = [torch.full_like(parameter, 3.0) for parameter in parameters]
    for parameter, grad in zip(parameters, kept, strict=True):
        parameter.grad = grad
    profile(compiled, _forest(0), lengths=(8,))
    assert all(p.grad is grad and bool((grad == 3).all()) for p, grad in zip(parameters, kept, strict=True))
    for parameter in parameters:
        parameter.grad = None


def test_measured_peaks_are_under_the_limits_and_near_the_predictions(runner: Runner) -> None:
    """A small run of `treefx bench parts`, of a forest that was not profiled and runs the same compiled code."""
    forest = _forest(1)
    assert _forest(0).deepest.bit_length() == forest.deepest.bit_length()
    trials = list(run_under_limits(runner, forest))
    assert_measured("parts", {"peaks": [bench_parts._summary(trials)], "policies": []})
    for trial in trials:
        assert len(trial.plan.parts) >= trial.share
        assert trial.measured.bytes <= trial.plan.peak_bytes <= trial.plan.memory_limit_bytes
        assert trial.predicted_per_measured <= 1.1
        assert trial.loss_error <= 1e-5


def test_measured_peaks_of_small_forests_are_under_the_limits(runner: Runner) -> None:
    """About 1,000 tokens: what a part takes whatever its size weighs more than a tenth there, and is counted."""
    for trial in run_under_limits(runner, _forest(0, (40, 200))):
        assert trial.measured.bytes <= trial.plan.peak_bytes <= trial.plan.memory_limit_bytes
        assert trial.loss_error <= 1e-5


def test_what_a_long_forest_takes_per_token_is_counted(runner: Runner) -> None:
    """10,000 tokens: a mark of four bytes for each of them is more than all that is allowed for small tensors."""
    forest = _forest(2, count=32)
    assert _forest(0).deepest.bit_length() == forest.deepest.bit_length() and forest.num_tokens > 10_000
    whole = runner.uncut_bytes(forest)
    for share in (7, 8, 10):
        plan = treefx.plan(forest, runner.profile, whole // share)
        assert runner.run([plan]).bytes <= plan.peak_bytes <= plan.memory_limit_bytes


@pytest.fixture
def windowed(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A sliding window: attention with a boundary runs in tiles of another kind."""
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=100, max_position_embeddings=4096,
    )  # fmt: skip
    monkeypatch.setattr(bench_parts, "make_config", lambda *_, **__: config)
    return Runner("aot_eager", 1, 64, _forest(0), lengths=(32, 128))


def test_windows_stay_under_the_limits(windowed: Runner) -> None:
    """Parts several times as long as those that were measured: nothing of theirs grows with the square."""
    trials = list(run_under_limits(windowed, _forest(0)))
    assert max(len(part) for part in trials[0].plan.parts) > 4 * 128
    for trial in trials:
        assert trial.measured.bytes <= trial.plan.peak_bytes <= trial.plan.memory_limit_bytes


@pytest.mark.parametrize(("tokens", "keys"), [(16, 16), (100, 300), (191, 191), (192, 600), (767, 767), (900, 900)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_the_kernel_are_as_large_as_predicted(tokens: int, keys: int, dtype: torch.dtype) -> None:
    """Measured on one size, said of others: a jump at 192 and at 768 queries."""
    q, k = (torch.zeros(1, count, 2, 32, dtype=dtype).transpose(1, 2) for count in (tokens, keys))
    with track_peak() as forward:
        out, lse = flash(q, k, k, 0.0, False)
    with track_peak() as backward:
        gradients = flash_backward(out, q, k, k, out, lse, 0.0, False)
    for peak, made, per_pair in zip(
        (forward, backward), ((out, lse), gradients), bytes_per_pair(dtype, 32), strict=True
    ):
        block = peak.bytes - sum(x.nbytes for x in made)
        packed = 0 if dtype == torch.float32 else 16 * k.nbytes
        rows = torch.get_num_threads() * min(tokens, 256) * 34 * 4  # of outputs and sums, in the forward
        predicted = per_pair * flash_block(tokens, keys)
        assert block - packed - rows <= predicted <= 1.3 * block


def test_policies_of_others_compute_the_same_gradients_with_more_work(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are run, and `run_policies` compares losses and gradients itself."""
    monkeypatch.setattr(bench_policies, "_ROUNDS", 2)
    forest = _forest(0)
    found = {record["policy"]: record for record in run_policies(runner, forest, share=4)}
    assert_measured("parts", {"peaks": [], "policies": list(found.values())})
    uncut, planned = found["uncut"], found["treefx"]
    assert uncut["flop_ratio"] == 1.0 and uncut["parts"] == 1
    pairs = int((forest.depth + 1).sum())
    flops = runner.profile.flops
    by_hand = sum(flops[run].token * forest.num_tokens + flops[run].pair * pairs for run in ("forward", "backward"))
    assert uncut["gflop"] == pytest.approx(by_hand / 1e9)
    assert planned["fits"] and planned["measured_mib"] <= planned["predicted_mib"]
    for policy in ("separate rows", "micro-batches", "one branch"):
        assert found[policy]["flop_ratio"] > planned["flop_ratio"] >= 1.0
        assert found[policy]["tokens_forward"] > forest.num_tokens
    assert found["separate rows"]["tokens_forward"] == forest.raw_tokens
    assert max(record["gradient_error"] for record in found.values()) <= 1e-5


def test_policies_that_differ_are_not_reported(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row less, as a batch that forgets it would have."""
    right = bench_policies.plan_policy

    def wrong(plan: Any, policy: str) -> Any:
        return right(plan, policy)[: -1 if policy == "separate rows" else None]

    def two(plan: Any) -> Any:
        return [item for item in compare_policies(plan) if item.policy in ("uncut", "separate rows")]

    monkeypatch.setattr(bench_policies, "plan_policy", wrong)
    monkeypatch.setattr(bench_policies, "compare_policies", two)
    monkeypatch.setattr(bench_policies, "_ROUNDS", 1)
    with pytest.raises(treefx.TreefxError, match="separate rows: loss"):
        run_policies(runner, _forest(0), share=4)


def test_what_cannot_be_profiled_is_refused(compiled: Any) -> None:
    with pytest.raises(InputError, match="profile expects a model"):
        profile(lambda: None, _forest(0))
    with pytest.raises(InputError, match="lengths must be positive"):
        profile(compiled, _forest(0), lengths=(0,))
    with pytest.raises(InputError, match="at least 2 tokens"):
        profile(compiled, treefx.Forest.from_sequences([[1], [2]]))


def test_parts_are_measured_at_short_and_at_long_boundaries(measured: Profile) -> None:
    longest = int(_forest(0).row_lengths.max())
    below = {sample.size[:2] for sample in measured.samples if sample.kind == "forward"}
    assert below >= {(n, p) for n in (32, 128) for p in (0, 32, 128)}
    assert (32, longest - 32) in below
    assert all(isinstance(sample.size, Size) and sample.seconds > 0 for sample in measured.samples)
