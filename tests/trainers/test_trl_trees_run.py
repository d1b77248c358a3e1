"""Runs of TRL's AsyncGRPO on a CPU, with a stub in place of its server: losses and updates are those of the rows."""

import json
import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import zoo
from tests.oracle import FLOAT32, Outcome, assert_close
from tests.trainers.leftovers import forget_accelerate
from tests.trainers.support import COMMON, NEEDS_TRAINERS, llama, tokenizer
from treefx.cli.run import environment_for

datasets = pytest.importorskip("datasets", reason=NEEDS_TRAINERS)
pytest.importorskip("trl", minversion="1.16", reason=NEEDS_TRAINERS)

from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

from tests.trainers.trees import (  # noqa: E402
    MODELS,
    PROMPT,
    installed,  # noqa: F401 - a fixture
    packing,
    rows_of,
    tree_of,
    trl_trainer,
)
from treefx.integrations import async_grpo  # noqa: E402
from treefx.integrations.startup import sitecustomize  # noqa: E402

pytestmark = pytest.mark.usefixtures("installed")


class Worker:
    """Hands out samples that were there before."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            arrays = {name: np.asarray(item) if isinstance(item, Tensor) else item for name, item in sample.items()}
            self.rollout_buffer.put(RolloutSample([], [], model_version=0, metrics={}, **arrays))

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("no samples are left")


class Transfer:
    """Sends weights nowhere."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        list(iterator)

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


ROWS, MICRO_BATCHES, STEPS = 4, 2, 2
"""Rows of a micro-batch, those of a step, and steps."""


def drawn_samples() -> list[dict[str, Any]]:
    """Groups of four, more than are trained on, as loaders read ahead."""
    samples, vocabulary = [], len(tokenizer())
    for group in range(MICRO_BATCHES * STEPS + 2):
        torch.manual_seed(group)
        for number, sample in enumerate(rows_of(vocabulary)[:ROWS]):
            shifted = (sample["input_ids"] - 3 + group * 5) % (vocabulary - 3) + 3
            samples.append(
                sample | {"input_ids": shifted, "group_id": group, "advantage": (-1.0) ** number + group / 9}
            )
    return samples


def train(folder: Path, **changes: Any) -> Any:
    """The trainer after its run."""
    forget_accelerate()
    model = llama(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    arguments = COMMON | {
        "model_init_kwargs": {"dtype": torch.float64},
        "gradient_accumulation_steps": MICRO_BATCHES,
        "token_budget": -1,
        "max_steps": STEPS,
        **changes,
    }
    trainer = trl_trainer.AsyncGRPOTrainer(
        str(model.config._name_or_path),
        lambda completions, **_: [0.0] * len(completions),
        trl_trainer.AsyncGRPOConfig(str(folder), **arguments),
        train_dataset=datasets.Dataset.from_list([{"prompt": "the cat"}] * 8),
        processing_class=tokenizer(),
        rollout_worker=Worker(drawn_samples()),
        weight_transfer=Transfer(),
    )
    trainer.train()
    return trainer


def reference_run(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps of SGD in float64 on every row alone, by the loss that TRL's documentation gives."""
    model = llama(folder / "model")
    model.set_attn_implementation("eager")
    samples, losses = drawn_samples(), []
    for start in range(0, STEPS * MICRO_BATCHES * ROWS, MICRO_BATCHES * ROWS):
        model.zero_grad()
        total = 0.0
        for place in range(start, start + MICRO_BATCHES * ROWS, ROWS):
            batch, loss = samples[place : place + ROWS], torch.zeros((), dtype=torch.float64)
            for sample in batch:
                ids = sample["input_ids"]
                logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
                ratio = (logp.gather(1, ids[1:, None])[PROMPT - 1 :, 0] + 3.0).exp()
                clipped = ratio.clamp(0.8, 1.2) * sample["advantage"]
                loss = loss - torch.minimum(ratio * sample["advantage"], clipped).sum()
            trained = sum(int(sample["completion_mask"].sum()) for sample in batch)
            loss = loss / trained / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= COMMON["learning_rate"] * parameter.grad
        losses.append(total)
    return losses, {name: item.detach() for name, item in model.named_parameters()}


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that the trainer makes and, with a transfer given, never calls."""
    monkeypatch.setattr(trl_trainer, "VLLMClient", lambda *_: None)


def updates_of(folder: Path, parameters: dict[str, Tensor]) -> dict[str, Tensor | None]:
    first = dict(llama(folder / "model").named_parameters())
    return {name: (item - first[name]).detach().double() for name, item in parameters.items()}


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": False}, {"token_budget": 400}], ids=str)
def test_a_run_of_the_trainer_is_that_on_rows(changes: dict[str, Any], tmp_path: Path, no_server: None) -> None:
    """Weights are in float64; transformers' norms compute in float32, and so does TRL's loss."""
    if "token_budget" in changes:
        changes = changes | {"token_budget": len(tree_of(drawn_samples()[:ROWS])["input_ids"])}
    trainer = train(tmp_path, **changes)
    losses, parameters = reference_run(tmp_path)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(set(logged)) == STEPS
    got = Outcome(torch.tensor(logged).double(), updates_of(tmp_path, dict(trainer.model.named_parameters())))
    assert_close(got, Outcome(torch.tensor(losses).double(), updates_of(tmp_path, parameters)), FLOAT32)


def test_a_run_that_sees_other_branches_is_found(
    tmp_path: Path, no_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_grpo, "_check", lambda *_: None)
    right = async_grpo._find_tree

    def causal(segments: Any, paths: Any) -> Any:
        starts, stops, firsts, ends = right(segments, paths)
        return starts, stops, firsts, [stops[-1]] * len(ends)

    monkeypatch.setattr(async_grpo, "_find_tree", causal)
    logged = [entry["loss"] for entry in train(tmp_path).state.log_history if "loss" in entry]
    errors = [abs(a - b) / abs(b) for a, b in zip(logged, reference_run(tmp_path)[0], strict=True)]
    assert min(errors) > 1e-4


@pytest.mark.parametrize("hooked", [True, False])
def test_sinks_pass_the_trainers_check(
    hooked: bool, tmp_path: Path, no_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parameters are trained, under their names."""
    forget_accelerate()
    model = zoo("gpt_oss", **MODELS["gpt_oss"], vocab_size=len(tokenizer()))
    model.save_pretrained(tmp_path)
    if not hooked:
        monkeypatch.setattr(trl_trainer, "create_model_from_path", trl_trainer.create_model_from_path.__wrapped__)

    def make() -> Any:
        return trl_trainer.AsyncGRPOTrainer(
            str(tmp_path),
            args=trl_trainer.AsyncGRPOConfig(str(tmp_path), **COMMON | {"gradient_checkpointing": False}),
            train_dataset=datasets.Dataset.from_list([{"prompt": "the cat"}] * 8),
            processing_class=tokenizer(),
            rollout_worker=Worker([]),
            weight_transfer=Transfer(),
        )

    if not hooked:
        with pytest.raises(ValueError, match="attention sinks"):
            make()
        return
    trainer = make()
    expected = {name for name, _ in model.named_parameters()}
    assert {name for name, _ in trainer.model.named_parameters()} == expected
    assert any(name.endswith(".sinks") for name, _ in trainer.model.named_parameters())
    trained = {id(item) for group in trainer.create_optimizer().param_groups for item in group["params"]}
    assert {id(item) for item in trainer.model.parameters()} == trained


SCRIPT = """
import json, sys
from pathlib import Path
from tests.trainers import test_trl_trees_run as tests
tests.trl_trainer.VLLMClient = lambda *_: None
trainer = tests.train(Path(sys.argv[1]))
compiled = any(module._compiled_call_impl for module in trainer.model_wrapped.modules())
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps([losses, compiled, type(trainer.model_wrapped).__name__]))
"""


def test_under_treefx_run(tmp_path: Path, no_server: None) -> None:
    """No line of the program changes; nothing is compiled, as nothing is left to share."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = environment_for({"inner": "eager"}, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses, compiled, wrapped = json.loads(done.stdout.splitlines()[-1])
    assert losses == pytest.approx(reference_run(tmp_path)[0], rel=1e-5)
    assert not compiled and wrapped == "LlamaForCausalLM"


def test_treefx_run_hooks_both_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in sitecustomize._HOOKS if name.startswith("trl.experimental.async_grpo")]
    assert len(names) == 2
    called = []
    monkeypatch.setattr(async_grpo, "attend_along_trees", called.append)
    monkeypatch.setattr(async_grpo, "check_models", called.append)
    for name in names:
        sitecustomize._HOOKS[name](sys.modules[name])
    assert set(called) == {packing, trl_trainer}
