"""verl's FSDP engine at its call sites, as verl 0.9.1 has them: hooks, exact against rows, groups kept.

verl itself runs in ``treefx bench trainers --only verl``.
"""

import importlib
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import treefx
from tests.models import double
from tests.oracle import FLOAT64, Outcome, assert_close
from treefx.cli.run import environment_for
from treefx.integrations import observing, verl
from treefx.integrations.startup import sitecustomize

_PROMPTS = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12, 13, 14], [20, 21, 22, 23])
ROWS = [[*prompt, 30 + answer, *range(40, 42 + answer)] for answer in range(4) for prompt in _PROMPTS]
"""Four answers each, as rollout workers return them: prompt after prompt, then again."""
TOKENS = len({tuple(row[:end]) for row in ROWS for end in range(1, len(row) + 1)})


def nested(rows: Sequence[Sequence[Any]]) -> Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """In place of verl's: balanced by length, rows of equal prefixes anywhere."""
    order = sorted(range(len(seqlen_list)), key=lambda row: (-seqlen_list[row], row))
    return [sorted(order[part::k_partitions]) for part in range(k_partitions)]


def rearrange_micro_batches(
    batch: Any, max_token_len: int, dp_group: Any = None, force_group_size: int = 1
) -> tuple[list[Any], list[list[int]]]:
    """As verl's: more parts until all are within the limit."""
    lengths = batch["input_ids"].offsets().diff().tolist()
    parts = -(-sum(lengths) // max_token_len)
    while True:
        assert parts <= len(lengths), "Cannot satisfy max_token_len"
        workloads = [24576 * length + length**2 for length in lengths]
        found = BALANCING.get_seqlen_balanced_partitions(workloads, parts, equal_size=False)
        if all(sum(lengths[row] for row in part) <= max_token_len for part in found):
            break
        parts += 1
    rows = batch["input_ids"].unbind()
    return [{"input_ids": nested([rows[row].tolist() for row in part])} for part in found], found


BALANCING = SimpleNamespace()


@pytest.fixture(autouse=True)
def _balancing() -> None:
    BALANCING.get_seqlen_balanced_partitions = karmarkar_karp
    BALANCING.rearrange_micro_batches = rearrange_micro_batches


class Engine:
    """The parts of verl's FSDPEngineWithLMHead that see the model: packed rows with restarting positions."""

    def __init__(self, limit: int, **config: Any) -> None:
        self.engine_config = SimpleNamespace(**{"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1, **config})
        self.limit, self.module = limit, None

    def _build_module(self) -> Any:
        return double("llama", num_hidden_layers=1)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        batches, parts = BALANCING.rearrange_micro_batches(data, self.limit)
        losses: list[Tensor] = []
        for batch in batches:
            ids = batch["input_ids"]
            positions = torch.cat([torch.arange(int(length)) for length in ids.offsets().diff()])
            packed = {"input_ids": ids.values()[None], "attention_mask": None, "position_ids": positions[None]}
            logits = self.module(**packed, use_cache=False).logits.squeeze(0)  # type: ignore[misc]
            logits = logits / torch.full((len(positions), 1), 0.9).to(logits.dtype)
            picked = torch.log_softmax(logits, -1).gather(-1, torch.roll(ids.values(), -1)[:, None])[:, 0]
            last = ids.offsets()[1:] - 1
            losses.append(picked.index_fill(0, last, 0.0).sum() / len(ROWS))
            if not forward_only:
                losses[-1].backward()
        return {"loss": [float(loss) for loss in losses], "metrics": {}, "parts": parts}


def hooked(**config: Any) -> Any:
    engines = type("Engines", (Engine,), {})
    verl.group_micro_batches(BALANCING)
    verl.convert_engines(engines)
    return engines(**config)


def run(engine: Any, forward_only: bool = False) -> tuple[Any, Outcome]:
    """A step of an engine: what it returns, loss and gradients."""
    engine.module = engine._build_module()
    found = engine.forward_backward_batch({"input_ids": nested(ROWS)}, None, forward_only)
    gradients = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    return found, Outcome(torch.tensor(sum(found["loss"]), dtype=torch.float64), gradients)


@pytest.mark.parametrize("limit", [40, 1000])
def test_the_engine_computes_what_it_did_and_shares(limit: int) -> None:
    _, expected = run(Engine(limit))
    found, outcome = run(hooked(limit=limit))
    assert_close(outcome, expected, FLOAT64)
    raw = sum(map(len, ROWS))
    (possible,) = found["metrics"]["treefx/sharing_possible"]
    assert possible == pytest.approx(raw / TOKENS)
    (sharing,) = found["metrics"]["treefx/sharing"]
    assert sharing == pytest.approx(raw / TOKENS) if limit == 1000 else 1.5 < sharing < raw / TOKENS
    assert all(sum(len(ROWS[row]) for row in part) <= limit for part in found["parts"])


def test_without_the_order_little_is_shared() -> None:
    engines = type("Engines", (Engine,), {})
    verl.convert_engines(engines)
    scattered, _ = run(engines(60))
    grouped, _ = run(hooked(limit=60))
    assert grouped["metrics"]["treefx/sharing"][0] > 1.3 * scattered["metrics"]["treefx/sharing"][0]
    assert len(grouped["parts"]) <= len(scattered["parts"]) + 1


def test_log_probabilities_without_gradients() -> None:
    expected, _ = run(Engine(1000), forward_only=True)
    found, _ = run(hooked(limit=1000), forward_only=True)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12) and found["metrics"] == {}


def test_the_engine_observed_computes_bit_for_bit_what_it_did() -> None:
    _, expected = run(Engine(40))
    engines = type("Engines", (Engine,), {})
    observing.observe_engines(engines)
    engine = engines(40)
    found, outcome = run(engine)
    assert torch.equal(outcome.loss, expected.loss)
    assert all(torch.equal(outcome.gradients[name], x) for name, x in expected.gradients.items())
    seen = treefx.observed(engine.module, predict=False)
    print(seen.summary())
    (step,) = seen.steps
    in_calls = sum(distinct([ROWS[row] for row in part]) for part in found["parts"])
    assert (step.calls, step.rows, step.raw_tokens) == (len(found["parts"]), len(ROWS), sum(map(len, ROWS)))
    assert (step.call_tokens, step.step_tokens) == (in_calls, TOKENS)
    assert step.step_tokens == treefx.Forest.from_sequences(ROWS).num_tokens
    assert found["metrics"]["treefx/observed_sharing_possible"] == [step.raw_tokens / TOKENS]
    settings = {item.where: item.setting for item in seen.scatter}
    assert settings.keys() == {"batch", "order"} and "rearrange_micro_batches" in settings["order"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"strategy": "fsdp"}, "strategy=fsdp2, got 'fsdp'"), ({"ulysses_sequence_parallel_size": 2}, "whole rows, got")],
)
def test_engines_it_was_never_run_with_stay_as_they_are(
    config: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = hooked(limit=1000, **config)
    with caplog.at_level(logging.WARNING, "treefx"):
        found, outcome = run(engine)
    assert "verl runs without treefx" in caplog.text and reason in caplog.text
    assert found["metrics"] == {}
    assert_close(outcome, run(Engine(1000))[1], FLOAT64)


def test_forced_groups_are_verl_s_own() -> None:
    verl.group_micro_batches(BALANCING)
    data = {"input_ids": nested(ROWS)}
    assert BALANCING.rearrange_micro_batches(data, 40, force_group_size=2)[1] == rearrange_micro_batches(data, 40)[1]


def test_padded_rows_are_read_under_their_mask() -> None:
    ids = torch.nested.to_padded_tensor(nested([[3, 4], [3, 4, 5]]), 0)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert [row.tolist() for row in verl._rows({"input_ids": ids, "attention_mask": mask})] == [[3, 4], [3, 4, 5]]


rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(rows=rows_of_tokens, parts=st.integers(1, 7), slack=st.integers(0, 12))
def test_parts_are_full_within_the_limit_and_cut_where_it_costs_least(
    rows: list[list[int]], parts: int, slack: int
) -> None:
    parts, limit = min(parts, len(rows)), max(map(len, rows)) + slack
    order = verl._PrefixOrder([np.asarray(row) for row in rows])
    found = order.cut(parts, limit)
    assert sorted(row for part in found for row in part) == list(range(len(rows))) and all(found)
    assert len(found) == parts
    best = min(
        (cost for starts in itertools.combinations(range(1, len(rows)), parts - 1)
         if (cost := duplicated(order, rows, [0, *starts, len(rows)], limit)) is not None),
        default=None,
    )  # fmt: skip
    within = all(sum(len(rows[row]) for row in part) <= limit for part in found)
    assert within == (best is not None)
    if best is not None:
        assert sum(distinct([rows[row] for row in part]) for part in found) == best


def duplicated(order: Any, rows: list[list[int]], bounds: list[int], limit: int) -> int | None:
    """Distinct tokens of all parts; None where one is above the limit."""
    parts = [[rows[row] for row in order.order[begin:end]] for begin, end in zip(bounds, bounds[1:])]
    within = all(sum(map(len, part)) <= limit for part in parts)
    return sum(map(distinct, parts)) if within else None


def distinct(rows: Sequence[Sequence[int]]) -> int:
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


class Trainer:
    """verl's controller, before it deals rows out to ranks."""

    ranks = 2

    def _balance_batch(self, batch: Any, metrics: Any) -> list[list[int]]:
        return list(BALANCING.get_seqlen_balanced_partitions(batch.work, self.ranks, equal_size=True))


def dealt(batch: Any, ranks: int = 2) -> list[list[int]]:
    trainers = type("Trainers", (Trainer,), {"ranks": ranks})
    verl.group_micro_batches(BALANCING)
    verl.group_ranks(trainers)
    found: list[list[int]] = trainers()._balance_batch(batch, {})
    assert sorted(row for part in found for row in part) == list(range(len(batch.work)))
    assert len({len(part) for part in found}) == 1
    return found


def test_the_rows_of_a_prompt_are_on_one_rank() -> None:
    prompts = list("abcdabcdabcd")
    batch = SimpleNamespace(non_tensor_batch={"uid": np.asarray(prompts, dtype=object)}, work=[9, 1, 5, 2] * 3)
    parts = dealt(batch)
    assert [len({prompts[row] for row in part}) for part in parts] == [2, 2]
    assert karmarkar_karp(batch.work, 2, True) != parts
    queue = SimpleNamespace(keys=[f"{prompt}_{row}_0" for row, prompt in enumerate(prompts)], work=batch.work)
    assert dealt(queue) == parts


def test_prompts_that_cannot_be_dealt_evenly_are_cut_once() -> None:
    keys = [f"{prompt}_0_0" for prompt in "aaabbb"]
    assert dealt(SimpleNamespace(keys=keys, work=[1] * 6), 2) == [[0, 1, 2], [3, 4, 5]]
    # Rows of padding, appended: as many rows on every rank all the same.
    parts = dealt(SimpleNamespace(keys=[*keys, "b_1_0"], work=[1] * 8), 2)
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_batches_that_name_no_prompts_are_balanced_as_they_were() -> None:
    batch = SimpleNamespace(non_tensor_batch={}, work=[5, 4, 3, 1])
    assert dealt(batch) == karmarkar_karp(batch.work, 2, True)


_FAKE = {
    "__init__.py": "import os\nfrom importlib.metadata import entry_points\n"
    "for found in entry_points(group='verl.plugins'):\n    found.load()\n",
    "utils/seqlen_balancing.py": "def rearrange_micro_batches(): ...\ndef get_seqlen_balanced_partitions(): ...\n",
    "workers/engine/fsdp/transformer_impl.py": "class FSDPEngine:\n    def _build_module(self): ...\n"
    "    def forward_backward_batch(self): ...\n",
    "workers/engine/megatron/transformer_impl.py": "class MegatronEngine:\n    def _build_megatron_module(self): ...\n"
    "    def forward_backward_batch(self): ...\n",
    "models/mcore/util.py": "def preprocess_packed_seqs(ids, mask, pre_process=True): ...\n",
    "trainer/ppo/ray_trainer.py": "class RayPPOTrainer:\n    def _balance_batch(self): ...\n",
    "trainer/ppo/v1/trainer_base.py": "class PPOTrainer:\n    def _balance_batch(self): ...\n",
}
_LOOK = """
import verl.utils.seqlen_balancing as balancing
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.megatron.transformer_impl import MegatronEngine
from verl.models.mcore.util import preprocess_packed_seqs
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
found = (balancing.rearrange_micro_batches, balancing.get_seqlen_balanced_partitions, FSDPEngine._build_module,
         FSDPEngine.forward_backward_batch, RayPPOTrainer._balance_batch, PPOTrainer._balance_batch,
         MegatronEngine._build_megatron_module, MegatronEngine.forward_backward_batch, preprocess_packed_seqs)
def depth(function):
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0
print([depth(function) for function in found])
"""


@pytest.mark.parametrize(("plugins", "asked"), [("auto", 0), ("treefx2", 0), ("others, treefx", 1), ("treefx", 1)])
def test_the_plugin_hooks_where_it_is_named(plugins: str, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked_here: list[Any] = []
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
    monkeypatch.setattr(sitecustomize, "hook_imports", hooked_here.append)
    importlib.reload(importlib.import_module("treefx.integrations.startup.verl_plugin"))
    assert hooked_here == [sitecustomize.VERL_HOOKS] * asked
    assert sitecustomize.VERL_HOOKS.items() <= sitecustomize._HOOKS.items()


@pytest.mark.parametrize(("under_run", "plugins"), [(False, "others, treefx"), (True, "treefx")])
def test_verl_is_hooked_once_where_it_is_asked_for(tmp_path: Path, under_run: bool, plugins: str) -> None:
    for name, text in _FAKE.items():
        path = tmp_path / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    given = environment_for({}, environment) if under_run else environment
    done = subprocess.run([sys.executable, "-c", _LOOK], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str([1] * 9)
