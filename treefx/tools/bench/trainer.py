"""Time a whole run of TRL's SFTTrainer, with compilations: ``treefx bench trainer``.

The rows are an agent's turns, conversation by conversation: a row is all that was said before and one answer, so eight
of them in order share most of what they say, and no two batches have one length. The trainer has its defaults, but for
the order of rows (as they come), float32 (what bfloat16 costs differs from processor to processor) and a log of every
step. Every way to compile runs in a separate process with empty caches.
``python -m treefx.tools.bench.trainer CASE`` is one such process, its case given as JSON.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treefx.errors import InputError, TreefxError
from treefx.output import watch
from treefx.tools.bench.job.ways import ONE_COMPILER, check_same, empty_caches, in_process

__all__ = ["CASES", "TrainerCase", "TrainerError", "measure", "run"]

_LATER = 2
"""Steps before this one are shown apart: they contain the compilations."""


class TrainerError(TreefxError):
    """A process failed, or what the processes computed differs."""


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    """One way to compile one model in one run of the trainer."""

    name: str
    backend: str = "treefx"
    """The trainer's ``torch_compile_backend``."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of treefx, as pairs."""
    model: str = "qwen3"
    layers: int = 4
    hidden_size: int = 256
    vocab_size: int = 1024
    rows: int = 160
    batch_size: int = 8


CASES = (TrainerCase(name="inductor", backend="inductor"), TrainerCase(name="treefx"))


def run(
    *,
    model: str = "qwen3",
    layers: int = 4,
    hidden_size: int = 256,
    rows: int = 160,
    cases: Sequence[TrainerCase] = CASES,
    json_output: bool = False,
) -> list[dict[str, Any]]:
    """Train once in every way.

    Args:
        model: An architecture of transformers.
        layers: Number of its blocks.
        hidden_size: Its width, a multiple of 64.
        rows: Turns to train on, eight a step.
        cases: The ways; their model and rows are replaced.
        json_output: A program reads the result, so no progress bar is shown.

    Returns:
        One record per way: ``whole_seconds`` from before the trainer is made to its end, ``processor_seconds`` those of
        the processor, with the compilers that were started; ``first_seconds``, ``second_seconds`` and ``later_seconds``
        of the steps in it, ``slowest_seconds`` of a later one; ``compiles`` (of treefx's graphs, or Dynamo's);
        ``sharing``, raw tokens over those that ran, and ``fallbacks``, steps that shared nothing for a reason;
        ``whole``, ``processor`` and ``later``, its own seconds over the first way's; ``bound``, distinct tokens of the
        batches over raw ones: what ``later`` would be without work of other kinds.

    Raises:
        TrainerError: A process failed, or losses or norms of gradients differ.
        InputError: The conversations have fewer turns than there are rows.
    """
    sizes: dict[str, Any] = {"model": model, "layers": layers, "hidden_size": hidden_size, "rows": rows}
    records: list[dict[str, Any]] = []
    for case in watch(cases, "training, a process each", quiet=json_output):
        records.append(_start(replace(case, **sizes)))
        check_same(records[-1], records[0], TrainerError)
    return [_compared(record, records[0]) for record in records]


def _start(case: TrainerCase) -> dict[str, Any]:
    with empty_caches() as environment:
        given = {**environment, **ONE_COMPILER, "HF_HUB_OFFLINE": "1"}
        return {"way": case.name, **in_process("treefx.tools.bench.trainer", case, given, TrainerError)}


def _compared(record: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in record.items() if name != "numbers"}
    return {
        **shown,
        **{name: record[f"{name}_seconds"] / other[f"{name}_seconds"] for name in ("whole", "processor", "later")},
    }


def measure(case: TrainerCase) -> dict[str, Any]:
    """Train once in this process."""
    import torch

    from treefx.tools.bench.job.models import make_config, make_model

    torch.manual_seed(0)
    torch.set_num_threads(1)
    samples = _samples(case)
    sizes = {"vocab_size": case.vocab_size, "hidden_size": case.hidden_size, "layers": case.layers}
    causal_lm = make_model(make_config(case.model, **sizes, max_positions=max(map(len, samples))))
    with tempfile.TemporaryDirectory() as folder:
        started, worked = time.perf_counter(), sum(os.times()[:4])
        trainer, times = _trainer(case, causal_lm, samples, folder)
        trainer.train()
        whole, processor = time.perf_counter() - started, sum(os.times()[:4]) - worked
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    numbers = [entry[name] for entry in steps for name in ("loss", "grad_norm")]
    seconds = {"whole_seconds": whole, "processor_seconds": processor, **_seconds(times)}
    return {**seconds, **_found(case, trainer, steps, samples), "numbers": numbers}


def _samples(case: TrainerCase) -> list[Any]:
    from treefx.data import make_samples, scripted_conversations
    from treefx.tools.bench.job.rollouts import make_tokenizer

    conversations = scripted_conversations()
    samples = make_samples(conversations, make_tokenizer(conversations, "bpe", case.vocab_size), "turns")
    if not 0 < case.rows <= len(samples):
        raise InputError(f"rows must be 1 to {len(samples)}, the turns of the conversations, got {case.rows}")
    return samples[: case.rows]


def _trainer(case: TrainerCase, causal_lm: Any, samples: Sequence[Any], folder: str) -> tuple[Any, list[float]]:
    """The trainer, and the times when its steps begin and end."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from treefx.integrations import accelerate
    from treefx.integrations.transformers import log_sharing

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **more: Any) -> None:
            times.append(time.perf_counter())

        on_step_end = on_step_begin

    times: list[float] = []
    accelerate.compile_with(dict(case.options))
    config = SFTConfig(
        folder, torch_compile_backend=case.backend, train_sampling_strategy="sequential", num_train_epochs=1,
        per_device_train_batch_size=case.batch_size, use_cpu=True, bf16=False, logging_steps=1, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": x.tokens.tolist(), "labels": x.labels.tolist()} for x in samples]
    parts = {"train_dataset": Dataset.from_list(rows), "processing_class": _tokenizer(), "callbacks": [Clock()]}
    trainer = SFTTrainer(causal_lm, config, **parts)
    log_sharing(trainer)
    return trainer, times


def _tokenizer() -> Any:
    """It pads: the rows are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    core = Tokenizer(WordLevel(words, unk_token="<pad>"))
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _seconds(times: Sequence[float]) -> dict[str, float]:
    steps = [end - begin for begin, end in zip(times[::2], times[1::2], strict=True)]
    first, second = (steps + [0.0, 0.0])[:_LATER]
    later = steps[_LATER:] or [0.0]
    return {
        "first_seconds": first, "second_seconds": second, "later_seconds": sum(later), "slowest_seconds": max(later)
    }  # fmt: skip


def _found(case: TrainerCase, trainer: Any, steps: Sequence[Any], samples: Sequence[Any]) -> dict[str, Any]:
    """What was compiled and shared, and what could be shared in the batches."""
    from torch._dynamo.utils import counters

    from treefx.forests.forest import Forest

    batches = [samples[i : i + case.batch_size] for i in range(0, len(samples), case.batch_size)]
    raw = [sum(map(len, batch)) for batch in batches]
    distinct = sum(Forest.from_sequences([x.tokens for x in batch]).num_tokens for batch in batches)
    ours = [entry for entry in steps if "treefx/sharing" in entry]
    ran = sum(size / entry["treefx/sharing"] for size, entry in zip(raw, ours, strict=bool(ours)))
    return {
        "compiles": int(ours[-1]["treefx/compiles"] if ours else counters["stats"]["unique_graphs"]),
        "sharing": sum(raw) / ran if ours else 1.0,
        "fallbacks": int(sum(entry["treefx/fallback"] for entry in ours)),
        "bound": distinct / sum(raw),
    }


if __name__ == "__main__":
    print(json.dumps(measure(TrainerCase(**json.loads(sys.argv[1])))))
