"""Share prefixes in verl's engines, with a prompt's rows on one rank and micro-batch.

Written for verl 0.9.1, whose trainers balance rows over ranks by length, and whose engine balances a rank's rows over
micro-batches by length again: with 8 answers to a prompt few micro-batches hold two of them. ``treefx run`` hooks all
of it, and so does the entry point ``verl.plugins`` under ``VERL_USE_EXTERNAL_PLUGINS=treefx``.
The engine feeds packed rows to a model under FSDP, so the model is converted, not compiled.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from inspect import signature
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.errors import ConfigError, InputError, UnsupportedError
from treefx.inspection.inspector import inspect
from treefx.reason_codes import with_code
from treefx.refusal_codes import TRAINER
from treefx.runtime.converted.convert import convert

__all__ = [
    "convert_engines",
    "convert_megatron_engines",
    "group_micro_batches",
    "group_ranks",
    "pack_ids_on_all_stages",
]

_log = logging.getLogger("treefx")

IntArray = npt.NDArray[np.int64]
Balance = Callable[[Sequence[int], int, bool], "list[list[int]]"]
"""verl's ``get_seqlen_balanced_partitions``: workloads, number of parts, whether parts are equally long -> rows of each
part."""
Cut = Callable[[Sequence[int], int, Balance], "list[list[int]] | None"]
"""Workloads of rows, a number of parts, verl's own way -> the rows of every part, or None: verl's own way is taken."""

_cut: ContextVar[Cut | None] = ContextVar("_cut", default=None)


def convert_engines(engines: Any, *, min_sharing: float = 1.15) -> None:
    """Convert the models of an engine (`treefx.convert`), and report sharing in its metrics.

    An engine with FSDP1 (``strategy="fsdp"``), whose flat parameters are untested, or with sequence parallelism, which
    splits rows, keeps its model unchanged and logs a warning.

    Args:
        engines: ``verl.workers.engine.fsdp.transformer_impl.FSDPEngine``, or a class made of it.
        min_sharing: as of `treefx.convert`.
    """

    def convert_module(engine: Any, module: Any) -> Any:
        _check_engine(engine.engine_config)
        return convert(module, min_sharing=min_sharing)

    _convert_what_is_built(engines, "_build_module", convert_module)


def convert_megatron_engines(engines: Any, *, min_sharing: float = 1.15) -> None:
    """Convert the models of a Megatron engine.

    See `treefx.integrations.megatron.convert`.

    A model that is refused (context parallelism, FP8, ...) stays unchanged, and that is logged as a warning.

    Args:
        engines: ``verl.workers.engine.megatron.transformer_impl.MegatronEngine``, or a class made of it.
        min_sharing: as of `treefx.convert`.
    """

    def convert_chunks(engine: Any, module: Any) -> Any:
        return import_module("treefx.integrations.megatron").convert(module, min_sharing=min_sharing)

    _convert_what_is_built(engines, "_build_megatron_module", convert_chunks)


def pack_ids_on_all_stages(util: Any) -> None:
    """Pass the packed token ids to every pipeline stage of verl.

    Each of them builds the tree of the call.

    Args:
        util: the module ``verl.models.mcore.util``.
    """
    for name in ("preprocess_packed_seqs", "preprocess_thd_no_padding", "preprocess_thd_engine"):
        pack = getattr(util, name, None)
        if pack is not None and not hasattr(pack, "__wrapped__"):
            setattr(util, name, _with_ids(pack))


def _with_ids(pack: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pack)
    def packed(*args: Any, **kwargs: Any) -> Any:
        given = signature(pack).bind(*args, **kwargs)
        given.arguments["pre_process"] = True
        return pack(*given.args, **given.kwargs)

    return packed


def _convert_what_is_built(engines: Any, method: str, convert_built: Callable[[Any, Any], Any]) -> None:
    build, run = getattr(engines, method), engines.forward_backward_batch

    @functools.wraps(build)
    def build_module(self: Any) -> Any:
        module = build(self)
        try:
            return convert_built(self, module)
        except (ConfigError, UnsupportedError) as reason:
            _log.warning("verl runs without treefx: %s", with_code(str(reason), TRAINER))
            return module

    @functools.wraps(run)
    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        output = run(self, data, loss_function, forward_only=forward_only)
        if not forward_only and "metrics" in output:  # the last stage of a pipeline has them
            chunks = self.module if isinstance(self.module, list) else [self.module]
            output["metrics"].update(_metrics(chunks[0]))
        return output

    setattr(engines, method, build_module)
    engines.forward_backward_batch = forward_backward_batch


def _check_engine(config: Any) -> None:
    if config.strategy != "fsdp2":
        raise UnsupportedError(
            f"treefx expects verl's engine with strategy=fsdp2, got {config.strategy!r}; write "
            "actor_rollout_ref.actor.strategy=fsdp2"
        )
    if config.ulysses_sequence_parallel_size > 1:
        raise UnsupportedError(
            "treefx expects whole rows, got ulysses_sequence_parallel_size="
            f"{config.ulysses_sequence_parallel_size}; shared prefixes make rows shorter: try 1"
        )


def _metrics(module: Any) -> dict[str, list[float]]:
    """As verl's engines give them: one figure per micro-batch, or one."""
    try:
        stats = inspect(module).stats
    except InputError:  # nothing has run
        return {}
    found = {"sharing": stats["step_sharing_ratio"], "sharing_possible": stats["sharing_possible"]}
    return {f"treefx/{name}": [float(value)] for name, value in found.items() if value is not None}


def group_micro_batches(balancing: Any) -> None:
    """Let micro-batches of a limited number of tokens hold rows that share prefixes.

    The number of micro-batches and the limit, in tokens of rows, are verl's; a step's gradient is the same up to the
    order of summation, as for any other distribution of its rows.

    Args:
        balancing: the module ``verl.utils.seqlen_balancing``.
    """
    rearrange, balance = balancing.rearrange_micro_batches, balancing.get_seqlen_balanced_partitions

    @functools.wraps(rearrange)
    def rearrange_micro_batches(batch: Any, max_token_len: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("force_group_size", 1) > 1:  # pairs of reward models: verl keeps them together
            return rearrange(batch, max_token_len, *args, **kwargs)
        rows = _PrefixOrder(list(_rows(batch)))
        with _cutting(lambda workloads, parts, balance: rows.cut(parts, int(max_token_len))):
            return rearrange(batch, max_token_len, *args, **kwargs)

    @functools.wraps(balance)
    def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> Any:
        cut = _cut.get()
        found = None if cut is None else cut(seqlen_list, k_partitions, balance)
        return balance(seqlen_list, k_partitions, equal_size) if found is None else found

    balancing.rearrange_micro_batches = rearrange_micro_batches
    balancing.get_seqlen_balanced_partitions = get_seqlen_balanced_partitions


def group_ranks(trainers: Any) -> None:
    """Let the rows of a prompt be on one rank.

    That is where all prompts have as many rows, and all ranks can get as many prompts; else rows are dealt out prompt
    by prompt, and few prompts are on two ranks.

    Args:
        trainers: a class with verl's method ``_balance_batch``, from a module that was imported after
            `group_micro_batches`.
    """
    make = trainers._balance_batch

    @functools.wraps(make)
    def balance_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        prompts = _prompts(batch)
        with _cutting(functools.partial(_whole_prompts, prompts)):
            return make(self, batch, *args, **kwargs)

    trainers._balance_batch = balance_batch


@contextmanager
def _cutting(cut: Cut) -> Iterator[None]:
    before = _cut.set(cut)
    try:
        yield
    finally:
        _cut.reset(before)


def _rows(batch: Any) -> Iterator[IntArray]:
    """The token ids of every row: nested, or padded under a mask."""
    ids = batch["input_ids"]
    if ids.is_nested:
        yield from (row.cpu().numpy() for row in ids.unbind())
        return
    yield from (row[kept.bool()].cpu().numpy() for row, kept in zip(ids, batch["attention_mask"], strict=True))


class _PrefixOrder:
    """Rows in lexicographic order, in which those that share prefixes are neighbours."""

    def __init__(self, rows: Sequence[IntArray]) -> None:
        self.order = np.asarray(sorted(range(len(rows)), key=lambda row: tuple(rows[row].tolist())))
        in_order = [rows[row] for row in self.order]
        self.ends = np.cumsum([0, *map(len, in_order)])
        """int64 [R + 1]: tokens of the rows before each place between them."""
        self.shared = np.asarray([0, *map(_common, in_order, in_order[1:]), 0])
        """int64 [R + 1]: tokens that are in two parts where a part begins there."""

    def cut(self, parts: int, limit: int) -> list[list[int]]:
        """Cut neighbours into exactly this many parts, with the fewest tokens in two parts.

        A part has at most `limit` tokens of rows.

        Where that needs more parts, return parts of equally many rows above the limit: verl then requests more parts.
        """
        starts = self._starts(parts, limit)
        cut = np.array_split(self.order, parts) if starts is None else np.split(self.order, starts)
        return [sorted(rows.tolist()) for rows in cut]

    def _starts(self, parts: int, limit: int) -> list[int] | None:
        """Where parts after the first begin, by dynamic programming over their number."""
        places = np.arange(len(self.ends))
        widest = int((places - np.searchsorted(self.ends, self.ends - limit)).max())
        begins = places[:, None] - np.arange(widest, 0, -1)  # of a part that ends at a place
        fits = (begins >= 0) & (self.ends[:, None] - self.ends[begins.clip(0)] <= limit)
        cost = np.where(places == 0, 0.0, np.inf)
        taken: list[IntArray] = []
        for _ in range(parts):
            prices = np.where(fits, (cost + self.shared)[begins.clip(0)], np.inf)
            best = prices.argmin(1)
            taken.append(begins[places, best])
            cost = prices[places, best]
        if not np.isfinite(cost[-1]):
            return None
        starts = [len(self.order)]
        for begin in reversed(taken):
            starts.append(int(begin[starts[-1]]))
        return starts[-2:0:-1]


def _common(a: IntArray, b: IntArray) -> int:
    """Tokens with which both begin."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def _prompts(batch: Any) -> list[Hashable]:
    """Name each row's prompt: ``uid``, or the keys ``uid_session_index`` of verl's queue."""
    if hasattr(batch, "keys") and isinstance(batch.keys, list):
        return [key.split("_", 1)[0] for key in batch.keys]
    return list(batch.non_tensor_batch.get("uid", ()))


def _whole_prompts(
    prompts: Sequence[Hashable], workloads: Sequence[int], ranks: int, balance: Balance
) -> list[list[int]] | None:
    """Put rows of a prompt on one rank, or next to each other if that is uneven."""
    if not prompts or len(prompts) > len(workloads):
        return None
    # verl appends rows of padding so that all ranks get as many.
    named = [*prompts, *["padding"] * (len(workloads) - len(prompts))]
    rows = sorted(range(len(named)), key=lambda row: (str(named[row]), row))
    groups = [list(group) for _, group in groupby(rows, key=lambda row: named[row])]
    sizes = Counter(map(len, groups))
    if len(sizes) > 1 or len(groups) % ranks:
        return [sorted(part.tolist()) for part in np.array_split(np.asarray(rows), ranks)]
    work = [sum(int(workloads[row]) for row in group) for group in groups]
    return [sorted(row for group in part for row in groups[group]) for part in balance(work, ranks, True)]
