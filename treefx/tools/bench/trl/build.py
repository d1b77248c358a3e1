"""Build trainers around one model and set of rows; run as a module, train with one.

The case is given as JSON, and so is the record that is printed last.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from treefx.tools.bench.trl.cases import TrlCase

__all__ = ["measure"]

Chat = list[dict[str, str]]

_COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": False,
    "num_train_epochs": 1,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 7,
}
_SAMPLED: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 16,
    "generation_kwargs": {"min_new_tokens": 8},
    "max_steps": 2,
}
"""Groups of eight, four micro-batches to a step: rows of one prompt are scattered over all of them."""


def measure(case: TrlCase) -> dict[str, Any]:
    """Train once in this process.

    Returns:
        ``way``; ``whole_seconds`` from before the trainer is made to its end; ``version`` of the trainer's package;
        ``log``, its steps; and ``numbers``, what must be the same in every way: losses and norms of gradients, of
        sampled rows also rewards and entropies. Their losses are zero but for rounding in the first step, as the
        advantages of a group are, and are compared relative to one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    torch.manual_seed(7)
    torch.set_num_threads(1)
    folder = Path(case.folder)
    auto: Any = AutoTokenizer
    tokenizer: PreTrainedTokenizerFast = auto.from_pretrained(folder / "model")
    causal_lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text("utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as output:
        started = time.perf_counter()
        trainer = _trainer(case, causal_lm, tokenizer, chats, output)
        trainer.train()
        seconds = time.perf_counter() - started
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = ("grad_norm", "reward", "entropy") if case.samples else ("grad_norm", "loss")
    numbers = [entry[name] for entry in steps for name in names]
    numbers += [1.0 + entry["loss"] for entry in steps] if case.samples else []
    return {
        "way": f"{case.name} with {case.way}", "whole_seconds": seconds, "numbers": numbers, "log": steps,
        "version": f"{case.package} {version(case.package)}",
    }  # fmt: skip


def _trainer(case: TrlCase, model: Any, tokenizer: Any, chats: Sequence[Chat], output: str) -> Any:
    from treefx.integrations import transformers, trl

    arguments = {**_COMMON, **(_SAMPLED if case.samples else {}), **dict(case.settings), "output_dir": output}
    if case.way != "eager":
        arguments |= {"torch_compile": True, "torch_compile_backend": case.way}
    if not case.grouped:
        arguments["train_sampling_strategy"] = "sequential"
    if case.way == "treefx":
        from treefx.integrations import accelerate

        accelerate.compile_with()
    make = _transformers if case.method == "trainer" else _trl
    trainer = make(case, model, tokenizer, chats, arguments)
    if case.grouped:
        trl.keep_groups(trainer)
    transformers.log_sharing(trainer)
    return trainer


def _transformers(
    case: TrlCase, model: Any, tokenizer: Any, chats: Sequence[Chat], arguments: Mapping[str, Any]
) -> Any:
    from datasets import Dataset
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    ids = [tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"] for chat in chats]
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    collator: Any = DataCollatorWithFlattening
    collate = collator(return_flash_attn_kwargs=True, return_seq_idx=True)
    return Trainer(model, TrainingArguments(**arguments), train_dataset=rows, data_collator=collate)


def _trl(case: TrlCase, model: Any, tokenizer: Any, chats: Sequence[Chat], arguments: Mapping[str, Any]) -> Any:
    import trl
    from datasets import Dataset

    name = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "grpo": "GRPO", "rloo": "RLOO"}[case.method]
    config, trainer = getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")
    lengths = {} if case.samples else {"max_length": None}
    given: dict[str, Any] = {
        "train_dataset": Dataset.from_list(_rows(case, chats)), "processing_class": tokenizer,
        "args": config(**{**lengths, **arguments}),
    }  # fmt: skip
    if case.samples:
        given["reward_funcs"] = _reward
    if case.adapter:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=8, task_type="CAUSAL_LM", lora_dropout=0.0, init_lora_weights=False)
    return trainer(model, **given)


def _rows(case: TrlCase, chats: Sequence[Chat]) -> list[dict[str, Any]]:
    """The answer of another row is the one that is not preferred."""
    rows: list[dict[str, Any]] = []
    for number, (chat, other) in enumerate(zip(chats, [*chats[1:], chats[0]], strict=True)):
        prompt, answer, worse = chat[:-1], chat[-1:], other[-1:]
        found: dict[str, dict[str, Any]] = {
            "sft": {"prompt": prompt, "completion": answer},
            "dpo": {"prompt": prompt, "chosen": answer, "rejected": worse},
            "kto": {"prompt": prompt, "completion": worse if number % 3 == 0 else answer, "label": number % 3 > 0},
        }
        rows.append(found.get(case.method, {"prompt": prompt}))
    return rows


def _reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Something that differs from sample to sample."""
    return [float(sum(ids) % 7) for ids in completion_ids]


if __name__ == "__main__":
    print(json.dumps(measure(TrlCase(**json.loads(sys.argv[1])))))
