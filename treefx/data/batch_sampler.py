"""Rows to micro-batches: a batch sampler that puts rows with a common prefix together.

A batch computes its distinct tokens, so a prefix that two batches need is computed twice. Batches are filled from the
leaves of the prefix tree up: at every node, deepest first, the subtrees below it are packed first-fit, largest first,
within the budget. So rows with the longest common prefixes meet.

For several ranks, batches like that are dealt out by size, or the rows of each step are shared out among the ranks by
``treefx.scale`` (``rank_steps``): whichever is predicted to take less time, all steps together.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from treefx.arguments import check_number, check_whole
from treefx.data.rank_steps import deal_rows
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.forests.subset import select_rows
from treefx.planning.cost.model import CostModel, Size
from treefx.scale.agreement import require_same
from treefx.scale.assign import rank_forest

__all__ = ["TreeBatchSampler", "distinct_tokens", "first_fit_batches"]


@dataclass(eq=False, slots=True)
class _Bundle:
    """Rows that go together, and the distinct tokens they have below the node at hand."""

    rows: list[int]
    tokens: int


class TreeBatchSampler(Sampler[list[int]]):
    """Yield batches of row numbers, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    Every row is in exactly one batch of an epoch, over all ranks. Which small trees share a batch and the order of the
    batches are random, and differ from epoch to epoch after `set_epoch`; rows that share prefixes stay together.
    All of it follows from the arguments and the epoch: every rank computes the same and takes its own. Where the ranks
    are the processes of `torch.distributed`, they compare their arguments when they begin for the first time.

    Args:
        sequences: the token ids of every row.
        max_tokens: most distinct tokens of a batch.
        memory_limit_bytes: instead of `max_tokens`: most bytes of a step by `cost`.
        cost: the model's cost, from `treefx.profile(...).cost`; needed with `memory_limit_bytes`. Also gives the times
            that ranks are balanced by; without it, a batch's time counts as its distinct tokens.
        num_replicas: ranks that train together. Each gets the same number of batches, and batches that run at the same
            time are of nearly equal predicted time. Where too few rows are left for all ranks, a batch is empty.
        rank: this one's number.
        weights: of every row, as for `Forest.from_sequences`; read by `forests` alone.
        shuffle: random order; otherwise largest predicted time first.
        seed: of the order; the same on all ranks.

    Raises:
        InputError: no or both budgets, a row that is over the budget alone, or fewer rows than ranks; when iteration
            begins: another rank has other rows, another order of them, or other options.

    Example:
        >>> sampler = TreeBatchSampler([[1, 2, 3], [7, 8], [1, 2, 4]], max_tokens=4)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 2], [1]]
    """

    def __init__(
        self,
        sequences: Sequence[Any],
        max_tokens: int | None = None,
        *,
        memory_limit_bytes: int | None = None,
        cost: CostModel | None = None,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        weights: Sequence[Any] | None = None,
    ) -> None:
        check_whole(num_replicas, "num_replicas", least=1)
        check_whole(seed, "seed")
        if check_whole(rank, "rank") >= num_replicas:
            raise InputError(f"rank must be in [0, num_replicas = {num_replicas}), got {rank}")
        self.forest = Forest.from_sequences(sequences, weights)
        self.max_tokens = _read_budget(max_tokens, memory_limit_bytes, cost)
        self.cost, self.num_replicas, self.rank = cost, num_replicas, rank
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        longest = int(self.forest.row_lengths.argmax())
        if int(self.forest.row_lengths[longest]) > self.max_tokens:
            raise InputError(
                f"the budget must hold every row, {self.max_tokens:,} tokens, but row {longest} has "
                f"{int(self.forest.row_lengths[longest]):,}: raise it, drop long rows, or plan with treefx.plan"
            )
        if len(self.forest) < num_replicas:
            raise InputError(
                f"expected at least one row per rank, got {len(self.forest)} rows for {num_replicas} ranks"
            )
        self._steps: list[list[list[int]]] = []
        self._made_for = -1
        self._is_compared = False

    def set_epoch(self, epoch: int) -> None:
        """Change the order of batches.

        Call it with the same number on all ranks, as for `DistributedSampler`.
        """
        self.epoch = epoch

    @property
    def sampler(self) -> "TreeBatchSampler":
        """Return self: Lightning and accelerate call `set_epoch` of a batch sampler's sampler."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches."""
        self._compare_ranks()
        return (step[self.rank] for step in self.steps())

    def forests(self) -> Iterator[Forest]:
        """Yield this rank's batches as forests; losses sum over ranks to the loss of the step.

        Means divide by the whole step's weights, as with `treefx.scale.shard_rows`; see there for DDP and FSDP2. A rank
        without rows gets one of weight 0. Values per row are given for the rows of the step, of all ranks, in ascending
        order of their numbers.
        """
        self._compare_ranks()
        for step in self.steps():
            rows = sorted(row for own in step for row in own)
            place = {row: at for at, row in enumerate(rows)}
            yield rank_forest(select_rows(self.forest, rows), sorted(place[row] for row in step[self.rank]))

    def __len__(self) -> int:
        """Batches per rank in this epoch."""
        return len(self.steps())

    def steps(self) -> list[list[list[int]]]:
        """Return the batches of all ranks of this epoch: per step, one batch per rank."""
        if self._made_for != self.epoch:
            self._steps = self._make_steps()
            self._made_for = self.epoch
        return self._steps

    def _compare_ranks(self) -> None:
        if not self._is_compared:
            require_same("TreeBatchSampler", self._facts, self.rank, self.num_replicas)
            self._is_compared = True

    def _facts(self) -> dict[str, str]:
        """All that decides about the batches, as digests where it is long."""
        forest = self.forest.to("cpu")
        ids, path, ends = forest.tokens.numpy(), forest.flat_token_of.numpy(), forest.row_offsets.tolist()
        rows = [_digest(ids[path[start:end]].tobytes()) for start, end in zip(ends, ends[1:], strict=False)]
        cost = "none" if self.cost is None else _digest(json.dumps(self.cost.to_dict(), default=str).encode())
        return {
            "the number of rows": str(len(rows)),
            "the token ids of the rows": _digest("".join(sorted(rows)).encode()),
            "the order of the rows": _digest("".join(rows).encode()),
            "the weights": _digest(forest.raw_weight.numpy().tobytes()),
            "seed": str(self.seed),
            "epoch": str(self.epoch),
            "shuffle": str(self.shuffle),
            "cost": cost,
            "the budget in tokens": str(self.max_tokens),
            "what follows from all that (versions of numpy and treefx)": _digest(json.dumps(self.steps()).encode()),
        }

    def _make_steps(self) -> list[list[list[int]]]:
        random = np.random.default_rng([self.seed, self.epoch if self.shuffle else 0])
        found = [self._deal_batches(random)]
        if self.num_replicas > 1:
            found.append(deal_rows(self.forest, self.num_replicas, self.max_tokens, self.cost, random))
        steps = min(found, key=self._price)
        steps = sorted(steps, key=lambda step: max(map(self._seconds, step)), reverse=True)
        if self.shuffle:
            # Within a step too, or rank 0 would always have the largest.
            steps = [[step[i] for i in random.permutation(self.num_replicas)] for step in steps]
            steps = [steps[i] for i in random.permutation(len(steps))]
        return steps

    def _deal_batches(self, random: np.random.Generator) -> list[list[list[int]]]:
        """Batches made without regard to ranks, those of nearly equal time in one step."""
        batches = _even_out(_fill_batches(self.forest, self.max_tokens, random), self.num_replicas)
        seconds = [self._seconds(batch) for batch in batches]
        order = sorted(range(len(batches)), key=seconds.__getitem__, reverse=True)
        return [
            [batches[i] for i in order[start : start + self.num_replicas]]
            for start in range(0, len(order), self.num_replicas)
        ]

    def _price(self, steps: list[list[list[int]]]) -> tuple[int, float]:
        """Batches without rows, and predicted time of all steps."""
        return sum(not own for step in steps for own in step), sum(max(map(self._seconds, step)) for step in steps)

    def _seconds(self, rows: list[int]) -> float:
        """Predicted time of a batch, or its distinct tokens."""
        if not rows:
            return 0.0
        tokens = _tokens_of(self.forest, rows)
        if self.cost is None:
            return float(len(tokens))
        pairs = int((self.forest.depth.cpu().numpy()[tokens].astype(np.int64) + 1).sum())
        size = Size(len(tokens), 0, len(tokens), 0, pairs)
        return self.cost.forward_seconds(size) + self.cost.backward_seconds(size)


def distinct_tokens(forest: Forest, batches: Sequence[Sequence[int]]) -> int:
    """Sum the distinct tokens of all batches: the tokens that training computes.

    Args:
        forest: all rows.
        batches: row numbers of each batch.

    Returns:
        A number of tokens; a prefix counts once per batch that needs it.
    """
    return sum(len(_tokens_of(forest, rows)) for rows in batches)


def first_fit_batches(forest: Forest, max_tokens: int) -> list[list[int]]:
    """Fill batches in order of arrival: each row goes into the first batch with room.

    This is the baseline; the budget counts distinct tokens.

    As the sparse tree mode of AReaL 1.0 packs its trees.

    Args:
        forest: all rows.
        max_tokens: most distinct tokens of a batch, at least 1; a longer row is a batch alone.

    Returns:
        Row numbers of each batch.

    Raises:
        InputError: `max_tokens` is no positive whole number.
    """
    check_whole(max_tokens, "max_tokens", least=1)
    batches: list[list[int]] = []
    covered: list[npt.NDArray[np.bool_]] = []
    for row, path in enumerate(forest.token_of):
        tokens = path.cpu().numpy()
        for batch, mask in zip(batches, covered, strict=True):
            if int(mask.sum()) + len(tokens) - int(mask[tokens].sum()) <= max_tokens:
                break
        else:
            batch, mask = [], np.zeros(forest.num_tokens, dtype=np.bool_)
            batches.append(batch)
            covered.append(mask)
        batch.append(row)
        mask[tokens] = True
    return batches


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _read_budget(max_tokens: int | None, limit: int | None, cost: CostModel | None) -> int:
    """The most distinct tokens of a batch."""
    if (max_tokens is None) == (limit is None):
        raise InputError(f"expected max_tokens or memory_limit_bytes, got max_tokens={max_tokens} and {limit} bytes")
    if max_tokens is not None:
        return check_whole(max_tokens, "max_tokens", least=1)
    if cost is None:
        raise InputError("memory_limit_bytes needs cost=, the model's bytes per token: treefx.profile(...).cost")
    limit = int(check_number(limit, "memory_limit_bytes", "a positive number of bytes", above=0))
    return cost.most_tokens(limit - cost.resident_bytes)


def _tokens_of(forest: Forest, rows: Sequence[int]) -> npt.NDArray[np.int64]:
    tokens: npt.NDArray[np.int64] = torch.unique(torch.cat([forest.token_of[row] for row in rows])).cpu().numpy()
    return tokens


def _fill_batches(forest: Forest, budget: int, random: np.random.Generator) -> list[list[int]]:
    """Put rows together from the leaves up; see the module's documentation."""
    nodes = forest.nodes
    start, stop, parent = (x.cpu().numpy() for x in (nodes.start, nodes.stop, nodes.parent))
    above = forest.depth.cpu().numpy()[start].astype(np.int64)
    last = forest.flat_token_of[forest.row_offsets[1:] - 1].cpu().numpy()
    ends = np.searchsorted(start, last, side="right") - 1
    waiting: list[list[_Bundle]] = [[] for _ in range(len(nodes) + 1)]
    for row, node in enumerate(ends.tolist()):
        # Rows that end in a node are of no tokens below it: one bundle for all.
        if not waiting[node]:
            waiting[node].append(_Bundle([], 0))
        waiting[node][0].rows.append(row)
    for node in range(len(nodes) - 1, -1, -1):
        length = int(stop[node] - start[node])
        bundles = _first_fit(waiting[node], budget - int(above[node]) - length)
        waiting[node] = []
        for bundle in bundles:
            bundle.tokens += length
        waiting[int(parent[node])] += bundles  # the last list is for -1, the roots
    roots = [waiting[-1][i] for i in random.permutation(len(waiting[-1]))]
    return [bundle.rows for bundle in _first_fit(roots, budget)]


def _first_fit(bundles: list[_Bundle], room: int) -> list[_Bundle]:
    """Put bundles together, the largest first, each to the first it fits with."""
    groups: list[_Bundle] = []
    open_groups: list[_Bundle] = []
    smallest = min((bundle.tokens for bundle in bundles), default=0)
    for bundle in sorted(bundles, key=lambda bundle: -bundle.tokens):
        for group in open_groups:
            if group.tokens + bundle.tokens <= room:
                group.rows += bundle.rows
                group.tokens += bundle.tokens
                break
        else:
            group = bundle
            groups.append(group)
            open_groups.append(group)
        if group.tokens + smallest > room:
            open_groups.remove(group)
    return groups


def _even_out(batches: list[list[int]], ranks: int) -> list[list[int]]:
    """Halve the batches with most rows until every rank gets as many."""
    batches = sorted(batches, key=len)
    while len(batches) % ranks:
        largest = batches.pop()
        middle = len(largest) // 2
        batches = sorted([*batches, largest[:middle], largest[middle:]], key=len)
    return batches
