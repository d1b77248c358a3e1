"""Small traces, written by hand in exactly the form of each engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "DataProto",
    "dataproto",
    "gym_rollout",
    "slime_file",
    "slime_sample",
    "verifiers_episode",
    "verifiers_result",
]

SYSTEM, ASK = [1, 2], [3, 4, 5]


def node(parent: int | None, role: str, tokens: list[int], sampled: int = 0, **more: Any) -> dict[str, Any]:
    """A `MessageNode` of verifiers, as ``model_dump(exclude_none=True)`` writes it; the last tokens are sampled."""
    mask = [False] * (len(tokens) - sampled) + [True] * sampled
    found = {
        "message": {"role": role, "content": role},
        "sampled": sampled > 0,
        "timestamp": 1.0,
        "token_ids": tokens,
        "mask": mask,
        "is_content": [],
        "logprobs": [-0.5 - number for number in range(sampled)],
    }
    return (found if parent is None else found | {"parent": parent}) | more


def verifiers_trace(answer: int, score: float, **more: Any) -> dict[str, Any]:
    """A trace with two branches behind its first answer, such as a compaction makes."""
    nodes = [
        node(None, "system", SYSTEM),
        node(0, "user", ASK),
        node(1, "assistant", [9, answer, 11], sampled=2),
        node(2, "tool", [6, 7]),
        node(3, "assistant", [9, 12], sampled=1),
        node(2, "user", [8]),
        node(5, "assistant", [9, 13, 14], sampled=2),
    ]
    return {
        "version": 1,
        "id": "0",
        "verifiers": {"version": "0.3.0"},
        "task": {"type": "Task", "data": {"idx": 4, "prompt": "ask"}, "key": "k"},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": nodes,
        "rewards": {"right": {"score": score, "weight": 1.0}, "short": {"score": 2.0, "weight": 0.25}},
        "metrics": {},
        "is_completed": True,
        "ok": True,
    } | more


def verifiers_episode(answer: int = 10, score: float = 1.0, **trace: Any) -> dict[str, Any]:
    """A line of ``traces.jsonl``."""
    found = verifiers_trace(answer, score, **trace)
    return {"id": "e", "env": {"id": "gsm8k"}, "task": found["task"], "ok": True, "errors": [], "traces": [found]}


def verifiers_result(answer: int = 10, reward: float = 1.0) -> dict[str, Any]:
    """A line of ``results.jsonl`` with the column ``trajectory``: step 1 continues step 0, step 2 none."""
    first = [*SYSTEM, *ASK, 9]
    second = [*first, answer, 11, 6, 7, 9]
    steps = [step(first, [answer, 11]), step(second, [12]), step([*SYSTEM, 8, 9], [13, 14])]
    call = '{"id": "c", "name": "look", "arguments": "{\\"up\\": 1}"}'
    return {
        "example_id": 4,
        "prompt": [{"role": "user", "content": "ask"}],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "found"},
            {"role": "assistant", "content": "done"},
        ],
        "reward": reward,
        "tool_defs": [{"name": "look", "description": "looks", "parameters": {}}],
        "trajectory": steps,
        "metrics": {},
    }


def step(prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """A `TrajectoryStep` of verifiers."""
    return {
        "prompt": [],
        "completion": [],
        "tokens": {
            "prompt_ids": prompt,
            "prompt_mask": [0] * len(prompt),
            "completion_ids": answer,
            "completion_mask": [1] * len(answer),
            "completion_logprobs": [-0.5 - number for number in range(len(answer))],
            "overlong_prompt": False,
            "is_truncated": False,
            "routed_experts": None,
        },
        "reward": 0.5,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": "t",
        "extras": {},
    }


def gym_rollout(answer: int = 10, rollout: int = 0, reward: float = 1.0) -> dict[str, Any]:
    """A line of NeMo Gym's rollouts: a call of a tool, its output, and an answer."""
    first = [*SYSTEM, *ASK, 9]
    called = {
        "prompt_token_ids": first,
        "generation_token_ids": [answer, 11],
        "generation_log_probs": [-0.5, -1.5],
    }
    answered = {
        "prompt_token_ids": [*first, answer, 11, 6, 7, 9],
        "generation_token_ids": [12],
        "generation_log_probs": [-0.5],
    }
    output = [
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}", **called},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
        {"type": "message", "role": "assistant", "content": [], **answered},
    ]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "ask"}], "tools": []},
        "response": {"id": "resp", "object": "response", "output": output},
        "reward": reward,
        "_ng_task_index": 4,
        "_ng_rollout_index": rollout,
        "agent_ref": {"name": "simple_agent"},
    }


def slime_sample(answer: int = 10, index: int = 0, reward: Any = 1.0, **more: Any) -> dict[str, Any]:
    """``Sample.to_dict()`` of slime: the answer of a tool stands in the response."""
    return {
        "group_index": 4,
        "index": index,
        "rollout_id": None,
        "prompt": "ask",
        "tokens": [*SYSTEM, *ASK, 9, answer, 11, 6, 7, 9, 12],
        "response": "text",
        "response_length": 6,
        "label": None,
        "reward": reward,
        "loss_mask": [1, 1, 0, 0, 0, 1],
        "rollout_log_probs": [-0.5, -1.5, 0.0, 0.0, 0.0, -0.5],
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "rollout_routed_experts": torch.zeros(11, 2, 2, dtype=torch.int32),
        "spec_info": {},
    } | more


def slime_file(path: Path, samples: list[dict[str, Any]]) -> Path:
    """A file of ``--save-debug-rollout-data``."""
    torch.save({"rollout_id": 0, "samples": samples}, path)
    return path


@dataclass
class DataProto:
    """As verl's: tensors by name, and arrays of objects."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)


def dataproto() -> DataProto:
    """Two rows of one prompt: prompts padded on the left, responses on the right."""
    prompts = torch.tensor([[0, *SYSTEM, *ASK, 9]] * 2)
    responses = torch.tensor([[10, 11, 6, 7, 9, 12], [20, 11, 0, 0, 0, 0]])
    shown = torch.cat([(prompts != 0).long(), (responses != 0).long()], dim=1)
    mask = torch.tensor([[1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0]])
    scores = torch.zeros(2, 6)
    scores[0, 5], scores[1, 1] = 1.0, 0.25
    batch = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": shown,
        "position_ids": torch.zeros_like(shown),
        "response_mask": mask,
        "rollout_log_probs": torch.tensor([[-0.5, -1.5, -9.0, -9.0, -9.0, -0.5], [-0.5, -1.5, -9.0, -9.0, -9.0, -9.0]]),
        "advantages": mask * torch.tensor([[1.0], [-1.0]]),
        "token_level_scores": scores,
    }
    return DataProto(batch, {"uid": ["u", "u"]})
