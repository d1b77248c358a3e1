"""Check that all ranks got the same arguments, once, through their process group's store.

Ranks that compute a step each for itself, and take their own share of it, train on rows twice or never if one of them
was given something else; nothing fails. No collective is used: a rank that is alone (one that only lists its batches)
waits a little, says so, and goes on.
"""

from __future__ import annotations

import datetime
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from treefx.errors import InputError

__all__ = ["require_same"]

_SECONDS = 30.0
"""How long a rank waits for the others."""
_DIFFER = (
    "{what} needs the same arguments on all ranks, but {name} differs: {theirs} on rank {rank}, {ours} on rank "
    "{first}; give all ranks the same rows in the same order, the same options, and the cost that one rank measured"
)
_ALONE = (
    "{what} could not be compared between ranks: rank {missing} did not begin within {seconds:g} s; all ranks should "
    "iterate over it, with the same arguments"
)
_calls: Counter[str] = Counter()


def require_same(what: str, facts: Callable[[], Mapping[str, str]], rank: int, ranks: int) -> None:
    """Compare this rank's arguments with those of the other ranks of the default group.

    Args:
        what: subject of the comparison, for messages; its n-th comparison on one rank matches the n-th on the others.
        facts: returns the facts that have to be equal, by readable name.
        rank: of this process.
        ranks: how many there are.

    Raises:
        InputError: a fact differs; on every rank that sees it, with the ranks.
    """
    store = _store(ranks)
    if store is None:
        return
    _calls[what] += 1
    keys = [f"treefx/{what}/{_calls[what]}/{number}" for number in range(ranks)]
    try:
        store.set(keys[rank], json.dumps(dict(facts())))
    except (NotImplementedError, RuntimeError):  # the stores of groups that are made up
        return
    missing = _wait(store, keys)
    if missing:
        warnings.warn(_ALONE.format(what=what, missing=", ".join(map(str, missing)), seconds=_SECONDS), stacklevel=4)
    there = [number for number in range(ranks) if number not in missing]
    _compare(what, {number: json.loads(store.get(keys[number])) for number in there})


def _compare(what: str, given: Mapping[int, Mapping[str, str]]) -> None:
    first = min(given)
    for name, ours in given[first].items():
        for rank, facts in given.items():
            if facts.get(name) != ours:
                raise InputError(
                    _DIFFER.format(what=what, name=name, theirs=facts.get(name), rank=rank, ours=ours, first=first)
                )


def _wait(store: Any, keys: list[str]) -> list[int]:
    """The ranks that did not come in time."""
    try:
        store.wait(keys, datetime.timedelta(seconds=_SECONDS))
    except RuntimeError:  # and its descendants: none of the stores names the key
        return [number for number, key in enumerate(keys) if not store.check([key])]
    return []


def _store(ranks: int) -> Any:
    """Return the default group's store; None outside of its processes and in loader workers."""
    if ranks < 2 or get_worker_info() is not None or not (dist.is_available() and dist.is_initialized()):
        return None
    find: Any = getattr(dist.distributed_c10d, "_get_default_store", None)
    return find() if find is not None and dist.get_world_size() == ranks else None
