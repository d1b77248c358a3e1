"""Rollouts of NeMo Gym (NVIDIA, https://github.com/NVIDIA-NeMo/Gym, read at 0.5.1, commit 07d6b0d0).

A line of the file that ``ng_collect_rollouts`` writes is ``{responses_create_params, response: {output: [item]},
reward, _ng_task_index, _ng_rollout_index, ...}`` (``nemo_gym/rollout_collection.py``). With
``return_token_id_information``, the item that ends a model call has ``prompt_token_ids``, ``generation_token_ids`` and
``generation_log_probs`` (``TokenIDLogProbMixin`` of ``nemo_gym/openai_utils.py``); an item that has one of the three
has to have all. Agents that record no token ids leave the fields empty. Generated tokens are trained, prompts are not.
A call whose prompt does not continue an earlier one begins a row; NeMo RL refuses it. ``routed_experts`` are not kept.
"""

from typing import Any

from treefx.data.files import Value
from treefx.data.traces.steps import Step, chain_steps
from treefx.data.traces.trace import Trace
from treefx.data.traces.vectors import read_numbers, read_token_ids, require_fields

__all__ = ["is_nemo_gym", "parse_nemo_gym"]

_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def is_nemo_gym(raw: Any) -> bool:
    """Whether a parsed record is a rollout of NeMo Gym."""
    return isinstance(raw, dict) and "responses_create_params" in raw


def parse_nemo_gym(record: Value) -> list[Trace]:
    """Parse the trace of a record.

    Raises:
        RecordError: a field is missing, of the wrong type or length, or no token ids were recorded.
    """
    output = record["response"]["output"]
    items = output.items("a list of output items")
    steps = [_parse_step(item) for item in items if isinstance(item.raw, dict) and any(map(item.raw.get, _TOKENS))]
    if not steps:
        raise output.place.error(
            f"expected output items with {', '.join(_TOKENS)}, got {len(items)} items without: collect the rollouts "
            "with return_token_id_information: true in the config of the model server"
        )
    task, trial, reward = record.get("_ng_task_index"), record.get("_ng_rollout_index"), record.get("reward")
    return [
        Trace(
            task=str(task.integer() if task else record.place.record),
            trial=trial.integer() if trial else 0,
            nodes=chain_steps(steps),
            reward=reward.number() if reward else None,
            format="NeMo Gym",
            place=record.place,
        )
    ]


def _parse_step(item: Value) -> Step:
    require_fields(item, _TOKENS, "an output item")
    prompt, answer = (read_token_ids(item[name]) for name in _TOKENS[:2])
    logprobs = read_numbers(item["generation_log_probs"], len(answer), "token of generation_token_ids")
    return Step(prompt, answer, answer >= 0, logprobs)
