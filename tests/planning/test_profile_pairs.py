"""Attention that holds a number per head, query and key: plans count it, so that parts stay under their limits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import nn

from tests.backend.native import TakesCacheFlag
from tests.models import TinyLM
from tests.planning.test_profile import VOCABULARY, _forest
from tests.spellings import SPELLINGS
from treefx.planning.cost import workspace
from treefx.tools.bench import parts as bench_parts
from treefx.tools.bench.parts import Runner, run_under_limits

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def reproducible() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(**changes: Any) -> nn.Module:
    """One K/V head of two, no window."""
    return _model(transformers.LlamaConfig, **changes)


def gemma2(**changes: Any) -> nn.Module:
    """A softcap, and a window in one of two layers."""
    return _model(
        transformers.Gemma2Config,
        attn_implementation="eager",
        head_dim=32,
        sliding_window=100,
        num_hidden_layers=2,
        **changes,
    )


def _model(kind: Any, **changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 4096}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = kind(**(sizes | heads | changes))
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def relative_bias() -> nn.Module:
    """A learned bias per distance, which is no sum of a query's and a key's term."""
    return TakesCacheFlag(TinyLM(SPELLINGS["relative_bias"], positions=False, layers=1, vocab=VOCABULARY))


CASES: dict[str, Callable[[], nn.Module]] = {
    "float64": lambda: llama().double(),
    "float64, softcap": lambda: gemma2().double(),
    "softcap": gemma2,
    "learned bias": relative_bias,
}


def make_runner(case: str, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...] = (32, 128)) -> Runner:
    torch.manual_seed(0)
    monkeypatch.setattr(bench_parts, "make_model", lambda _: CASES[case]())
    return Runner("aot_eager", 1, 64, _forest(0), lengths=lengths)


@pytest.mark.parametrize("case", CASES)
def test_peaks_are_under_the_predictions_and_the_limits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts several times as long as those measured, whose pairs grow with the square."""
    runner = make_runner(case, monkeypatch)
    longest, shares = 0, []
    for seed in (0, 1):
        for trial in run_under_limits(runner, _forest(seed)):
            assert trial.measured.bytes <= trial.plan.peak_bytes <= trial.plan.memory_limit_bytes
            longest = max(longest, *(len(part) for part in trial.plan.parts))
            shares.append(trial.predicted_per_measured)
            assert trial.loss_error <= (1e-12 if "float64" in case else 1e-5)
    assert longest > 4 * 128
    assert max(shares) <= (1.15 if "float64" in case else 2.0)


@pytest.mark.parametrize(("case", "lengths"), [("float64", (32, 128)), ("softcap", (128, 512))])
def test_without_the_price_of_pairs_a_peak_is_above_its_limit(
    case: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "pair_workspace", lambda node: sympy.Integer(0))
    runner = make_runner(case, monkeypatch, lengths)
    assert any(trial.measured.bytes > trial.plan.memory_limit_bytes for trial in run_under_limits(runner, _forest(1)))
