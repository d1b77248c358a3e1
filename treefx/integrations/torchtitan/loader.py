"""Load batches of torchtitan with rows that share prefixes.

Documents are laid out in the order of their prefix tree, so that those of a batch have long beginnings in common, one
behind the other in rows of ``training.seq_len``, with positions that start at 0 in each, as torchtitan's own loaders
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

from treefx.data.packed_batches import PackedBatch, packed_batches
from treefx.errors import InputError

__all__ = ["ForestDataLoader"]

Documents = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Token ids of each document and its labels: the same ids, -100 where nothing is learned."""


class ForestDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Yield batches of documents that share prefixes, without end; ranks take turns.

    Args:
        config: ``documents`` gives all of them, from torchtitan's tokenizer; ``seed`` is of the order of batches.

    Raises:
        InputError: a document is longer than a row, or there is none.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        documents: Annotated[Callable[[Any], Documents], tyro.conf.Suppress]
        seed: int = 0

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, tokenizer: Any, seq_len: int, local_batch_size: int,
        **others: Any,
    ) -> None:  # fmt: skip
        documents = config.documents(tokenizer)
        self._batches = packed_batches(documents, rows=local_batch_size, columns=seq_len)
        self._seed, self._ranks, self._rank, self._taken = config.seed, dp_world_size, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield ``({"input": ids, "positions": positions}, labels)``, int64 [B, L] each.

        A resumed loader continues where it stopped.
        """
        while True:
            batch = self._at(self._taken * self._ranks + self._rank)
            self._taken += 1
            ids, positions, labels = (torch.from_numpy(item) for item in batch)
            yield {"input": ids, "positions": positions}, labels

    def _at(self, place: int) -> PackedBatch:
        epoch, number = divmod(place, len(self._batches))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._batches))
        return self._batches[int(order[number])]

    def state_dict(self) -> dict[str, Any]:
        """How many batches this rank has had."""
        return {"taken": self._taken, "ranks": self._ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            InputError: the state is of another number of ranks.
        """
        if state_dict and state_dict["ranks"] != self._ranks:
            raise InputError(f"expected the state of {self._ranks} data-parallel ranks, got {state_dict['ranks']}")
        self._taken = state_dict.get("taken", 0)
