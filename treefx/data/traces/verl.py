"""Rollouts of verl (https://github.com/volcengine/verl, read at v0.7.0-125-gb178a3cd and in the wheel of 0.9.1).

``trainer.rollout_data_dir`` gets a file of JSON lines per step: ``{input, output, gts, score, step, ...}``
(``RayPPOTrainer._dump_generations``). These are texts, decoded without special tokens: they can be counted, but
neither their token ids nor the loss mask are recorded, so no row can be trained from them. A group is the answers to
one input of one step.

A ``DataProto`` has both. ``DataProto.save_to_disk`` writes a pickle, whose loading may run any code: load it with verl,
and hand the object to `traces_of_dataproto`.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treefx.data.files import Value
from treefx.data.traces.steps import Step, nodes_of_answer
from treefx.data.traces.trace import Trace, TraceNode
from treefx.documents import names
from treefx.errors import InputError

__all__ = ["is_verl", "parse_verl", "traces_of_dataproto"]

_NAME = "verl"
_DUMP = {"input", "output", "score", "step"}


def is_verl(raw: Any) -> bool:
    """Whether a parsed record is a line of a dump."""
    return isinstance(raw, dict) and raw.keys() >= _DUMP


def parse_verl(record: Value) -> list[Trace]:
    """Parse the texts of a record.

    Raises:
        RecordError: a field is of the wrong type.
    """
    texts = (record["input"].text(), record["output"].text())
    digest = hashlib.blake2b(texts[0].encode(), digest_size=8).hexdigest()
    task, score = f"step {record['step'].integer()}, prompt {digest}", record.get("score")
    reward = score.number() if score else None
    return [Trace(task, record.place.record, (), reward, _NAME, texts=texts, place=record.place)]


def traces_of_dataproto(data: Any) -> list[Trace]:
    """Read the rows of a ``DataProto``.

    Rows of one ``uid`` form a group. The reward is the sum of ``token_level_scores``, else of ``rm_scores``.

    Args:
        data: a padded batch: ``data.batch`` has ``prompts`` [B, P], ``responses`` [B, R], ``input_ids`` and
            ``attention_mask`` [B, P + R], optionally ``response_mask``, ``rollout_log_probs``, ``advantages`` and
            scores, [B, R] each; ``data.non_tensor_batch`` may have ``uid`` [B].

    Returns:
        One trace per row. Without ``response_mask``, all of the response is trained.

    Raises:
        InputError: a tensor is missing or of another shape, a mask contradicts the padding, or there are images.

    Example:
        >>> traces = traces_of_dataproto(DataProto.load_from_disk("rollout_dump"))  # doctest: +SKIP
    """
    batch, other = _read_batch(data)
    rows, width = batch["responses"].shape
    start = batch["prompts"].shape[1]
    shown, ids = batch["attention_mask"].astype(np.bool_), batch["input_ids"]
    trained = batch.get("response_mask", batch["attention_mask"][:, start:])
    _check_row_values(batch, trained, start)
    scores = batch.get("token_level_scores", batch.get("rm_scores"))
    uids = other.get("uid")
    traces = []
    for row in range(rows):
        kept = shown[row, start:]
        answer = ids[row, start:][kept]
        at = {
            name: np.where(trained[row] != 0, batch[name][row], 0.0)[kept].astype(np.float64)
            for name in ("rollout_log_probs", "advantages")
            if name in batch
        }
        step = Step(ids[row, :start][shown[row, :start]], answer, trained[row][kept] != 0, at.get("rollout_log_probs"))
        nodes = nodes_of_answer(step)
        if len(answer) and "advantages" in at:
            last = nodes[-1]
            nodes[-1] = TraceNode(last.tokens, last.parent, last.trained, last.logprobs, at["advantages"])
        reward = None if scores is None else float(scores[row].astype(np.float64).sum())
        task = str(row if uids is None else uids[row])
        traces.append(Trace(task, row, tuple(nodes), reward, _NAME))
    return traces


def _read_batch(data: Any) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the tensors as arrays and the other values, after checking names and shapes."""
    given, other = getattr(data, "batch", None), getattr(data, "non_tensor_batch", None)
    if given is None or other is None:
        raise InputError(f"expected a DataProto with batch and non_tensor_batch, got {type(data).__name__}")
    required = ("prompts", "responses", "input_ids", "attention_mask")
    if missing := [name for name in required if name not in given.keys()]:
        raise InputError(f"a DataProto needs {', '.join(required)}, got none of {', '.join(missing)}: {names(given)}")
    for name in ("multi_modal_inputs", "multi_modal_data"):
        if any(bool(each) for each in other.get(name, ())):
            raise InputError(f"{name}: expected none, as a row with images cannot be trained from token ids alone")
    optional = ("response_mask", "rollout_log_probs", "advantages", "token_level_scores", "rm_scores")
    batch = {name: given[name] for name in (*required, *optional) if name in given.keys()}
    for name, tensor in batch.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.ndim != 2:
            raise InputError(f"{name}: expected a padded tensor of two dimensions, got {_form(tensor)}")
    rows, start, width = len(batch["responses"]), batch["prompts"].shape[1], batch["responses"].shape[1]
    shapes = {"prompts": (rows, start), "input_ids": (rows, start + width), "attention_mask": (rows, start + width)}
    for name, tensor in batch.items():
        if tensor.shape != (expected := shapes.get(name, (rows, width))):
            raise InputError(f"{name}: expected shape {list(expected)}, got {list(tensor.shape)}")
    return {name: _as_array(tensor) for name, tensor in batch.items()}, other


def _check_row_values(batch: dict[str, npt.NDArray[Any]], trained: npt.NDArray[Any], start: int) -> None:
    """Refuse masks with holes or beyond the tokens, contradicting ids, and numbers that are not finite."""
    shown, ids = batch["attention_mask"], batch["input_ids"]
    joined = np.concatenate([batch["prompts"], batch["responses"]], axis=1)
    edges = np.diff(np.pad(shown != 0, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    trains = trained != 0
    used = {name: batch[name] for name in ("rollout_log_probs", "advantages") if name in batch}
    checks = {
        "attention_mask: expected 0 and 1": (shown != 0) & (shown != 1),
        "attention_mask: expected one run of ones": (edges == 1).sum(axis=1, keepdims=True) != 1,
        "response_mask: expected 0 and 1": (trained != 0) & (trained != 1),
        "response_mask: expected 0 where attention_mask is 0": trains & (shown[:, start:] == 0),
        "input_ids: expected prompts and responses end to end": (ids != joined) & (shown != 0),
        "input_ids: expected token ids of at least 0": (ids < 0) & (shown != 0),
    } | {f"{name}: expected finite numbers": trains & ~np.isfinite(values) for name, values in used.items()}
    for problem, wrong in checks.items():
        if wrong.any():
            raise InputError(f"row {int(np.argmax(wrong.any(axis=1)))} of the DataProto, {problem}")


def _as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    plain = tensor.detach().cpu()
    return (plain.double() if plain.is_floating_point() else plain.long()).numpy()


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return "a nested tensor" if value.is_nested else f"shape {list(value.shape)}"
