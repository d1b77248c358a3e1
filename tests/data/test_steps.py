"""From a file to a step: a compiled model trained on the forest against the model trained on every row alone."""

import copy
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tokenizers")

import treefx  # noqa: E402
from tests.backend.native import TakesCacheFlag  # noqa: E402
from tests.data.chats import make_engine  # noqa: E402
from tests.models import TinyLM  # noqa: E402
from tests.oracle import FLOAT64, Outcome, assert_close, compile_with, outcome  # noqa: E402
from tests.spellings import SPELLINGS  # noqa: E402
from treefx import Forest, losses  # noqa: E402
from treefx.data import (  # noqa: E402
    IGNORED,
    Sample,
    forest_of,
    group_batch,
    load,
    make_samples,
    preference_batch,
    read_groups,
    read_preferences,
)
from treefx.rl import grpo  # noqa: E402

ENGINE = make_engine("thinking")
RowLoss = Callable[[list[Tensor]], Tensor]


def said(*texts: str, thought: str = "") -> list[dict[str, str]]:
    """A conversation, the user first; the assistant thinks before its first answer."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    messages[1]["reasoning_content"] = thought
    return messages


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    model = TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, vocab=340, positions=False)).double()
    twin = copy.deepcopy(model)
    return model, twin, compile_with(twin)


def row_logps(model: nn.Module, samples: list[Sample]) -> list[Tensor]:
    """Of each row run alone, the log-probabilities of its labelled tokens."""
    found = []
    for sample in samples:
        labels = torch.from_numpy(sample.labels[1:])
        logp = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0, :-1].log_softmax(-1)
        found.append(logp.gather(-1, labels.clamp(min=0)[:, None])[:, 0][labels != IGNORED])
    return found


def check(
    models: tuple[nn.Module, nn.Module, Any], samples: list[Sample], forest: Forest, edges: Any, rows: RowLoss
) -> None:
    model, twin, compiled = models

    def step() -> Tensor:
        with treefx.use(forest):
            logits = compiled(**forest.model_inputs(), use_cache=False).logits
        loss: Tensor = edges(treefx.edge_logprobs(logits, forest))
        return loss

    assert forest.sharing_ratio > 1.2
    found: Outcome = outcome(twin, step)
    assert_close(found, outcome(model, lambda: rows(row_logps(model, samples))), FLOAT64)


CHATS = [
    {"task": 0, "reward": 1, "messages": said("what time is it?", "it is noon", "thanks", "bye", thought="good")},
    {"task": 0, "reward": 0, "messages": said("what time is it?", "it is noon", "no", "good night", thought="good")},
    {"task": 0, "reward": 0.5, "messages": said("what time is it?", "good morning", "no", "it is", thought="user")},
]


def test_sft_on_turns(models: tuple[nn.Module, nn.Module, Any], tmp_path: Path) -> None:
    samples = make_samples(load(write(tmp_path / "chats.jsonl", *CHATS)), ENGINE, "turns")
    forest = forest_of(samples)
    check(models, samples, forest, lambda logp: losses.sft(logp, forest), lambda rows: -torch.cat(rows).sum())


def test_policy_gradient_on_groups(models: tuple[nn.Module, nn.Module, Any], tmp_path: Path) -> None:
    batch = group_batch(read_groups(write(tmp_path / "chats.jsonl", *CHATS)), ENGINE, "merged")
    advantages = grpo(batch.steps, batch.rewards)[batch.trial_of_row]

    def rows(logps: list[Tensor]) -> Tensor:
        by_trial = [1.0, -1.0, 0.0]
        trials = [0, 0, 1, 1, 2, 2]  # the thought of a first turn is not in the second one's row
        return -torch.stack([by_trial[trial] * logp.sum() for trial, logp in zip(trials, logps, strict=True)]).sum()

    check(
        models,
        batch.samples,
        batch.forest,
        lambda logp: losses.policy_gradient(logp, batch.forest, advantages, reduction="sum"),
        rows,
    )


def test_dpo_on_pairs(models: tuple[nn.Module, nn.Module, Any], tmp_path: Path) -> None:
    pairs = [
        {"chosen": a["messages"], "rejected": b["messages"]} for a, b in ((CHATS[0], CHATS[1]), (CHATS[1], CHATS[2]))
    ]
    batch = preference_batch(
        islice(read_preferences(write(tmp_path / "pairs.jsonl", *pairs)), 2), make_engine("chatml")
    )
    ref = -torch.rand(len(batch.forest.edges), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by_token = torch.zeros(batch.forest.num_tokens, dtype=torch.float64)
    by_token[batch.forest.edges.target] = ref

    def rows(logps: list[Tensor]) -> Tensor:
        ratios = []
        for logp, sample, index in zip(logps, batch.samples, batch.forest.token_of, strict=True):
            ratios.append(logp.sum() - by_token[index][torch.from_numpy(sample.labels != IGNORED)].sum())
        margins = torch.stack([ratios[0] - ratios[2], ratios[1] - ratios[3]])
        return -nn.functional.logsigmoid(0.1 * margins).mean()

    check(
        models,
        batch.samples,
        batch.forest,
        lambda logp: losses.dpo(logp, batch.forest, ref, batch.pairs),
        rows,
    )
