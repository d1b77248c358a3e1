"""``treefx doctor --zoo``: what it says of models that are right, wrong, refused, broken or not there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from treefx.cli.app import app
from treefx.data import IGNORED, Batch
from treefx.errors import UnsupportedError
from treefx.runtime.records import find
from treefx.tools.bench.zoo import run as zoo
from treefx.tools.bench.zoo.batches import zoo_batches
from treefx.tools.bench.zoo.exact import compiled_in_float64, in_float64, sizes_of_sums
from treefx.tools.bench.zoo.flop_share import flop_share
from treefx.tools.bench.zoo.models import VOCABULARY, WithLoss, ZooModel, zoo_models


class Pooled(nn.Module):
    """An embedding, a mixer of positions and a head."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.mix = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), mix

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mix(self.embed(ids)))
        return logits


def _only(monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module]) -> None:
    monkeypatch.setattr(zoo, "zoo_models", lambda: [ZooModel("only", "here", build)])


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", "--zoo", *arguments])
    return result.exit_code, result.stdout


def test_a_model_that_runs_packed() -> None:
    code, text = _run("--model", "nanogpt-flash", "--json")
    (row,) = json.loads(text)
    assert code == 0 and row["verdict"] == "packed"
    assert max(row["loss_error"], row["gradient_error"]) <= 1e-5
    assert row["packed_share"] == row["packed_share_of_all"] == 1.0
    assert row["tokens"] < row["raw_tokens"] and row["attention_rewritten"] == 2 and row["expansions"] == []


def test_many_batches_through_two_compilations() -> None:
    """Counting operations of a graph for all sizes reads none: it adds no guard."""
    code, text = _run("--model", "nanogpt-flash", "--inner", "eager", "--batches", "5", "--json")
    (row,) = json.loads(text)
    assert code == 0 and len({batch["shape"] for batch in row["batches"]}) == 5
    assert [batch["compiles"] for batch in row["batches"]] == [1, 2, 2, 2, 2] and row["compiles"] == 2
    assert row["packed_share"] == 1.0 and all(batch["verdict"] == "packed" for batch in row["batches"])


def test_shares_are_counted_in_the_sizes_that_were_traced() -> None:
    """A share of the operations is the same for every size, whatever the graph was traced with."""
    model = zoo_models()[0].build()
    found = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="treefx", options={"inner": "eager"}, dynamic=dynamic)
        compiled(**next(iter(zoo_batches(1).values())).model_inputs())
        found.append(flop_share(find(model.parameters())[0].graph.rewrites[0].traced))
    assert found[0].rows == found[1].rows == 0 and min(found[0].packed, found[1].packed) > 1000


def test_another_number_of_batches_is_another_run(tmp_path: Path) -> None:
    run = ("--model", "torchtune-llama3", "--out", str(tmp_path / "zoo.json"), "--inner", "eager")
    assert _run(*run, "--batches", "3")[0] == 0
    refused = CliRunner().invoke(app, ["doctor", "--zoo", *run, "--resume"]).exception
    assert "3 shapes" in str(refused) and "5 x 20 right" in str(refused)


def test_a_mixer_that_is_not_causal_runs_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, lambda: WithLoss(Pooled(lambda x: x + x.mean(1, keepdim=True))))
    code, text = _run("--json")
    (row,) = json.loads(text)
    assert code == 0 and row["verdict"] == "rows" and row["packed_share"] == 0.0
    assert row["code"].startswith("TFX")


def test_wrong_gradients_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that float64 does not explain, of the size that packed positions instead of depths make."""
    original = zoo.take_step

    def skewed(model: nn.Module, call: Any, batch: Any) -> Any:
        loss, gradients = original(model, call, batch)
        return loss, {name: grad * (1.059 if call is not model else 1.0) for name, grad in gradients.items()}

    monkeypatch.setattr(zoo, "take_step", skewed)
    _only(monkeypatch, lambda: WithLoss(Pooled(lambda x: x)))
    code, text = _run("--json")
    (row,) = json.loads(text)
    assert code == 1 and row["verdict"] == "wrong"
    assert row["gradient_error"] == pytest.approx(0.059, rel=1e-2)
    assert row["float64_errors"][0] > 100 * row["float64_errors"][1] and "1.5 are allowed" in row["note"]


@pytest.mark.parametrize(
    ("off", "verdict"),
    [((2.5e-5, 0.0), "rounds"), ((2.5e-5, 1e-8), "wrong"), ((5e-5, 0.0), "wrong"), ((1.2e-5, 1e-8), "rows")],
)
def test_rounding_is_no_wrong_result(monkeypatch: pytest.MonkeyPatch, off: tuple[float, float], verdict: str) -> None:
    """Eager's float32 is off by 1e-5; treefx is off by the first number in float32, by the second in float64."""
    original = zoo.take_step

    def skewed(model: nn.Module, call: Any, batch: Any) -> Any:
        loss, gradients = original(model, call, batch)
        if loss.dtype is torch.float64:
            factor = 1.0 if call is model else 1.0 + off[1]
        else:
            factor = 1.0 + (1e-5 if call is model else off[0])
        return loss, {name: grad * factor for name, grad in gradients.items()}

    monkeypatch.setattr(zoo, "take_step", skewed)
    monkeypatch.setattr(zoo, "_TOLERANCE", 1e-6)
    _only(monkeypatch, lambda: WithLoss(Pooled(lambda x: x)))
    code, text = _run("--json")
    (row,) = json.loads(text)
    assert row["verdict"] == verdict and code == (verdict == "wrong")
    assert row["exactness"] == (None if off[0] != 2.5e-5 else pytest.approx(off[1], abs=1e-12))


@pytest.mark.parametrize(
    ("error", "verdict", "code"),
    [
        (UnsupportedError("no such mixer"), "refused", 0),
        (RuntimeError("broken"), "crashed", 1),
        (ModuleNotFoundError("No module named 'x'"), "not installed", 0),
    ],
)
def test_models_without_a_result(monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str, code: int) -> None:
    def build() -> nn.Module:
        raise error

    _only(monkeypatch, build)
    assert _run()[0] == code
    lines = _run("--markdown")[1].splitlines()
    assert "inner aot_eager" in lines[0]
    lines = lines[2:]
    assert lines[2].startswith(f"| only | {verdict} |") and str(error) in lines[2]


def test_a_run_goes_on_where_it_was_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What has a verdict is kept; what crashed is checked again; another inner compiler is another run."""
    built: list[str] = []

    def model(name: str, broken: bool = False) -> ZooModel:
        def build() -> nn.Module:
            built.append(name)
            if broken:
                raise RuntimeError("broken")
            return WithLoss(Pooled(lambda x: x))

        return ZooModel(name, "here", build)

    run = ("--out", str(tmp_path / "zoo.json"), "--inner", "eager", "--json")
    monkeypatch.setattr(zoo, "zoo_models", lambda: [model("first"), model("second", broken=True)])
    assert _run(*run)[0] == 1
    assert "--resume" in str(CliRunner().invoke(app, ["doctor", "--zoo", *run]).exception)
    monkeypatch.setattr(zoo, "zoo_models", lambda: [model("first"), model("second"), model("third")])
    code, text = _run(*run, "--resume")
    assert code == 0 and built == ["first", "second", "second", "third"]
    rows = json.loads(text)
    assert [row["model"] for row in rows] == ["first", "second", "third"]
    assert [batch["shape"] for batch in rows[0]["batches"]] == ["5 x 20 right", "4 x 27 left"]
    other = CliRunner().invoke(app, ["doctor", "--zoo", *run, "--resume", "--inner", "aot_eager"])
    assert "inner compiler eager" in str(other.exception)


def test_the_second_batch_decides_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_long(x: Tensor) -> Tensor:
        if x.shape[1] > 20:
            raise ValueError("too long")
        return x

    _only(monkeypatch, lambda: WithLoss(Pooled(refuse_long)))
    code, text = _run("--inner", "eager", "--json")
    (row,) = json.loads(text)
    assert code == 0 and row["verdict"] == "fails in PyTorch" and "too long (batch 4 x 27 left)" in row["note"]
    assert row["batches"][0]["verdict"] == "rows" and row["loss_error"] <= 1e-5


def test_what_fails_with_treefx_alone_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    original = zoo.take_step

    def broken(model: nn.Module, call: Any, batch: Batch) -> Any:
        if find(model.parameters()):  # the second batch through treefx
            raise ValueError("too long")
        return original(model, call, batch)

    monkeypatch.setattr(zoo, "take_step", broken)
    _only(monkeypatch, lambda: WithLoss(Pooled(lambda x: x)))
    code, text = _run("--inner", "eager", "--json")
    (row,) = json.loads(text)
    assert code == 1 and row["verdict"] == "crashed" and "too long (batch 4 x 27 left)" in row["note"]


def test_an_unknown_model_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--zoo", "--model", "nonesuch"])
    assert "nonesuch" in str(result.exception) and result.exit_code != 0


def test_casts_to_float32_are_lifted() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.float().softmax(-1, dtype=torch.float32).to(torch.float32)
            hidden = torch.full((3,), torch.finfo(x.dtype).min)  # as XGLM makes its mask
            return y + torch.zeros(3, dtype=torch.float32).type_as(y) + hidden.exp()

    x = torch.randn(2, 3, dtype=torch.float64)
    got = in_float64(Casts(), lambda model: model(x))
    torch.testing.assert_close(got, x.softmax(-1), rtol=1e-15, atol=0)


def test_casts_in_compiled_graphs_are_lifted() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.float().softmax(-1, dtype=torch.float32).to(torch.float32)
            return torch.stack([y, torch.zeros(2, 3, dtype=torch.float32)]).type_as(y)

    x = torch.randn(2, 3, dtype=torch.float64)
    got = compiled_in_float64(Casts(), "eager", lambda model, call: call(x))
    torch.testing.assert_close(got[0], x.softmax(-1), rtol=1e-15, atol=0)


def test_sizes_of_what_rows_contribute() -> None:
    """Two rows of one label and three, which pull a number and a vector to either side: the largest sum counts."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.lambdas = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

    batch = Batch(
        torch.zeros(2, 4).long(), torch.ones(2, 4).long(), torch.tensor([[-100, -100, -100, 8], [-100, 1, 1, 1]])
    )

    def gradients_of(part: Batch) -> dict[str, Tensor]:
        pulled = (part.labels[part.labels != IGNORED].double() - 2).mean()
        return {"scale": pulled, "lambdas": pulled * torch.tensor([2.0, -4.0])}

    assert float(gradients_of(batch)["scale"]) == 0.75
    assert sizes_of_sums(Scaled(), gradients_of, batch) == {"scale": (6 + 3) / 4, "lambdas": 4 * (6 + 3) / 4}


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [((2.6e-6, 1.5e-6), "packed"), ((2.6e-5, 1.5e-6), "wrong"), ((1.4e-5, 1e-5), "packed"), ((2e-3, 2e-3), "wrong")],
)
def test_rounding_is_judged_against_float64(errors: tuple[float, float], verdict: str) -> None:
    """Within the bound of the comparison with eager, or no worse than eager; the first are DiffLlama's."""
    row = zoo.ZooBatch("5 x 20 right", "rows", 0.0, 1.5e-5, packed_share=1.0, float64_errors=errors)
    assert zoo._verdict(row) == verdict
