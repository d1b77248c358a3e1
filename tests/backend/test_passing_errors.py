"""Errors of the machine at one moment: the call is exact, a later one shares again; dumps never change what runs."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.models import TinyLM
from tests.oracle import FLOAT64, compile_with
from tests.spellings import SPELLINGS
from treefx.kernels import dumps
from treefx.passes.packing import kernel_sources
from treefx.passes.runner import Pass, run_passes
from treefx.runtime import analyses, shapes

IDS = torch.tensor([[5, 6, 7, 8, last] for last in (11, 12, 13, 14)])


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def tiny() -> tuple[nn.Module, Any]:
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1).double()
    return model, compile_with(model, inner="eager")


def step(model: nn.Module, compiled: Any) -> tuple[str, str | None]:
    """One step, equal to the eager model's; how it ran, and why not packed."""
    found = []
    for call in (compiled, model):
        model.zero_grad(set_to_none=True)
        loss: Tensor = call(input_ids=IDS).logits.logsumexp(-1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=FLOAT64, atol=FLOAT64)
    stats = treefx.inspect(compiled).stats
    return stats["ran"], stats["fallback"]


class Failing:
    """A function that raises at its first calls, and counts them."""

    def __init__(self, function: Any, error: BaseException, times: int) -> None:
        self.function, self.error, self.times, self.calls = function, error, times, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.function(*args, **kwargs)


PLACES = {"analysis": (analyses, "analyse"), "rewriting": (shapes, "rewrite"), "compiling": (shapes, "compile_variant")}


def fail(monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, times: int = 1) -> Failing:
    module, name = PLACES[place]
    failing = Failing(getattr(module, name), error, times)
    monkeypatch.setattr(module, name, failing)
    return failing


ERRORS = [MemoryError("full"), OSError(28, "No space left"), torch.OutOfMemoryError("full")]


@pytest.mark.parametrize(("place", "error"), zip(PLACES, ERRORS, strict=True))
def test_the_next_call_shares_again(place: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = tiny()
    fail(monkeypatch, place, error)
    ran, reason = step(model, compiled)
    assert ran == "ordinary" and reason is not None and type(error).__name__ in reason and "later call" in reason
    assert step(model, compiled) == ("packed", None)


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_reaches_the_caller_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = tiny()
    fail(monkeypatch, place, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        compiled(input_ids=IDS)
    assert step(model, compiled) == ("packed", None)


def test_what_stays_is_tried_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = tiny()
    failing = fail(monkeypatch, "analysis", MemoryError("full"), times=6)
    ran = [step(model, compiled)[0] for _ in range(64)]
    assert failing.calls < 12
    assert ran[:20] == ["ordinary"] * 20 and ran[-1] == "packed"


def test_errors_of_the_graph_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = tiny()
    failing = fail(monkeypatch, "analysis", ValueError("no such graph"), times=1000)
    for _ in range(3):
        ran, reason = step(model, compiled)
        assert ran == "ordinary" and reason is not None and "no such graph" in reason and "later" not in reason
    assert failing.calls == 1


def test_a_forest_names_the_error_and_runs_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = tiny()
    forest = treefx.Forest.from_sequences(IDS.tolist())
    fail(monkeypatch, "analysis", MemoryError("full"))
    with treefx.use(forest), pytest.raises(treefx.UnsupportedError, match=r"MemoryError: full; a later call"):
        compiled(**forest.model_inputs())
    with treefx.use(forest):
        logits = compiled(**forest.model_inputs()).logits
    paths = [logits[0, path] for path in forest.token_of]
    torch.testing.assert_close(torch.stack(paths), model(input_ids=IDS).logits, rtol=FLOAT64, atol=FLOAT64)


# Dumps ----------------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TREEFX_DUMP_DIR", str(file))
    monkeypatch.setattr(dumps, "_refused", [])
    model, compiled = tiny()
    with pytest.warns(UserWarning, match=r"TREEFX_DUMP_DIR.*left out") as caught:
        assert step(model, compiled) == ("packed", None)
    assert sum("TREEFX_DUMP_DIR" in str(item.message) for item in caught) == 1


def test_a_graph_that_cannot_be_printed_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_DUMP_DIR", str(tmp_path))
    gm = torch.fx.symbolic_trace(nn.Identity())
    setattr(gm, "print_readable", Failing(None, RuntimeError("spoiled"), 1000))
    assert run_passes([Pass("same", lambda gm, work: gm, "trace")], gm, None, {}) is gm
    assert {path.read_text() for path in tmp_path.glob("passes/*.after.py")} == {
        "# not printed: RuntimeError: spoiled\n"
    }


@pytest.mark.parametrize("target", ["write_text", "kernel_source"])
def test_dumps_that_fail_are_left_out(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(dumps, "_refused", [])
    owner: Any = {"write_text": Path, "kernel_source": kernel_sources}[target]
    name = "kernel_source_of" if target == "kernel_source" else target
    monkeypatch.setattr(owner, name, Failing(None, RuntimeError("spoiled"), 1000))
    model, compiled = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert step(model, compiled) == ("packed", None)
