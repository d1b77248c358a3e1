"""``treefx inspect``: every model of the zoo, the comparison of gradients, and reports without a comparison."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.models import SUITE
from treefx.cli.app import app
from treefx.errors import InputError
from treefx.tools.bench.job.models import make_config, make_model
from treefx.tools.bench.job.synthetic import shared_prefix_batch
from treefx.tools.bench.job.training import gradient_error, reference_gradients
from treefx.tools.bench.zoo import single
from treefx.tools.bench.zoo.exact import in_float64, take_step
from treefx.tools.bench.zoo.models import VOCABULARY, WithLoss, zoo_models
from treefx.tools.bench.zoo.single import GradientCheck, SingleRun, build_model

BATCH = shared_prefix_batch(3, 6, 2, VOCABULARY)
ZOO = (*SUITE, *(model.name for model in zoo_models() if model.library != "transformers"))


def _build(name: str) -> nn.Module:
    try:
        return build_model(name, BATCH.shape[1])
    except InputError as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_inspect_has_a_model_and_a_float64_reference_for_every_name(name: str) -> None:
    """The backend itself is tested elsewhere, on the same table."""
    model = _build(name)
    loss, exact = in_float64(model, lambda twin: take_step(twin, twin, BATCH))
    assert loss.dtype is torch.float64 and bool(loss.isfinite())
    assert exact and all(grad.dtype is torch.float64 for grad in exact.values())


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in SUITE if name != "mamba2"])
def test_every_architecture_takes_other_sizes(name: str) -> None:
    """As ``treefx demo --model`` gives them; Mamba 2 has as many heads as fit its width."""
    config = make_config(name, vocab_size=VOCABULARY, hidden_size=128, layers=2, max_positions=768)
    assert config.get_text_config().hidden_size == 128
    with torch.device("meta"):
        made: Any = make_model(config)
    assert made.get_input_embeddings().embedding_dim == 128


def test_sizes_that_contradict_each_other_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="mamba2 is no configuration of mamba2: .*must equal num_heads"):
        make_config("mamba2", vocab_size=32, hidden_size=128)


@pytest.mark.parametrize("name", ["nanogpt-flash", "phimoe"])
def test_inspect_writes_a_page_and_compares(name: str, tmp_path: Path) -> None:
    page, graph = tmp_path / "pages" / "page.html", tmp_path / "graph.py"
    arguments = ["inspect", name, "--inner", "eager", "--html", str(page), "--out", str(graph)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert page.stat().st_size > 10_000 and "def forward" in graph.read_text()
    reference = "eager float32, which draws" if name == "phimoe" else "eager float64"
    assert f"gradients against {reference}" in done.stdout and f"page: {page}" in done.stdout
    assert "compiling" in done.stderr and "compiling" not in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen33", "did you mean qwen3"),
        ("nosuch", "for example llama"),
        ("nanogtp", "did you mean nanogpt"),
        ("t5", "no causal language model of this t5"),
        ("no/where.json", "cannot read a model configuration"),
    ],
)
def test_a_name_that_is_no_model_gets_a_short_answer(name: str, words: str) -> None:
    done = CliRunner().invoke(app, ["inspect", name])
    assert isinstance(done.exception, InputError) and words in str(done.exception)
    assert len(str(done.exception)) < 400


def test_a_library_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "x_transformers", None)
    with pytest.raises(InputError, match="library 'x-transformers', which cannot be imported: import of"):
        build_model("x-transformers-sinks", 8)


def test_rows_longer_than_a_model_of_one_file_are_refused() -> None:
    with pytest.raises(InputError, match="at most 64 tokens, got 65"):
        build_model("nanogpt", 65)


# The comparison


class Shy(nn.Module):
    """An embedding and a head that cannot run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        if self.head.weight.dtype is torch.float64:
            raise RuntimeError("no double here")
        logits: Tensor = self.head(self.embed(ids))
        return logits


def test_a_reference_that_cannot_run_is_said_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(single, "build_model", lambda name, longest: WithLoss(Shy()))
    page = tmp_path / "page.html"
    arguments = ["inspect", "llama", "--inner", "eager", "--html", str(page)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and page.exists()
    assert "gradients not compared: eager execution in float64 raises RuntimeError: no double here" in done.stdout
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    read = json.loads(done.stdout)
    assert read["gradient_error"] is None and "no double here" in read["not_compared"] and done.stderr == ""


def test_a_graph_that_does_not_exist_loses_nothing_else(tmp_path: Path) -> None:
    page, graph = tmp_path / "page.html", tmp_path / "graph.py"
    arguments = ["inspect", "nanogpt-flash", "--inner", "eager", "--stage", "backward", "--out", str(graph)]
    done = CliRunner().invoke(app, [*arguments, "--html", str(page)])
    assert isinstance(done.exception, InputError) and "never with inner='eager'" in str(done.exception)
    assert page.exists() and not graph.exists() and "gradients against eager float64" in done.stdout


def _run(change: Any) -> GradientCheck:
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)))
    _, gradients = take_step(model, model, BATCH)
    gradients = {name: grad.clone() for name, grad in gradients.items()}
    change(gradients)
    return SingleRun(model, model, BATCH, gradients).check_gradients()


def test_wrong_missing_and_nan_gradients_are_noticed() -> None:
    assert not _run(lambda found: None).is_wrong
    assert _run(lambda found: found["model.1.weight"].mul_(1.01)).is_wrong
    assert _run(lambda found: found.pop("model.1.bias")).parameter == "model.1.bias"
    nan = _run(lambda found: found["model.1.bias"].fill_(float("nan")))
    assert nan.is_wrong and nan.parameter == "model.1.bias"


def test_eager_that_is_far_off_itself_is_no_random_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of decays in qwen3_next all but cancel: eager float32 is off by 3 %, treefx by rounding."""

    def far_off(owner: nn.Module, model: nn.Module, batch: Any) -> Any:
        loss, gradients = take_step(owner, model, batch)
        return loss, {name: grad if grad.dtype is torch.float64 else grad * 1.03 for name, grad in gradients.items()}

    monkeypatch.setattr(single, "take_step", far_off)
    check = _run(lambda found: None)
    assert check.reference == "eager float64" and check.error < 1e-4 and not check.is_wrong  # type: ignore[operator]
    assert _run(lambda found: found["model.1.weight"].mul_(1.3)).error > 0.1  # type: ignore[operator]


def test_inspect_fails_when_gradients_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = GradientCheck(0.059, "head.weight", 1e-6)
    monkeypatch.setattr(SingleRun, "check_gradients", lambda run: wrong)
    done = CliRunner().invoke(app, ["inspect", "nanogpt", "--inner", "eager"])
    assert done.exit_code == 1 and "5.9e-02 (head.weight)" in done.stdout and "tokens" in done.stdout


def test_the_demo_has_a_reference_for_experts() -> None:
    """transformers runs equal experts as one grouped product, which has no float64."""
    model = make_model(make_config("qwen3_moe", vocab_size=VOCABULARY))
    _, gradients = take_step(model, model, BATCH)
    error, _ = gradient_error(gradients, reference_gradients(model, BATCH))
    assert error < 1e-4
