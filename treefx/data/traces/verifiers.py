"""Traces of verifiers (Prime Intellect, https://github.com/PrimeIntellect-ai/verifiers), releases 0.1.8 to 0.4.0.

Read at v0.3.0-62-ga60a606e, which has the three forms below, and in the wheel of 0.4.0, which has no results:

==================  ====================================================================================================
episode             a line of ``traces.jsonl``: ``{task, env, traces: [trace], group?}`` (``verifiers/v1/episode.py``)
trace               ``{version: 1, task, agent, nodes, rewards}``, ``Trace.to_record`` (``verifiers/v1/trace.py``)
result              a line of ``results.jsonl`` with the column ``trajectory``, a list of
                    ``{prompt, completion, tokens: {prompt_ids, completion_ids, completion_mask, ...}, ...}``
                    (``verifiers/legacy/types.py``, v0.1.8 and later)
==================  ====================================================================================================

A trace holds a graph: each node has its parent and the tokens that its message adds (``verifiers/v1/graph.py``). Its
branches are known, so nothing is searched for. A branch that ends in a compaction from which the agent did not resume
(``semantic_parents``, 0.4.0) is no sample of its engine, and no row here. The steps of a trajectory repeat their
prompts and are chained. Files hold neither pixels nor routed experts: traces with images are refused. From 0.4.0 on,
records have log-probabilities and advantages rounded to four decimals, unless written with
``to_record(float_decimals=None)``.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.data.files import Value
from treefx.data.traces.steps import Step, chain_steps
from treefx.data.traces.trace import Trace, TraceNode
from treefx.data.traces.vectors import read_mask, read_numbers, read_token_ids, require_fields

__all__ = ["is_verifiers", "parse_verifiers"]

_NAME = "verifiers"
_VERSION = 1
_TOKENS = ("prompt_ids", "completion_ids", "completion_mask")


def is_verifiers(raw: Any) -> bool:
    """Whether a parsed record is an episode, a trace, or a result whose trajectory has token ids."""
    return isinstance(raw, dict) and (
        {"task", "traces"} <= raw.keys() or {"task", "agent", "nodes"} <= raw.keys() or _is_result(raw)
    )


def parse_verifiers(record: Value, reward_key: str | None) -> list[Trace]:
    """Parse the traces of a record.

    Raises:
        RecordError: a field is missing, of the wrong type or length, or no token ids were recorded.
    """
    if _is_result(record.raw):
        return [_parse_result(record)]
    if "traces" not in record.raw:
        return [_parse_trace(record, record, reward_key)]
    return [_parse_trace(trace, record, reward_key) for trace in record["traces"].items("a list of traces")]


def _is_result(raw: dict[str, Any]) -> bool:
    steps = raw.get("trajectory")
    return (
        "example_id" in raw and isinstance(steps, list) and any(isinstance(s, dict) and s.get("tokens") for s in steps)
    )


def _parse_trace(trace: Value, episode: Value, reward_key: str | None) -> Trace:
    version, agent = trace.get("version"), trace["agent"]
    if version is not None and version.raw != _VERSION:
        version.fail(f"a trace of version {_VERSION}")
    name, trainable = agent.get("name"), agent.get("trainable")
    nodes = _parse_nodes(trace["nodes"], trainable is None or trainable.boolean())
    task = _task(trace["task"], episode)
    role = name.text() if name else "agent"
    rewards = _rewards(trace.get("rewards"))
    if reward_key is not None and reward_key not in rewards:
        trace["rewards"].fail(f"a reward {reward_key!r}")
    return Trace(
        task=task if role == "agent" else f"{task}, {role}",
        trial=trace.place.record,
        nodes=nodes,
        reward=(rewards[reward_key] if reward_key else sum(rewards.values())) if rewards else None,
        format=_NAME,
        rewards=rewards,
        place=trace.place,
    )


def _task(task: Value, episode: Value) -> str:
    """Return the group that the trainer assigned, else the task's own identity."""
    group, data = episode.get("group"), task.get("data")
    if group:
        return group["id"].text()
    number = data.get("idx") if data else None
    found = task.get("key") or task.get("hash")
    return found.text() if found else str(number.integer() if number else episode.place.record)


def _rewards(given: Value | None) -> dict[str, float]:
    """Return the rewards times their weights, by name; those that were not computed are left out."""
    named = {name: given.get(name) for name in given.raw} if given else {}
    return {name: reward["score"].number() * _weight(reward.get("weight")) for name, reward in named.items() if reward}


def _weight(weight: Value | None) -> float:
    return 1.0 if weight is None else weight.number()


def _parse_nodes(given: Value, trainable: bool) -> tuple[TraceNode, ...]:
    """Parse the graph; nodes without tokens are passed over."""
    entries = given.items("a list of nodes")
    above = [_parse_parent(node, number) for number, node in enumerate(entries)]
    kept = _sampled_branches(entries, above)
    nodes: list[TraceNode] = []
    number_of = {-1: -1}
    unrecorded: Value | None = None
    for number, (node, parent) in enumerate(zip(entries, above, strict=True)):
        if number not in kept:
            continue
        _refuse_images(node["message"])
        tokens = read_token_ids(node["token_ids"]) if node.get("token_ids") else np.empty(0, np.int64)
        if len(tokens):
            nodes.append(_parse_node(node, tokens, number_of[parent], trainable))
        elif _is_sampled(node):
            unrecorded = unrecorded or node
        number_of[number] = len(nodes) - 1 if len(tokens) else number_of[parent]
    if unrecorded is not None or not nodes:
        place = (unrecorded or given).place.inside("token_ids")
        raise place.error(
            "expected the token ids of a sampled message, got none: an evaluation client records texts only; "
            "sample with the train client, which returns token ids"
        )
    return tuple(nodes)


def _sampled_branches(entries: list[Value], above: list[int]) -> set[int]:
    """Return the nodes of branches that are samples: all but those that end in a compaction that was not resumed."""
    links = [_parse_links(node) for node in entries]
    resumed = {node for found in links for node, kind in found if kind == "compaction"}
    kept: set[int] = set()
    for leaf in set(range(len(entries))).difference(above):
        if leaf in resumed or all(kind != "compaction_attempt" for _, kind in links[leaf]):
            while leaf >= 0 and leaf not in kept:
                kept.add(leaf)
                leaf = above[leaf]
    return kept


def _parse_links(node: Value) -> list[tuple[int, str]]:
    links = node.get("semantic_parents")
    return [(link["node"].integer(), link["type"].text()) for link in links.items()] if links else []


def _parse_parent(node: Value, number: int) -> int:
    parent = node.get("parent")
    if parent is None:
        return -1
    above = parent.integer()
    return above if 0 <= above < number else parent.fail(f"the number of an earlier node, below {number}")


def _is_sampled(node: Value) -> bool:
    sampled = node.get("sampled")
    return sampled is not None and sampled.boolean()


def _parse_node(node: Value, tokens: npt.NDArray[np.int64], parent: int, trainable: bool) -> TraceNode:
    size = len(tokens)
    mask = read_mask(node["mask"], size, "token of token_ids")
    streams = node.get("loss_weights")
    weights = {name: streams[name] for name in streams.raw if streams.get(name)} if streams else {}
    return TraceNode(
        tokens,
        parent,
        mask & trainable,
        _spread(node.get("logprobs"), mask),
        _spread(node.get("advantages"), mask),
        loss_weights={name: read_numbers(value, size, "token of token_ids") for name, value in weights.items()},
    )


def _spread(values: Value | None, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64] | None:
    """Put one number per sampled token at its place; None without any."""
    if values is None or values.raw == []:
        return None
    spread = np.zeros(len(mask))
    spread[mask] = read_numbers(values, int(mask.sum()), "true entry of mask")
    return spread


def _refuse_images(message: Value) -> None:
    content = message.get("content")
    for part in content.items() if content is not None and isinstance(content.raw, list) else []:
        kind = part.get("type")
        if kind is not None and kind.raw != "text":
            part.fail("text: the file holds no pixels, so that a row with images cannot be trained")


def _parse_result(record: Value) -> Trace:
    reward = record.get("reward")
    steps = [_parse_step(step) for step in record["trajectory"].items("a list of steps")]
    example = record["example_id"]
    return Trace(
        task=example.text() if isinstance(example.raw, str) else str(example.integer()),
        trial=record.place.record,
        nodes=chain_steps(steps),
        reward=reward.number() if reward else None,
        format=_NAME,
        place=record.place,
    )


def _parse_step(step: Value) -> Step:
    tokens = step.get("tokens")
    if tokens is None:
        raise step.place.inside("tokens").error(
            "is missing or null: the model's server returned no token ids; sample with a client that returns them"
        )
    require_fields(tokens, _TOKENS, "token ids")
    if tokens.get("multi_modal_data"):
        tokens["multi_modal_data"].fail("no images: a row with images cannot be trained from token ids alone")
    prompt, answer = read_token_ids(tokens["prompt_ids"]), read_token_ids(tokens["completion_ids"])
    mask = tokens.get("prompt_mask")
    if mask is not None and read_mask(mask, len(prompt), "token of prompt_ids").any():
        mask.fail("a mask of zeros: tokens of a prompt are not sampled in this step")
    logprobs, advantage, reward = tokens.get("completion_logprobs"), step.get("advantage"), step.get("reward")
    return Step(
        prompt,
        answer,
        read_mask(tokens["completion_mask"], len(answer), "token of completion_ids"),
        read_numbers(logprobs, len(answer), "token of completion_ids") if logprobs and logprobs.raw else None,
        advantage.number() if advantage else None,
        reward.number() if reward else None,
    )
