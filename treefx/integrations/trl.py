"""Keep the rows of a group in one micro-batch of TRL's trainers.

Trainers that do not sample get rows that share prefixes in one batch.

Written for TRL 1.16; 1.10 buffers rows the same way. GRPO, RLOO and distillation sample the rows of several
micro-batches at once (``_prepare_inputs``), permute all of them and cut micro-batches, which wait in
``_buffered_inputs``. With 8 generations a prompt and 4 micro-batches of 8 rows, one holds rows of 3.7 prompts then.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from treefx.data.prefix_sampler import cut_into_batches
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.integrations import transformers
from treefx.reason_codes import marked
from treefx.refusal_codes import BATCH_ORDER

__all__ = ["keep_groups", "regroup"]

Rows = dict[str, Any]
"""Tensors [R, ...] or lists of R, tensors without dimensions (of all rows together), and None."""
_PARTS = ("prompt", "completion")


def keep_groups(trainer: Any) -> None:
    """Bring rows with common prefixes into one micro-batch; call before ``trainer.train()``.

    GRPO, RLOO and distillation: every optimizer step trains on the rows that TRL drew for it, dealt out to its
    micro-batches so that those of a prompt (and within it those that share more) meet. The step's gradient is the same
    up to the order of summation where the loss is a sum over rows with a normaliser of the whole step. Terms that TRL
    normalises per micro-batch depend on its rows, under any order: ``loss_type="bnpo"``, ``top_entropy_quantile < 1``,
    an entropy bonus, the auxiliary loss of routers. A trainer given here is regrouped all the same; those of a class
    given here then keep TRL's order, and say so. With several steps per generation (``steps_per_generation >
    gradient_accumulation_steps``) TRL has scattered a group over them, and only rows of one step stay together.

    All others (SFT, DPO, reward): `treefx.integrations.transformers.keep_groups`. KTO pairs a row with its neighbours
    before it trains and keeps their order (``train_sampling_strategy="sequential"``), but with
    ``loss_type="apo_zero_unpaired"``: order its dataset instead.

    Args:
        trainer: a trainer of TRL, or a class of those that sample, for all trainers made of it.

    Raises:
        InputError: as for the trainers of transformers, or a class of them.

    Example:
        >>> trainer = GRPOTrainer(model, rewards, train_dataset=prompts)  # doctest: +SKIP
        >>> treefx.integrations.trl.keep_groups(trainer)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if isinstance(trainer, type):
        if not hasattr(trainer, "_generate_and_score_completions"):
            raise InputError(f"expected a trainer, or a class of those that sample their rows, got {trainer.__name__}")
        hooked = _regrouping(trainer._prepare_inputs, always=False)  # type: ignore[attr-defined]
        setattr(trainer, "_prepare_inputs", hooked)
    elif hasattr(trainer, "_buffered_inputs"):
        hooked = _regrouping(type(trainer)._prepare_inputs, always=True)
        trainer._prepare_inputs = functools.partial(hooked, trainer)
    else:
        transformers.keep_groups(trainer)


def _regrouping(prepare: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
    """Wrap a trainer's ``_prepare_inputs`` to regroup newly buffered rows."""
    if hasattr(prepare, "keeps_groups"):
        prepare = prepare.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(prepare)
    def prepare_inputs(self: Any, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = prepare(self, generation_batch)
        buffered = self._buffered_inputs
        if buffered is None or buffered is before or not (always or _may_regroup(self)):
            return inputs
        # In runs of this many, micro-batches belong to one optimizer step, however many a generation serves.
        together = math.gcd(len(buffered), self.args.gradient_accumulation_steps)
        runs = [buffered[start : start + together] for start in range(0, len(buffered), together)]
        self._buffered_inputs = [batch for run in runs for batch in regroup(run)]
        return next(new for new, old in zip(self._buffered_inputs, buffered) if old is inputs)

    setattr(prepare_inputs, "keeps_groups", True)
    return prepare_inputs


def _may_regroup(trainer: Any) -> bool:
    """Whether no term of the loss depends on which rows meet in a micro-batch."""
    terms = {
        'loss_type="bnpo"': getattr(trainer.args, "loss_type", None) == "bnpo",
        "top_entropy_quantile < 1": getattr(trainer.args, "top_entropy_quantile", 1.0) < 1.0,
        "the entropy bonus": getattr(trainer, "_entropy_bonus_enabled", False),
        "the auxiliary loss of routers": getattr(trainer, "aux_loss_enabled", False),
    }
    found = next((term for term, is_there in terms.items() if is_there), None)
    if found is not None and trainer not in _told:
        _told.add(trainer)
        _log.warning(
            "micro-batches keep their order, in which groups are scattered: %s is normalised per micro-batch; "
            "treefx.integrations.trl.keep_groups(trainer) regroups them all the same %s",
            found,
            marked(BATCH_ORDER),
        )
    return found is None


_told: weakref.WeakSet[Any] = weakref.WeakSet()
_log = logging.getLogger("treefx")


def regroup(micro_batches: Sequence[Rows]) -> list[Rows]:
    """Regroup the rows of micro-batches of equal size so that common prefixes meet.

    Args:
        micro_batches: with ``prompt_ids``, ``prompt_mask``, ``completion_ids`` and ``completion_mask`` [B, ...] each.

    Raises:
        InputError: there are no such tensors.
    """
    if len(micro_batches) < 2:
        return list(micro_batches)
    rows = _join([split_pixel_values_by_grid(batch) for batch in micro_batches])
    forest = Forest.from_sequences(list(_sequences(rows)))
    size = len(forest) // len(micro_batches)
    # Drawn from a separate generator: TRL's permutations and the model's dropout stay unchanged.
    batches = cut_into_batches(forest, size, np.random.default_rng(len(forest)))
    order = [row for batch in batches for row in batch]
    dealt = {name: _take(value, order) for name, value in rows.items()}
    parts: list[Any] = split_tensor_dict(dealt, len(micro_batches))
    return [unsplit_pixel_values_by_grid(batch) for batch in parts]


def _sequences(rows: Rows) -> Iterator[Tensor]:
    """Every row's tokens under its masks."""
    missing = [name for part in _PARTS for name in (f"{part}_ids", f"{part}_mask") if rows.get(name) is None]
    if missing:
        raise InputError(
            f"keep_groups expects sampled rows with prompt_ids, prompt_mask, completion_ids and completion_mask, as "
            f"TRL 1.16 buffers them, got none of {', '.join(missing)}, but {', '.join(rows)}"
        )
    ids, mask = (torch.cat([rows[f"{part}_{kind}"] for part in _PARTS], 1).cpu() for kind in ("ids", "mask"))
    return (row[kept.bool()] for row, kept in zip(ids, mask))


def _join(batches: Sequence[Rows]) -> Rows:
    return {name: _concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _concatenate(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return first if first.ndim == 0 else torch.cat(values)
    return first if first is None else [item for value in values for item in value]


def _take(value: Any, order: list[int]) -> Any:
    if isinstance(value, Tensor):
        return value if value.ndim == 0 else value[torch.tensor(order, device=value.device)]
    return value if value is None else [value[row] for row in order]
