"""axolotl's plugin, at its call sites as they stand in axolotl: it cannot be installed beside this transformers."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

import treefx
from tests.trainers.support import COMMON, NEEDS_TRAINERS, PROMPT, TAILS, llama, tokenizer

pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
pytest.importorskip("trl", reason=NEEDS_TRAINERS)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As axolotl loads it: by module and class, of a base class of its own."""
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
