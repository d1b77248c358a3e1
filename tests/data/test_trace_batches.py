"""Batches of traces: rows as recorded, trees by nodes and by tokens, and a loss equal to that of separate rows."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treefx
from tests.data.engines import dataproto, gym_rollout, slime_file, slime_sample, verifiers_episode, verifiers_result
from tests.data.test_traces import VERL, read
from treefx.data import (
    ByteTokenizer,
    Trace,
    TraceNode,
    read_traces,
    trace_batch,
    trace_nodes,
    trace_samples,
    trace_statistics,
    traces_of_dataproto,
)
from treefx.errors import InputError
from treefx.rl import grpo

Identity = Literal["tokens", "nodes"]
Weighting = Literal["rows", "once"]
VOCAB = 8


@st.composite
def drawn_traces(draw: st.DrawFn) -> list[Trace]:
    """Traces of few tokens, so that paths meet by chance; each begins with a prompt."""
    traces = []
    for trial in range(draw(st.integers(1, 3))):
        nodes: list[TraceNode] = []
        for number in range(draw(st.integers(1, 6))):
            size = draw(st.integers(1, 3))
            tokens = np.array(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)), dtype=np.int64)
            flags = draw(st.lists(st.booleans(), min_size=size, max_size=size)) if number else [False] * size
            trained = np.array(flags)
            logprobs = np.where(trained, -1.0 - np.arange(size) - number - trial / 4, 0.0)
            nodes.append(TraceNode(tokens, draw(st.integers(0, number - 1)) if number else -1, trained, logprobs))
        traces.append(Trace("t", trial, tuple(nodes), float(draw(st.integers(0, 3))), "drawn"))
    return traces


def loss_over_rows(table: torch.Tensor, traces: list[Trace], weighting: Weighting) -> torch.Tensor:
    """A clipped loss of separate rows in plain torch; a token's logits are a row of the table."""
    rewards = torch.tensor([trace.reward for trace in traces], dtype=torch.float64)
    total = 0.0 * table.sum()
    for trace, advantage in zip(traces, rewards - rewards.mean(), strict=True):
        seen: set[int] = set()
        for path in trace.paths():
            before = -1
            for number in path:
                node = trace.nodes[number]
                for token, trains, old in zip(node.tokens, node.trained, node.logprobs, strict=True):
                    if before >= 0 and trains and number not in seen:
                        ratio = (table[before].log_softmax(0)[int(token)] - old).exp()
                        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    before = int(token)
            if weighting == "once":
                seen.update(path)
    return total


@pytest.mark.parametrize("identity", ["tokens", "nodes"])
@pytest.mark.parametrize("weighting", ["rows", "once"])
@settings(max_examples=20)
@given(traces=drawn_traces(), seed=st.integers(0, 99))
def test_loss_and_gradient_are_those_of_separate_rows(
    identity: Identity, weighting: Weighting, traces: list[Trace], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator).requires_grad_()
    batch = trace_batch(traces, identity=identity, weighting=weighting)
    assert batch.logprobs is not None and len(batch.samples) == len(batch.forest)
    rows = [row.tolist() for row in batch.forest.sequences()]
    assert rows == [sample.tokens.tolist() for sample in batch.samples]
    logp = treefx.edge_logprobs(table[batch.forest.tokens], batch.forest)
    advantages = (batch.rewards - batch.rewards.mean())[batch.trial_of_row]
    loss = treefx.losses.clipped(logp, batch.forest, batch.logprobs, advantages, clip=0.2, reduction="sum")
    expected = loss_over_rows(table, traces, weighting)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert isinstance(loss, torch.Tensor)
    (found,) = torch.autograd.grad(loss, table)
    (wanted,) = torch.autograd.grad(expected, table)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_once_is_another_loss_where_a_sampled_node_has_two_rows(tmp_path: Path) -> None:
    traces = read(tmp_path, verifiers_episode())
    weightings: tuple[Weighting, ...] = ("rows", "once")
    samples = {weighting: trace_samples(traces, weighting=weighting) for weighting in weightings}
    counts = {weighting: sum(int((row.labels >= 0).sum()) for row in found) for weighting, found in samples.items()}
    assert counts == {"rows": 3 + 4, "once": 3 + 2}


def test_once_keeps_equal_answers_of_two_trials(tmp_path: Path) -> None:
    """They are independent samples: joining them by their tokens would drop one."""
    traces = read(tmp_path, gym_rollout(rollout=0), gym_rollout(rollout=1))
    batch = trace_batch(traces, weighting="once")
    assert batch.forest.num_tokens == 12 and float(batch.forest.raw_weight.sum()) == 6.0
    by_nodes = trace_batch(traces, weighting="once", identity="nodes").forest
    assert float(by_nodes.raw_weight.sum()) == 6.0 and by_nodes.num_tokens == 18  # the prompt of 6 stands once


@pytest.mark.parametrize("engine", ["verifiers", "results", "gym", "slime", "verl"])
def test_groups_of_each_engine(engine: str, tmp_path: Path) -> None:
    traces = _two_trials(engine, tmp_path)
    batch = trace_batch(traces)
    assert batch.steps.group.tolist() == [0, 0] and batch.rewards[0] != batch.rewards[1]
    advantages = grpo(batch.steps, batch.rewards)[batch.trial_of_row]
    assert advantages.sum() == pytest.approx(0.0) and len(advantages) == len(batch.samples)
    assert batch.logprobs is not None
    for sample, logprobs in zip(batch.samples, batch.logprobs, strict=True):
        assert torch.equal(logprobs != 0, torch.from_numpy(sample.labels >= 0))
    assert (batch.advantages is not None) == (engine == "verl")
    by_nodes = trace_nodes(traces).forest()
    assert by_nodes.num_tokens < by_nodes.raw_tokens and len(by_nodes) == len(batch.samples)


def _two_trials(engine: str, folder: Path) -> list[Trace]:
    makes: dict[str, Any] = {"verifiers": verifiers_episode, "results": verifiers_result}
    if engine in makes:
        return read(folder, makes[engine](10, 1.0), makes[engine](20, 0.0))
    if engine == "gym":
        return read(folder, gym_rollout(10, 0, 1.0), gym_rollout(20, 1, 0.0))
    if engine == "slime":
        return list(read_traces(slime_file(folder / "0.pt", [slime_sample(10, 0, 1.0), slime_sample(20, 1, 0.0)])))
    return traces_of_dataproto(dataproto())


def test_statistics(tmp_path: Path) -> None:
    found = trace_statistics(read(tmp_path, verifiers_episode()))
    assert (found.rows, found.merged_rows, found.conversations, found.tasks) == (3, 2, 1, 1)
    assert (found.raw_tokens, found.merged_tokens, found.tokens) == (8 + 12 + 12, 24, 16)
    assert (found.labelled_tokens, found.longest_row_tokens) == (5, 12)
    texts = read(tmp_path, VERL, VERL | {"output": "no"})
    found = trace_statistics(texts, ByteTokenizer())
    assert (found.rows, found.tasks) == (2, 1) and found.tokens < found.raw_tokens
    with pytest.raises(InputError, match="a trace of texts needs a tokenizer"):
        trace_statistics(texts)


def test_what_no_batch_can_be_made_of(tmp_path: Path) -> None:
    (trace,) = read(tmp_path, gym_rollout())
    with pytest.raises(InputError, match="at least one trace, got none"):
        trace_batch([])
    with pytest.raises(InputError, match="identity must be 'tokens' or 'nodes', got 'text'"):
        trace_batch([trace], identity="text")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="weighting must be 'rows' or 'once', got 'twice'"):
        trace_samples([trace], weighting="twice")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: task 4 needs a reward for each of its trials"):
        trace_batch(read(tmp_path, gym_rollout() | {"reward": None}))
    with pytest.raises(InputError, match="expected at least one trained token, got none in 1 traces"):
        trace_statistics(read(tmp_path, verifiers_episode(agent={"name": "judge", "trainable": False})))
