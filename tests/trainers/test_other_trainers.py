"""Trainers that cannot be installed with this transformers, at their call sites as they stand there."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import treefx
from tests.batches import shared_batch
from tests.oracle import FLOAT32, assert_close, eager_step, loss_of, outcome, stats_of
from tests.trainers.support import COMMON, NEEDS_TRAINERS, PROMPT, TAILS, llama, tokenizer
from treefx.integrations.llama_factory import trace_checkpoints

pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
pytest.importorskip("trl", reason=NEEDS_TRAINERS)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As axolotl loads it: by module and class, with a separate base class."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    setattr(sys.modules["axolotl.integrations.base"], "BasePlugin", type("BasePlugin", (), {}))
    module_name, _, class_name = "treefx.integrations.axolotl.TreefxPlugin".rpartition(".")
    monkeypatch.delitem(sys.modules, module_name, raising=False)
    return getattr(__import__(module_name, fromlist=[class_name]), class_name)()


def build(plugin: Any, path: Path, dataset: Any) -> Trainer:
    arguments: dict[str, Any] = {**COMMON, "output_dir": str(path)}
    arguments.update(plugin.get_training_args(SimpleNamespace()))
    return Trainer(llama(), TrainingArguments(**arguments), train_dataset=dataset, processing_class=tokenizer())


def rows() -> list[dict[str, list[int]]]:
    texts = [f"{start} {PROMPT}{end}" for end in TAILS[4:] for start in TAILS[1:3]]
    return [{"input_ids": ids, "labels": ids} for ids in (tokenizer()(text).input_ids for text in texts)]


def test_the_plugin_compiles_orders_and_logs(tmp_path: Path, plugin: Any) -> None:
    from treefx.integrations.accelerate import compile_with

    compile_with({"inner": "eager"})
    trainer = build(plugin, tmp_path, rows())
    plugin.post_trainer_create(SimpleNamespace(sample_packing=None), trainer)
    trainer.train()
    compile_with()
    stats = treefx.inspect(trainer.model).stats
    assert stats["fallback"] is None
    assert stats["step_sharing_ratio"] == stats["sharing_possible"] > 2.0
    assert trainer.state.log_history[0]["treefx/sharing"] > 2.0


def test_what_has_its_own_order_keeps_it(tmp_path: Path, plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    packed = build(plugin, tmp_path, rows())
    plugin.post_trainer_create(SimpleNamespace(sample_packing=True), packed)
    assert "_get_train_sampler" not in vars(packed) and "order" not in caplog.text
    other = build(plugin, tmp_path, [{"pixels": [1]}])
    plugin.post_trainer_create(SimpleNamespace(sample_packing=None), other)
    assert "order of the dataset" in caplog.text and "pixels" in caplog.text


def checkpointing() -> Any:
    """LLaMA-Factory's module: checkpoints that ask the layer behind the call for its parameters."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def asking(layer: Any, *args: Any, **kwargs: Any) -> Any:
            module = layer.func.__self__ if isinstance(layer, partial) else layer.__self__
            if any(parameter.requires_grad for parameter in module.parameters()):
                next(x for x in args if torch.is_floating_point(x)).requires_grad_(True)
                return plain(layer, *args, **kwargs)
            return layer(*args, **kwargs)

        return asking

    return SimpleNamespace(get_custom_gradient_checkpointing_func=make)


def checkpointed(module: Any, use_reentrant: bool) -> Any:
    model: Any = llama()
    make = module.get_custom_gradient_checkpointing_func
    model._set_gradient_checkpointing(
        enable=True, gradient_checkpointing_func=make(partial(checkpoint, use_reentrant=use_reentrant))
    )
    return model.train()


def assert_shared_and_exact(module: Any, use_reentrant: bool, dynamic: bool | None) -> None:
    model = checkpointed(module, use_reentrant)
    compiled = torch.compile(model, backend="treefx", dynamic=dynamic, options={"inner": "eager"})
    for seed, columns in enumerate((10, 13)):
        batch = shared_batch(rows=3, length=columns, shared=6, vocab=13, seed=seed)
        got = outcome(model, lambda batch=batch: loss_of(batch)(compiled))
        assert_close(got, eager_step(llama(), batch), FLOAT32)
    assert stats_of(compiled)["ran"] == "packed"


@pytest.mark.parametrize(("use_reentrant", "dynamic"), [(False, None), (True, True)])
def test_llama_factorys_checkpoints_are_traced(use_reentrant: bool, dynamic: bool | None) -> None:
    module = checkpointing()
    trace_checkpoints(module)
    assert_shared_and_exact(module, use_reentrant, dynamic)


def test_llama_factorys_checkpoints_as_they_are_cut_the_graph() -> None:
    """Between a layer and its checkpoint, where not all of Python's calls come back as they were."""
    with pytest.raises((AssertionError, AttributeError)):
        assert_shared_and_exact(checkpointing(), False, True)
