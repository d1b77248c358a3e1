"""Trainers never repeat a batch: neither its sizes nor its numbers recompile anything."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import treefx
from tests.oracle import FLOAT32, FLOAT64, Outcome, assert_close, outcome
from tests.trainers.support import COMMON, NEEDS_TRAINERS, llama, tokenizer

datasets = pytest.importorskip("datasets", reason=NEEDS_TRAINERS)
trl = pytest.importorskip("trl", reason=NEEDS_TRAINERS)

from treefx.integrations import accelerate  # noqa: E402
from treefx.runtime import compiled_graph  # noqa: E402
from treefx.runtime.whole.numbers import Numbers  # noqa: E402

BASE = [3 + (7 * i * i + i) % 11 for i in range(40)]
ROWS = [
    {"input_ids": BASE[: 8 + i] + [4 + i % 3], "labels": [-100] * (4 + i) + BASE[4 + i : 8 + i] + [4 + i % 3]}
    for i in range(18)
]
"""Turns of one conversation: eighteen rows, so that a last batch of two is left over."""


@pytest.fixture(autouse=True)
def _by_name() -> Iterator[None]:
    datasets.disable_progress_bars()
    accelerate.compile_with({"inner": "eager", "min_sharing": 1.0})
    yield
    accelerate.compile_with()


def sft(model: nn.Module, path: Path, **more: Any) -> Any:
    args = trl.SFTConfig(str(path), **COMMON | more, train_sampling_strategy="sequential")
    rows = datasets.Dataset.from_list(ROWS)
    evaluated = datasets.Dataset.from_list(ROWS[3:9]) if "eval_steps" in more else None
    return trl.SFTTrainer(model, args, train_dataset=rows, eval_dataset=evaluated, processing_class=tokenizer())


def plain(model: nn.Module, path: Path, **more: Any) -> Any:
    """transformers' own, which gives the model's loss the number of labels of a step."""
    args = TrainingArguments(str(path), **COMMON | more, train_sampling_strategy="sequential")
    evaluated = ROWS[3:9] if "eval_steps" in more else None
    collate = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)
    return Trainer(model, args, train_dataset=ROWS, eval_dataset=evaluated, data_collator=collate)


def train(build: Any, path: Path, **arguments: Any) -> tuple[Outcome, Any]:
    """Losses (of training and evaluation) and updates."""
    model = llama()
    first = {name: x.detach().clone() for name, x in model.named_parameters()}
    torch.manual_seed(0)
    trainer = build(model, path, **arguments)
    trainer.train()
    losses = [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]
    updates = {name: (x - first[name]).detach() for name, x in model.named_parameters()}
    return Outcome(torch.tensor(losses, dtype=torch.float64), updates), model


@pytest.mark.parametrize(("build", "evaluates", "steps"), [(sft, True, 1), (plain, True, 4)])
def test_a_run_compiles_once(tmp_path: Path, build: Any, evaluates: bool, steps: int) -> None:
    """And once more for evaluations, which have no gradients; batches of one row would be a third."""
    more: dict[str, Any] = {"gradient_accumulation_steps": steps, "max_steps": -1, "num_train_epochs": 2}
    more |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3} if evaluates else {}
    expected, _ = train(build, tmp_path, **more)
    got, model = train(build, tmp_path, **more, torch_compile=True, torch_compile_backend="treefx")
    assert_close(got, expected, FLOAT32)
    stats = treefx.inspect(model).stats
    assert stats["compiles"] <= 1 + evaluates
    assert (stats["graphs"], stats["fallback"]) == (1, None)
    assert stats["calls"] > 8 and stats["sharing_ratio"] > 1.5


# Numbers that change from call to call --------------------------------------------------------------------------------


def batch_of(start: int, rows: int) -> dict[str, Tensor]:
    chosen = ROWS[start : start + rows]
    width = max(len(row["input_ids"]) for row in chosen)

    def pad(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in chosen])

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad("labels", -100)}


def counted(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """transformers' loss without its cast to float32."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits.reshape(-1, vocab_size), targets, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Cooled(nn.Module):
    """A loss at a temperature that the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = llama()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, temperature: float) -> Any:
        logits = self.lm(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1] / temperature
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def with_items(model: nn.Module, call: int, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, num_items_in_batch=17 + 5 * call).loss  # type: ignore[no-any-return]


def with_kept(model: nn.Module, call: int, batch: dict[str, Tensor]) -> Tensor:
    """The logits of the last positions alone."""
    labels = batch.pop("labels")[:, -3 - call :]
    logits = model(**batch, logits_to_keep=3 + call).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def with_temperature(model: nn.Module, call: int, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, temperature=0.7 + 0.1 * call)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("step", "dynamic"), [(with_items, None), (with_temperature, None), (with_kept, True)])
def test_a_number_of_the_call_compiles_nothing(step: Any, dynamic: bool | None) -> None:
    assert compilations(step, Cooled() if step is with_temperature else llama(), dynamic) <= (1 if dynamic else 2)


def test_a_number_taken_for_that_of_the_first_call_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original, first = compiled_graph.as_tensors, {}

    def remembered(args: Any, numbers: Numbers) -> Any:
        tensors = original(args, numbers)
        return [first.setdefault(i, x) if i in numbers else x for i, x in enumerate(tensors)]

    monkeypatch.setattr(compiled_graph, "as_tensors", remembered)
    with pytest.raises(AssertionError, match="differ by more than"):
        compilations(with_items, llama(), True)


def compilations(step: Any, model: nn.Module, dynamic: bool | None) -> int:
    """How many there are in six calls, all of which give what the model gives."""
    model.loss_function = counted
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="treefx", dynamic=dynamic, options={"inner": "eager", "min_sharing": 1.0})
    for call, (start, rows) in enumerate([(0, 4), (4, 4), (5, 3), (7, 5), (10, 2), (2, 6)]):
        expected = outcome(model, lambda: step(model, call, batch_of(start, rows)))  # noqa: B023
        got = outcome(twin, lambda: step(compiled, call, batch_of(start, rows)))  # noqa: B023
        assert_close(got, expected, FLOAT64)
        assert treefx.inspect(compiled).stats["fallback"] is None
    return int(treefx.inspect(compiled).stats["compiles"])
