"""Adapt ``transformers.Trainer`` and its subclasses: batches that share, and metrics.

Written for transformers 5.23, where ``_get_train_sampler`` gives a trainer the order of its rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.trainer_callback import TrainerCallback

from treefx.data.prefix_sampler import PrefixSampler
from treefx.errors import InputError
from treefx.inspection.inspector import inspect
from treefx.integrations.metrics import metrics_of
from treefx.reason_codes import UNCOMPILED, marked, with_code
from treefx.refusal_codes import BATCH_ORDER

__all__ = [
    "COLUMNS",
    "SharingCallback",
    "keep_groups",
    "keep_groups_of_all",
    "log_sharing",
    "log_sharing_of_all",
    "token_columns",
]

_log = logging.getLogger("treefx")

COLUMNS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")
"""Columns of token ids that follow each other in a row: of transformers and of TRL's SFT, DPO, KTO and Reward."""


def keep_groups(trainer: Any, columns: Sequence[str] | None = None) -> None:
    """Let the rows that share prefixes come in one batch; call it before ``trainer.train()``.

    The number of rows of a batch, of batches and of steps stays; the composition of batches changes, and their order is
    drawn every epoch from ``data_seed`` (or ``seed``). In several processes every one gets whole batches.

    Args:
        trainer: a ``transformers.Trainer``, or one built on it, over a dataset with a length.
        columns: the columns of the dataset that hold a row's token ids, one behind the other; those it has of
            `COLUMNS` when None.

    Raises:
        InputError: the trainer samples its own rows, is told of another order of them, or has no dataset with a length
            and such columns.

    A trainer that does not ask itself for the order of its rows keeps it, and that is logged as a warning.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=dataset)  # doctest: +SKIP
        >>> treefx.integrations.transformers.keep_groups(trainer)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if hasattr(trainer, "_buffered_inputs"):
        raise InputError(
            f"expected a trainer that trains on the rows of its dataset, got {type(trainer).__name__}, which samples "
            "its own; use treefx.integrations.trl.keep_groups(trainer)"
        )
    strategy = getattr(trainer.args, "train_sampling_strategy", "random")
    if strategy != "random":
        raise InputError(
            f"keep_groups draws the order of rows itself, got train_sampling_strategy={strategy!r}, which sets "
            "another one; leave one of the two out"
        )
    dataset = trainer.train_dataset
    names = token_columns(dataset) if columns is None else tuple(columns)
    seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed

    @functools.cache  # one tree, over all epochs
    def sampler_of(rows: int) -> PrefixSampler:
        return PrefixSampler(list(_sequences(dataset, names)), rows, seed=seed)

    def sampler(train_dataset: Any = None) -> PrefixSampler:
        asked.append(True)
        return sampler_of(getattr(trainer, "_train_batch_size", None) or trainer.args.train_batch_size)

    def loader() -> Any:
        made = make_loader()
        if not asked:
            text = "rows keep their order: %s puts them into batches by itself %s"
            _log.warning(text, type(trainer).__name__, marked(BATCH_ORDER))
        return made

    asked: list[bool] = []
    make_loader = trainer.get_train_dataloader
    trainer._get_train_sampler, trainer.get_train_dataloader = sampler, loader


def token_columns(dataset: Any) -> tuple[str, ...]:
    """Those of `COLUMNS` that a dataset has.

    Raises:
        InputError: it has no length, or none of them.
    """
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise InputError(
            "keep_groups expects a trainer over a dataset with a length, whose rows can come in another order, got "
            f"{type(dataset).__name__}; let a stream yield rows that share prefixes one after the other"
        )
    first = dataset[0]
    known = list(first) if isinstance(first, Mapping) else []
    found = tuple(name for name in COLUMNS if name in known)
    if not found:
        raise InputError(
            f"keep_groups expects rows with token ids in a column of {', '.join(COLUMNS)}, got "
            f"{', '.join(map(str, known)) or type(first).__name__}; name them: keep_groups(trainer, columns=[...])"
        )
    return found


def _sequences(dataset: Any, columns: Sequence[str]) -> Iterator[npt.NDArray[np.int64]]:
    """The token ids of every row."""
    if hasattr(dataset, "select_columns"):  # of `datasets`: the others need not be read
        dataset = dataset.select_columns(list(columns))
    for number in range(len(dataset)):
        row = dataset[number]
        yield np.concatenate([np.asarray(row[name], dtype=np.int64) for name in columns])


class SharingCallback(TrainerCallback):
    """Log the sharing of treefx among the trainer's metrics, as ``treefx/...``.

    Add it with `log_sharing`.

    ``sharing`` and ``sharing_possible`` are of the last optimizer step, ``compiles`` and ``compile_seconds`` of the
    run; ``fallback`` is 1 where the last call shared nothing for a reason. The reason is logged once as a warning
    unless a `treefx.SharingWarning` gave it; so is that Dynamo gave up compiling further kinds of calls. Nothing is
    added for a model that treefx has not run.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **more: Any) -> None:
        """Add to the metrics of training steps, and to the history."""
        if logs is None or "loss" not in logs:
            return
        try:
            stats = inspect(model).stats
        except InputError:
            return
        metrics = metrics_of(stats)
        logs.update(metrics)
        state.log_history[-1].update(metrics)
        fallback = None if stats["warned"] else stats["fallback"]  # the warning said it
        for reason, code in ((fallback, stats["fallback_code"]), (stats["uncompiled"], UNCOMPILED)):
            if reason is not None and reason not in self._warned:
                self._warned.add(reason)
                _log.warning("treefx shares nothing: %s", with_code(reason, code))


def log_sharing(trainer: Any) -> None:
    """Log sharing, fallbacks and compilation with the trainer's metrics.

    Puts a `SharingCallback` in front of all callbacks that report.

    ``callbacks=[SharingCallback()]`` stands behind them: it reaches the history, and reports that are printed after it.
    """
    trainer.callback_handler.callbacks.insert(0, SharingCallback())


def log_sharing_of_all(trainers: Any) -> None:
    """Apply `log_sharing` to all later instances of a class of trainers.

    It works with any callbacks they choose themselves.
    """
    make = trainers.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        log_sharing(self)

    trainers.__init__ = init


def keep_groups_of_all(trainers: Any) -> None:
    """Apply `keep_groups` to all trainers of a class when they train; log refusals."""
    train = trainers.train

    @functools.wraps(train)
    def grouped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if not hasattr(self, "_buffered_inputs"):  # TRL's that sample their rows are hooked by themselves
                keep_groups(self)
        except InputError as reason:
            _log.warning("rows keep their order: %s %s", reason, marked(BATCH_ORDER))
        return train(self, *args, **kwargs)

    trainers.train = grouped
