"""The backend by its name, where accelerate compiles: ``TrainingArguments(torch_compile_backend="treefx")``."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import treefx
from tests.oracle import FLOAT32, Outcome, assert_close
from tests.trainers.support import COMMON, NEEDS_TRAINERS, PROMPT, TAILS, llama, tokenizer

pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)

from accelerate.utils import DynamoBackend, TorchDynamoPlugin  # noqa: E402

from treefx.integrations import accelerate as seam  # noqa: E402


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    seam.compile_with()


def test_the_name_is_one_of_the_list() -> None:
    found = DynamoBackend("TREEFX")
    assert found is DynamoBackend["TREEFX"] is pickle.loads(pickle.dumps(found)) is copy.deepcopy(found)
    assert "TREEFX" in DynamoBackend and DynamoBackend.list().count("TREEFX") == 1
    assert str(found) == found == "TREEFX" and found != DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="TREEFY"):
        TorchDynamoPlugin(backend="treefy")


def test_what_torch_compile_is_called_with() -> None:
    assert TorchDynamoPlugin(backend="treefx").to_kwargs() == {"backend": "treefx", "dynamic": True}
    fast = TorchDynamoPlugin(backend="treefx", mode="max-autotune", dynamic=False)
    assert fast.to_kwargs() == {"backend": "treefx", "options": {"mode": "max-autotune"}, "dynamic": False}
    seam.compile_with({"min_sharing": 1.0, "inner": "eager"})
    own = TorchDynamoPlugin(backend="treefx", options={"inner": "aot_eager"})
    options = {"min_sharing": 1.0, "inner": "aot_eager"}
    assert own.to_kwargs() == {"backend": "treefx", "dynamic": True, "options": options}
    assert TorchDynamoPlugin(backend="inductor", mode="max-autotune").to_kwargs() == {
        "backend": "inductor",
        "mode": "max-autotune",
    }
    with pytest.raises(treefx.ConfigError, match="'outer'"):
        seam.compile_with({"outer": 1})


def test_launchers_do_not_fix_the_sizes_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerate launch`` without any word of it sets this variable."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin(backend="treefx").to_kwargs()["dynamic"] is True
    assert TorchDynamoPlugin(backend="treefx", dynamic=False).to_kwargs()["dynamic"] is False
    assert TorchDynamoPlugin(backend="aot_eager").to_kwargs()["dynamic"] is False
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "True")
    assert TorchDynamoPlugin(backend="treefx").to_kwargs()["dynamic"] is True


def test_by_default_is_where_the_program_names_none(caplog: pytest.LogCaptureFixture) -> None:
    assert TorchDynamoPlugin().to_kwargs() == {}
    seam.compile_with(by_default=True)
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "treefx", "dynamic": True}
    assert not caplog.records
    assert TorchDynamoPlugin(backend="aot_eager").to_kwargs() == {"backend": "aot_eager"}
    assert "AOT_EAGER, not with treefx" in caplog.text


def train(path: Path, model: Any, **arguments: Any) -> tuple[Outcome, Trainer]:
    encode = tokenizer()
    rows = [{"input_ids": ids, "labels": ids} for ids in (encode(PROMPT + tail).input_ids for tail in TAILS)]
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    everything = COMMON | {"gradient_accumulation_steps": 2} | arguments
    trainer = Trainer(model, TrainingArguments(str(path), **everything), train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    updates = {name: (parameter - first[name]).detach() for name, parameter in model.named_parameters()}
    return Outcome(torch.tensor(losses, dtype=torch.float64), updates), trainer


@pytest.mark.parametrize("compiled_before", [False, True], ids=["the trainer compiles", "so has the user"])
def test_the_trainer_compiles_by_name(tmp_path: Path, compiled_before: bool) -> None:
    expected, _ = train(tmp_path, llama())
    seam.compile_with({"inner": "eager"})
    model = llama()
    if compiled_before:
        model.compile(backend="treefx", options={"inner": "eager"})
    got, trainer = train(tmp_path, model, torch_compile=True, torch_compile_backend="treefx")
    assert_close(got, expected, FLOAT32)
    assert trainer.model is model and hasattr(trainer.model_wrapped, "_orig_mod")
    stats = treefx.inspect(model).stats
    assert stats["fallback"] is None and stats["sharing_ratio"] > 1.5
    assert stats["inner"] == "eager" and stats["calls"] == 4
