"""Rows, forests and batches of traces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treefx.data.forest_batches import GroupBatch, forest_of
from treefx.data.samples import IGNORED, Sample
from treefx.data.traces.trace import Trace, TraceNode
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.forests.input import Weighting
from treefx.rl.steps import StepTree

__all__ = ["TraceBatch", "TraceNodes", "trace_batch", "trace_nodes", "trace_samples"]


def trace_samples(traces: Iterable[Trace], *, weighting: Weighting = "rows") -> list[Sample]:
    """Return the rows of traces, as recorded: one per leaf.

    Args:
        traces: from `read_traces`.
        weighting: which rows of a trace train a token that several of them share. "rows": all of them. "once": the
            first one. Tokens of different traces are independent samples, so that each trains its own.

    Returns:
        The samples: labels are token ids where the token is trained, ``turn`` numbers the rows of a trace.

    Raises:
        InputError: a trace has texts only, or there is no such weighting.
    """
    _check(weighting)
    return [
        Sample(tokens, np.where(trained, tokens, IGNORED), trace.task, trace.trial, turn)
        for trace in traces
        for turn, (tokens, trained) in enumerate(_rows(trace, weighting))
    ]


@dataclass(frozen=True, eq=False)
class TraceNodes:
    """Hold the nodes of traces as `Forest.from_nodes` takes them.

    Attributes:
        nodes: per node its token ids, int64 ``[tokens]``.
        parents: per node the number of the node above; -1 at roots.
        weights: per node float64 ``[tokens]``, 1 where a token is trained, else 0.
        ends: the last node of each row, rows in the order of `trace_samples`.
    """

    nodes: list[npt.NDArray[np.int64]]
    parents: list[int]
    weights: list[npt.NDArray[np.float64]]
    ends: list[int]

    def forest(self, *, weighting: Weighting = "rows") -> Forest:
        """Return the forest of the nodes; ``weighting`` as in `Forest.from_nodes`."""
        return Forest.from_nodes(self.nodes, self.parents, self.weights, self.ends, weighting=weighting)


def trace_nodes(traces: Iterable[Trace]) -> TraceNodes:
    """Return the nodes of traces, so that no prefix has to be searched for.

    Nodes of a prompt, in which nothing is trained, are one where they have equal tokens below one parent: all trials of
    a task share its prompt. Sampled nodes are never joined.

    Args:
        traces: from `read_traces`.

    Returns:
        The arguments of `Forest.from_nodes`.

    Raises:
        InputError: a trace has texts only.
    """
    joined = TraceNodes([], [], [], [])
    known: dict[tuple[int, bytes], int] = {}
    for trace in traces:
        _check_tokens(trace)
        number_of: dict[int, int] = {-1: -1}
        for number, node in enumerate(trace.nodes):
            parent = number_of[node.parent]
            fresh = len(joined.nodes)
            key = (parent, node.tokens.tobytes())
            number_of[number] = fresh if node.trained.any() else known.setdefault(key, fresh)
            if number_of[number] == fresh:
                joined.nodes.append(node.tokens)
                joined.parents.append(parent)
                joined.weights.append(node.trained.astype(np.float64))
        joined.ends.extend(number_of[path[-1]] for path in trace.paths())
    return joined


@dataclass(frozen=True, eq=False)
class TraceBatch(GroupBatch):
    """Hold traces as rows. R rows, K traces; a trace has a row per leaf.

    Beyond the attributes of `GroupBatch`:

    Attributes:
        logprobs: per row float64 [T], the sampler's log-probabilities, 0 at tokens that are not trained; None unless
            they were recorded for every trained token. Losses take them as ``old_logp`` or ``sampling_logp``.
        advantages: per row float64 [T], as recorded by the engine; None unless recorded for every trained token.
    """

    logprobs: list[Tensor] | None
    advantages: list[Tensor] | None


def trace_batch(
    traces: Iterable[Trace],
    *,
    weighting: Weighting = "rows",
    identity: Literal["tokens", "nodes"] = "tokens",
) -> TraceBatch:
    """Build the forest of traces, with the values that losses of policies read.

    Args:
        traces: from `read_traces`, at least one.
        weighting: as for `trace_samples`.
        identity: what makes tokens of two rows one. "tokens": equal token ids on equal paths. "nodes": one node, see
            `trace_nodes`; nothing is searched for, and equal beginnings of two answers are computed twice.

    Returns:
        The batch.

    Raises:
        InputError: there is no trace, one has texts only or no reward, or there is no such weighting or identity.
    """
    given = list(traces)
    if not given:
        raise InputError("a batch needs at least one trace, got none")
    if identity not in ("tokens", "nodes"):
        raise InputError(f"identity must be 'tokens' or 'nodes', got {identity!r}")
    samples = trace_samples(given, weighting=weighting)
    forest = forest_of(samples) if identity == "tokens" else trace_nodes(given).forest(weighting=weighting)
    groups: dict[tuple[str, str], int] = {}
    numbers = [groups.setdefault(trace.group, len(groups)) for trace in given]
    counts = torch.tensor([len(trace.paths()) for trace in given])
    return TraceBatch(
        samples,
        forest,
        torch.tensor([_reward(trace) for trace in given], dtype=torch.float64),
        StepTree.from_paths([[number] for number in range(len(given))], numbers),
        torch.repeat_interleave(torch.arange(len(given)), counts),
        _values(given, "logprobs"),
        _values(given, "advantages"),
    )


def _rows(trace: Trace, weighting: Weighting) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Return per row its tokens and which of them it trains."""
    _check_tokens(trace)
    trained_before: set[int] = set()
    rows = []
    for path in trace.paths():
        masks = [trace.nodes[i].trained & (i not in trained_before) for i in path]
        rows.append((np.concatenate([trace.nodes[i].tokens for i in path]), np.concatenate(masks)))
        if weighting == "once":
            trained_before.update(path)
    return rows


def _values(traces: Sequence[Trace], name: Literal["logprobs", "advantages"]) -> list[Tensor] | None:
    """Return values of all rows; None if a trained token has none."""

    def of(node: TraceNode) -> Any:
        values = getattr(node, name)
        return np.zeros(len(node.tokens)) if values is None else np.where(node.trained, values, 0.0)

    if any(node.trained.any() and getattr(node, name) is None for trace in traces for node in trace.nodes):
        return None
    return [
        torch.from_numpy(np.concatenate([of(trace.nodes[i]) for i in path]))
        for trace in traces
        for path in trace.paths()
    ]


def _reward(trace: Trace) -> float:
    if trace.reward is None:
        where = trace.place or f"trial {trace.trial}"
        got = f"rewards by name ({', '.join(trace.rewards)}): choose one by read_traces(reward_key=)"
        raise InputError(
            f"{where}: task {trace.task} needs a reward for each of its trials, got "
            f"{got if trace.rewards else 'none for this one'}"
        )
    return trace.reward


def _check_tokens(trace: Trace) -> None:
    if trace.texts is not None:
        where = trace.place or f"trial {trace.trial}"
        raise InputError(
            f"{where}: expected token ids and a loss mask, got texts only: verl's JSON lines record neither; save the "
            "DataProto, and read it with traces_of_dataproto"
        )


def _check(weighting: str) -> None:
    if weighting not in ("rows", "once"):
        raise InputError(f"weighting must be 'rows' or 'once', got {weighting!r}")
