"""Rollouts of slime (https://github.com/THUDM/slime, read at v0.3.1, commit 624b824a).

``--save-debug-rollout-data`` writes one file per step by ``torch.save``: ``{rollout_id, samples: [sample]}``
(``slime/observability/rollout_data_utils.py``). A sample is ``Sample.to_dict()`` (``slime/utils/types.py``): ``tokens``
of prompt and response, ``response_length``, ``loss_mask`` and ``rollout_log_probs`` of the response, ``reward``,
``group_index``, ``index`` and ``rollout_id``. Without a loss mask all of the response is trained; a sample with
``remove_sample`` trains nothing. A reward may be an object of rewards by name, of which the caller chooses one. Samples
with images are refused; ``rollout_routed_experts`` are not kept.
"""

from typing import Any

import numpy as np

from treefx.data.files import Value
from treefx.data.traces.steps import Step, nodes_of_answer
from treefx.data.traces.trace import Trace
from treefx.data.traces.vectors import read_mask, read_numbers, read_token_ids

__all__ = ["is_slime", "parse_slime"]

_UNIT = "token of the response"


def is_slime(raw: Any) -> bool:
    """Whether a loaded document is a step of rollouts of slime."""
    return isinstance(raw, dict) and {"rollout_id", "samples"} <= raw.keys()


def parse_slime(record: Value, reward_key: str | None) -> list[Trace]:
    """Parse the traces of a step, one per sample.

    Raises:
        RecordError: a field is missing or of the wrong type or length.
    """
    samples = record["samples"].items("a list of samples")
    if not samples:
        record["samples"].fail("at least one sample")
    return [_parse_sample(sample, number, reward_key) for number, sample in enumerate(samples)]


def _parse_sample(sample: Value, number: int, reward_key: str | None) -> Trace:
    if not isinstance(sample.raw, dict):
        sample.fail("a sample, an object with tokens and response_length")
    for name in ("multimodal_inputs", "multimodal_train_inputs"):
        if sample.raw.get(name):
            raise sample.place.inside(name).error("expected none: a row with images cannot be trained from token ids")
    tokens, size = read_token_ids(sample["tokens"]), sample["response_length"].integer()
    if not len(tokens):
        sample["tokens"].fail("at least one token id")
    if not 0 <= size <= len(tokens):
        sample["response_length"].fail(f"a number of tokens, at most the {len(tokens):,} of tokens")
    mask, logprobs, removed = sample.get("loss_mask"), sample.get("rollout_log_probs"), sample.get("remove_sample")
    trained = read_mask(mask, size, _UNIT) if mask else np.ones(size, dtype=np.bool_)
    if removed and removed.boolean():
        trained = np.zeros(size, dtype=np.bool_)
    recorded = read_numbers(logprobs, size, _UNIT) if logprobs else None
    step = Step(tokens[: len(tokens) - size], tokens[len(tokens) - size :], trained, recorded)
    index, group, rollout = (sample.get(name) for name in ("index", "group_index", "rollout_id"))
    task, trial = group or index, rollout or index
    reward, rewards = _read_reward(sample.get("reward"), reward_key)
    return Trace(
        task=str(task.integer() if task else number),
        trial=trial.integer() if trial else number,
        nodes=tuple(nodes_of_answer(step)),
        reward=reward,
        format="slime",
        rewards=rewards,
        place=sample.place,
    )


def _read_reward(reward: Value | None, key: str | None) -> tuple[float | None, dict[str, float]]:
    """Return the reward that counts, and all that are numbers by name."""
    if reward is None or not isinstance(reward.raw, dict):
        return (None if reward is None else Value(_plain(reward.raw), reward.place).number()), {}
    plain = {name: _plain(raw) for name, raw in reward.raw.items()}
    named = {name: float(raw) for name, raw in plain.items() if type(raw) in (int, float, bool)}
    return (None if key is None else Value(plain, reward.place)[key].number()), named


def _plain(raw: Any) -> Any:
    return raw.item() if hasattr(raw, "item") else raw
